"""What a loss scale's history means, as findings."""

import pytest

from dsdoctor.case import Case
from dsdoctor.loss_scale import LossScaleHistory, SkipCount
from tests.diagnoses.examples import found
from tests.diagnoses.making import event, failed, fall, log, log_failure, process_exit, run, scales

FP16_ON_0198 = {"versions": {"deepspeed": "0.19.8"}, "config": {"fp16": {"enabled": True}}, "steps_seen": 100}
FALL_16 = ((65536.0, 65536.0), *fall(16))


def played(history, **values):
    return Case(runs=(run(history=history, precision="fp16", **values),))


def read(history):
    return log(loss_scale=history)


SEARCH = scales(*fall(16, 10), steps_seen=100)
STILL_FALLING = scales(*fall(16, 10), steps_seen=6, ended=False)
COLLAPSE = scales(*FALL_16, (1.0, 1.0), raised=True)
COLLAPSE_WITH_NAN = scales(*FALL_16, (1.0, 1.0), raised=True, loss_finite=False)
NEVER_APPLIED = scales(*fall(16, 6), steps_seen=10)
PERIODIC = scales((52, 2.0**17, 2.0**17), (53, 2.0**17, 2.0**16), (105, 2.0**17, 2.0**17), (106, 2.0**17, 2.0**16),
                  steps_seen=200, window=50, initial_power=16)  # fmt: skip
THRASH = scales(*((40 + 17 * i, 2.0 ** (16 - i), 2.0 ** (15 - i)) for i in range(8)), steps_seen=300, window=1000)
STATIC = scales(*((2.0**20, 2.0**20) for _ in range(9)), steps_seen=12, dynamic=False)
STATIC_ONCE = scales((2.0**10, 2.0**10), steps_seen=100, dynamic=False)
BF16_SKIPS = scales(*((1.0, 1.0) for _ in range(9)), dynamic=False, precision="bf16")

HELD = scales(*((2.0**16, 2.0**16) for _ in range(20)), steps_seen=20, hysteresis=0)

POSITIVE = {
    "loss-scale/warmup": [played(SEARCH), read(SEARCH), read(STILL_FALLING)],
    "loss-scale/periodic": [played(PERIODIC), read(PERIODIC)],
    "loss-scale/thrash": [played(THRASH), read(THRASH)],
    "loss-scale/collapse": [
        played(COLLAPSE),
        read(COLLAPSE),
        played(COLLAPSE_WITH_NAN),
        played(NEVER_APPLIED),
        log_failure("Exception", "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."),
    ],
    "loss-scale/static": [played(STATIC), read(STATIC), played(HELD)],
    "loss-scale/hidden": [log(event("fp16-enabled"), **FP16_ON_0198)],
}
NEGATIVE = {
    "loss-scale/warmup": [played(COLLAPSE), played(THRASH), played(PERIODIC), played(BF16_SKIPS), Case()],
    "loss-scale/periodic": [played(SEARCH), played(THRASH), Case()],
    "loss-scale/thrash": [played(SEARCH), played(PERIODIC), played(COLLAPSE), played(BF16_SKIPS)],
    "loss-scale/collapse": [
        played(SEARCH),
        played(THRASH),
        read(STILL_FALLING),
        played(BF16_SKIPS),
        failed("Exception", "x"),
    ],
    "loss-scale/static": [played(COLLAPSE), played(STATIC_ONCE), played(BF16_SKIPS), Case()],
    "loss-scale/hidden": [
        log(event("fp16-enabled"), event("engine-info"), **FP16_ON_0198),
        log(**{**FP16_ON_0198, "versions": {"deepspeed": "0.17.5"}}),
        log(**{**FP16_ON_0198, "config": {"bf16": {"enabled": True}}}),
        log(**{**FP16_ON_0198, "config": {"fp16": {"enabled": True, "loss_scale": 128}}}),
        log(loss_scale=SEARCH, **FP16_ON_0198),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_warmup_names_the_cheaper_start():
    (finding,) = found(played(SEARCH), "loss-scale/warmup")
    assert finding.severity == "info"
    assert finding.fixes[0].patch == {"fp16": {"initial_scale_power": 10}}


def test_a_search_is_told_although_odd_batches_overflow_later():
    odd = scales((0, 2.0**12, 2.0**11), (1, 2.0**11, 2.0**10), (20, 2.0**10, 2.0**9), steps_seen=100, window=1000)
    (finding,) = found(played(odd), "loss-scale/warmup")
    assert finding.severity == "info"
    assert finding.cause.startswith("2 steps were skipped at the start")
    assert "1 step was skipped later" in finding.cause


def test_collapse_advises_bf16_and_speaks_against_a_larger_scale():
    (finding,) = found(played(COLLAPSE), "loss-scale/collapse")
    assert finding.role == "root"
    assert finding.fixes[0].patch == {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    assert any("do not raise initial_scale_power" in fix.text for fix in finding.fixes)
    assert all("initial_scale_power" not in str(fix.patch) for fix in finding.fixes)


def test_collapse_on_volta_advises_fp32():
    case = log(event("gpu-name", gpu="Tesla V100-SXM2-32GB"), loss_scale=COLLAPSE)
    (finding,) = found(case, "loss-scale/collapse")
    assert finding.fixes[0].patch == {"fp16": {"enabled": False}}


def test_collapse_is_a_consequence_of_a_loss_that_is_nan():
    (finding,) = found(played(COLLAPSE_WITH_NAN), "loss-scale/collapse")
    assert finding.role == "consequence"
    assert all(fix.patch is None for fix in finding.fixes)


def test_the_exception_at_the_minimum_is_not_told_twice():
    message = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    case = log_failure("Exception", message, loss_scale=COLLAPSE, exits=(process_exit(1),))
    assert found(case, "loss-scale/collapse")
    assert not found(case, "launch/user-exception")


def test_a_plain_leg_with_a_scaler_of_its_own_is_no_fault_of_the_job():
    case = Case(runs=(run(precision="fp16"), run(leg="without-deepspeed", precision="fp16", history=COLLAPSE)))
    assert not found(case, "loss-scale/collapse")


def test_a_counter_without_a_precision_leaves_a_doubt():
    counts = tuple(SkipCount(step=step, skipped=step // 8) for step in range(10, 410, 10))
    history = LossScaleHistory(source="train.log", attempts=(), counts=counts)
    (unknown,) = found(log(loss_scale=history), "loss-scale/thrash")
    (known,) = found(log(loss_scale=history, config={"fp16": {"enabled": True}}), "loss-scale/thrash")
    assert unknown.confidence <= 0.5 < known.confidence
    assert "bf16" in unknown.caveat


def test_a_record_that_ends_in_a_fall_may_become_a_collapse():
    late = [(400 + k, 2.0 ** (14 - k), 2.0 ** (13 - k)) for k in range(9)]
    (open_end,) = found(read(scales(*late, steps_seen=409, ended=False)), "loss-scale/thrash")
    assert open_end.confidence <= 0.5
    assert "collapse" in open_end.caveat


def test_what_holds_a_dynamic_scale_is_named():
    """The scale is dynamic already (DeepSpeed counts hysteresis 0 down below zero): `loss_scale: 0` would not help."""
    (finding,) = found(played(HELD), "loss-scale/static")
    assert finding.keys == ("fp16.hysteresis",)
    assert finding.fixes[0].patch == {"fp16": {"hysteresis": 2}}
