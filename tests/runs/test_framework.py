"""Who hands the config to DeepSpeed, from the script's text."""

import pytest

from dsdoctor.runs.framework import guess


@pytest.mark.parametrize(
    ("source", "framework"),
    [
        ("import deepspeed\nengine, *_ = deepspeed.initialize(model=m)", "deepspeed"),
        ("from transformers import Trainer, TrainingArguments", "transformers"),
        ("import transformers\nt = transformers.Trainer(m)", "transformers"),
        ("from transformers import AutoModel\nimport deepspeed\ndeepspeed.initialize(model=m)", "deepspeed"),
        ("from accelerate import Accelerator", "accelerate"),
        ("import lightning as L\nclass M(L.LightningModule): pass", "lightning"),
        ("from my.own import train\ntrain()", None),
        ("this is not python (", None),
        ("# from transformers import Trainer", None),
    ],
)
def test_guess(source, framework):
    assert guess(source) == framework
