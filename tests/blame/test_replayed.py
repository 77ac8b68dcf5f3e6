"""What the second run of one micro-batch proves, and what it does not."""

from dataclasses import replace

import pytest

from dsdoctor.blame.replayed import proof
from dsdoctor.finding import FirstBad
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.repeats import Repeats


def bad(cause, *, phase="forward", dtype="float16", op=None):
    values = {"rank": 0, "step": 2, "micro_step": 0, "phase": phase, "module": "a", "tensor": "output", "kind": "inf"}
    return FirstBad(**values, op=op, cause=cause, dtype=dtype)


FINITE_IN_FP32 = Examined(again="not-finite", in_fp32="finite", loss_in_fp32=2.318)
STEADY = Repeats(runs=4, bad=0, same_bits=True)
NEVER_FINITE = Examined(again="not-finite", in_fp32="not-finite")


@pytest.mark.parametrize(
    ("value", "examined", "blame"),
    [
        (bad("overflow"), FINITE_IN_FP32, "precision"),
        (bad("lost-eps"), FINITE_IN_FP32, "precision"),
        (bad("domain", dtype="bfloat16"), NEVER_FINITE, "script"),
        (bad("masked-row"), NEVER_FINITE, "script"),
        (bad("domain", dtype="float32", op="aten.log"), None, "script"),
        (bad("masked-row", dtype="bfloat16", op="aten._softmax"), Examined(why_not="partitioned"), "script"),
        (bad("bad-input", phase="input"), None, "script"),
        (bad("ignored-labels", phase="loss"), None, "script"),
        (bad("not-reproducible"), Examined(again="finite", in_fp32="finite"), "inconclusive"),
        (bad("not-reproducible"), Examined(again="finite", repeats=STEADY), "inconclusive"),
        (bad("not-reproducible"), Examined(again="finite", repeats=replace(STEADY, reads_unwritten=True)), "script"),
        # what comes and goes whatever is in new memory is no proof of memory that was not written to
        (
            bad("not-reproducible"),
            Examined(again="finite", repeats=replace(STEADY, reads_unwritten=True, bad=1, same_bits=False)),
            "inconclusive",
        ),
    ],
)
def test_proved(value, examined, blame):
    assert proof(value, examined)[0] == blame


@pytest.mark.parametrize(
    ("value", "examined"),
    [
        (None, None),
        (bad("overflow"), None),
        # a divisor may be 0 in fp16 only because it is small
        (bad("domain", op="aten.div"), None),
        # an overflow that fp32 has too is as likely a learning rate of the config
        (bad("overflow"), NEVER_FINITE),
        (bad("exploded-weights"), NEVER_FINITE),
        (bad("corrupted-weights", phase="parameter"), NEVER_FINITE),
        (bad("overflow", dtype="float32"), FINITE_IN_FP32),
        (bad("overflow"), Examined(again="finite", in_fp32="finite")),
        (bad("domain"), Examined(again="not-finite", in_fp32="failed")),
    ],
)
def test_not_proved(value, examined):
    assert proof(value, examined) is None


def test_the_loss_in_fp32_is_told():
    assert "loss 2.318" in proof(bad("overflow"), FINITE_IN_FP32)[1]
