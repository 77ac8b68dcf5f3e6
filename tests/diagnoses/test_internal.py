"""Errors of DeepSpeed itself, told apart from its answers to wrong requests."""

import pytest

from dsdoctor.case import Case
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import ENGINE, INITIALIZE, MODULE, TORCH, USER, failed, failure, log_failure, run, steps

PARTITION = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py",
    line=412,
    function="get_data_parallel",
)
INDEX = ("IndexError", "tuple index out of range", USER, INITIALIZE, PARTITION)
CHECK = ("ValueError", "something must be something", USER, INITIALIZE, PARTITION)
PASSES = run(leg="without-deepspeed", steps=steps((1.0, 0.9)))


def with_plain(told, plain):
    return Case(runs=(run(failure(*told)), plain))


POSITIVE = {
    "deepspeed/internal-error": [
        with_plain(INDEX, PASSES),
        with_plain(CHECK, PASSES),
        with_plain(("RuntimeError", "not implemented for 'ComplexFloat'", USER, PARTITION, TORCH), PASSES),
        log_failure(*INDEX),
    ],
}
NEGATIVE = {
    "deepspeed/internal-error": [
        failed(*INDEX),
        with_plain(INDEX, run(failure("IndexError", "tuple index out of range", USER), leg="without-deepspeed")),
        log_failure(*CHECK),
        log_failure("RuntimeError", "not implemented for 'ComplexFloat'", USER, PARTITION, TORCH),
        with_plain(("RuntimeError", "sizes do not match", USER, ENGINE, MODULE, USER, TORCH), PASSES),
        log_failure("IndexError", "tuple index out of range", USER, ENGINE, USER),
        with_plain(("AssertionError", "Check batch related parameters. train_batch_size is not equal to "
                    "micro_batch_per_gpu * gradient_acc_step * world_size 50 != 4 * 3 * 2", INITIALIZE), PASSES),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", POSITIVE["deepspeed/internal-error"])
def test_positive(case):
    assert len(found(case, "deepspeed/internal-error")) == 1
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize("case", NEGATIVE["deepspeed/internal-error"])
def test_negative(case):
    assert not found(case, "deepspeed/internal-error")


def test_a_log_alone_is_an_assumption():
    (assumed,) = found(log_failure(*INDEX), "deepspeed/internal-error")
    (proved,) = found(with_plain(INDEX, PASSES), "deepspeed/internal-error")
    assert assumed.confidence < proved.confidence
    assert assumed.caveat
