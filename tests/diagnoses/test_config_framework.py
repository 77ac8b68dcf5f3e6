"""What Lightning, Accelerate and Transformers refuse themselves; the messages are theirs, word for word."""

import pytest

from dsdoctor.case import Case
from dsdoctor.dsconfig import load_config
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import USER, failed

SITE = "/env/lib/python3.11/site-packages"
LIGHTNING = Frame(file=f"{SITE}/lightning/pytorch/strategies/deepspeed.py", line=924, function="_format_batch_size")
ACCELERATE = Frame(file=f"{SITE}/accelerate/accelerator.py", line=2252, function="_prepare_deepspeed")
PLUGIN = Frame(file=f"{SITE}/accelerate/utils/dataclasses.py", line=1277, function="__post_init__")
TRANSFORMERS = Frame(
    file=f"{SITE}/transformers/integrations/deepspeed.py", line=225, function="trainer_config_finalize"
)
MISCONFIGURED = "lightning.fabric.utilities.exceptions.MisconfigurationException"

NO_STEPS = (
    "Do not set `gradient_accumulation_steps` in the DeepSpeed config as this will be set with the "
    "`accumulate_grad_batches` argument passed via the Lightning Trainer."
)
TWO_OPTIMIZERS = (
    "You cannot specify an optimizer in the config file and in the code at the same time. Please remove the optimizer "
    "from the config file or create `accelerate.utils.DummyOptim` in the code."
)
NO_SCHEDULER = (
    "Either specify a scheduler in the config file or pass in the `lr_scheduler_callable` parameter when using "
    "`accelerate.utils.DummyScheduler`."
)
NO_BATCH = (
    "When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or evaluation "
    "dataloaders with `batch_size` attribute returning an integer value or alternatively set an integer value in "
    "`train_micro_batch_size_per_gpu` in the deepspeed config file or assign integer value to "
    "`AcceleratorState().deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu']`."
)
NO_ZERO = "Please specify the ZeRO optimization config in the DeepSpeed config."
NO_HIDDEN_SIZE = (
    "The model's config file has neither `hidden_size` nor `hidden_sizes` entry, therefore it's not possible to "
    "automatically fill out the following `auto` entries in the DeepSpeed config file: "
    "['zero_optimization.reduce_bucket_size']. You can fix that by replacing `auto` values for these keys with an "
    "integer value of your choice."
)
NO_PATH = "You passed in a path to a DeepSpeed config but the path does not exist: ds.json"
ID = "config/refused-by-framework"

POSITIVE = {
    ID: [
        failed(MISCONFIGURED, NO_STEPS, USER, LIGHTNING),
        failed("ValueError", TWO_OPTIMIZERS, USER, ACCELERATE),
        failed("ValueError", NO_SCHEDULER, USER, ACCELERATE),
        failed("ValueError", NO_BATCH, USER, ACCELERATE),
        failed("ValueError", NO_ZERO, USER, PLUGIN),
        failed("ValueError", NO_HIDDEN_SIZE, USER, TRANSFORMERS),
    ]
}
NEGATIVE = {
    ID: [
        failed(MISCONFIGURED, NO_PATH, USER, LIGHTNING),
        failed(MISCONFIGURED, "DeepSpeed does not support clipping gradients by value.", USER, LIGHTNING),
        failed("ValueError", TWO_OPTIMIZERS, ACCELERATE, USER),
        failed("ValueError", "Please correct the following DeepSpeed config values that mismatch kwargs", USER, PLUGIN),
        Case(),
    ]
}


@pytest.mark.parametrize("case", POSITIVE[ID])
def test_positive(case):
    assert found(case, ID)


@pytest.mark.parametrize("case", NEGATIVE[ID])
def test_negative(case):
    assert not found(case, ID)


@pytest.mark.parametrize(
    ("message", "frame", "keys", "patch"),
    [
        (NO_STEPS, LIGHTNING, ("gradient_accumulation_steps",), {"gradient_accumulation_steps": None}),
        (TWO_OPTIMIZERS, ACCELERATE, ("optimizer",), {"optimizer": None}),
        (NO_SCHEDULER, ACCELERATE, ("scheduler",), None),
        (NO_BATCH, ACCELERATE, ("train_micro_batch_size_per_gpu",), None),
        (NO_ZERO, PLUGIN, ("zero_optimization",), None),
        (NO_HIDDEN_SIZE, TRANSFORMERS, ("zero_optimization.reduce_bucket_size",), None),
    ],
)
def test_names_the_key_and_leaves_out_what_is_not_wanted(message, frame, keys, patch):
    given = {"gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}
    config = load_config(given, release="0.19.8", world_size=2)
    case = Case(config=config, runs=failed("ValueError", message, USER, frame).runs)
    (finding,) = found(case, ID)
    assert (finding.keys, finding.fixes[0].patch) == (keys, patch)
    assert not found(case, "launch/user-exception")
