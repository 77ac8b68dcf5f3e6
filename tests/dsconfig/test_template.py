"""Configs that --new writes: clean by our own rules, and taken by DeepSpeed, with and without Hugging Face."""

import itertools

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import keys, load_config, patch
from dsdoctor.dsconfig.template import NothingFits, Wish, fitting
from tests.dsconfig.real import INSTALLED, ask

GIB = 2**30
SIZES = (125_000_000, 7_000_000_000, 30_000_000_000)
FILLED_IN = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-5,
    "optimizer.params.weight_decay": 0.0,
    "fp16.enabled": True,
    "bf16.enabled": True,
}
"""What Hugging Face's Trainer writes in the place of "auto"."""


def wish(parameters, precision="bf16", hugging_face=False):
    return Wish(
        parameters=parameters,
        gpus=8,
        gpu_bytes=80 * GIB,
        host_bytes=1000 * GIB,
        precision=precision,
        hugging_face=hugging_face,
    )


def filled_in(config):
    for key, value in keys.leaves(config):
        if value == "auto":
            config = patch.apply(config, keys.as_patch(key, FILLED_IN[key]))
    return config


def test_clean_and_taken_by_deepspeed():
    written = []
    for parameters, precision, hugging_face in itertools.product(SIZES, ("bf16", "fp16"), (False, True)):
        config = fitting(wish(parameters, precision, hugging_face)).config
        framework = "transformers" if hugging_face else "deepspeed"
        facts = load_config(config, release=INSTALLED, world_size=8, framework=framework)
        assert not diagnose(Case(config=facts), strict=True).findings, config
        assert hugging_face == ("auto" in dict(keys.leaves(config)).values())
        written.append(filled_in(config))
    assert {answer.error for answer in ask(written, world_size=8)} == {None}


def test_a_larger_model_asks_for_more():
    stages = [fitting(wish(parameters)).config["zero_optimization"]["stage"] for parameters in SIZES]
    assert stages == sorted(stages)
    assert stages[0] < stages[-1]


def test_what_fits_nowhere_is_said():
    with pytest.raises(NothingFits, match="at no ZeRO stage"):
        fitting(wish(9 * 10**12))


def test_what_no_gpu_can_hold_whole_is_built_in_shards():
    """70e9 parameters are 140 GB in 16 bit: on GPUs of 80 GiB that takes zero.Init, which is said."""
    wanted = Wish(parameters=70_000_000_000, gpus=8, gpu_bytes=80 * GIB, host_bytes=2000 * GIB)
    chosen = fitting(wanted)
    assert chosen.config["zero_optimization"]["stage"] == 3
    assert any("zero.Init" in text and "stage 3" in text for text in chosen.assumptions)
