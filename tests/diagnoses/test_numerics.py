"""Non-finite numbers and their disguises."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.finding import FirstBad
from dsdoctor.runs.facts import Frame, ModelFacts, Step
from tests.diagnoses.examples import found
from tests.diagnoses.making import (
    INF,
    NAN,
    TORCH,
    USER,
    event,
    failed,
    fall,
    healthy,
    log,
    log_failure,
    run,
    scales,
    series,
    steps,
)

T5 = ModelFacts(class_name="T5Model", parameters=9, trainable=9, largest_layer=9, model_type="t5")
GPT2 = ModelFacts(class_name="GPT2", parameters=9, trainable=9, largest_layer=9, model_type="gpt2")
BF16_CHECKPOINT = ModelFacts(class_name="M", parameters=9, trainable=9, largest_layer=9, trained_in="bfloat16")
COLLAPSE = scales((65536.0, 65536.0), *fall(16), (1.0, 1.0), raised=True)
FP16 = {"config": {"fp16": {"enabled": True}}}
BF16 = {"config": {"bf16": {"enabled": True}}}
NORM = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/bf16_optimizer.py", line=3, function="step",
             text="assert all_groups_norm > 0.")  # fmt: skip
SKIPPED = (*steps((2.0, 1.9)), Step(index=2, losses=(1.8,), grad_norm=INF, skipped=True))
OVERLAP = {
    "config": {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}},
    "ranks": (0, 1),
}
FROZEN = (series("loss", 1.5, 1.4, 0.0, 0.0, 0.0), series("grad_norm", 0.8, 0.9, *[2**0.5] * 3))


def of(steps, **values):
    return Case(runs=(run(steps=steps, **values),))


def located(phase, cause="unknown"):
    """The job's run with nan in step 1, and the detector's run that found the first of it."""
    bad = FirstBad(rank=0, step=1, micro_step=0, phase=phase, module="", tensor="input[0]", kind="nan", cause=cause)
    job = run(steps=steps((2.0, NAN)))
    detected = run(leg="numerics", steps=steps((2.0, NAN)))
    ranks = (replace(detected.ranks[0], first_bad=bad), detected.ranks[1])
    return Case(runs=(job, replace(detected, ranks=ranks)))


POSITIVE = {
    "numerics/nan-loss": [
        of(steps((2.0, NAN))),
        of(steps((2.0, 1.0), norm=NAN)),
        of(SKIPPED),
        of(steps((2.0, NAN)), precision="fp16"),
        log(series=(series("loss", 2.0, 1.9, NAN),), **BF16),
        log(series=(series("loss", 2.0, NAN),), **FP16),
        log(series=(series("loss", 2.0, 1.9), series("grad_norm", 1.0, NAN)), **BF16),
        log(series=(series("loss", 2.0, 1.9, 1.8, 1.7), series("grad_norm", 1.0, NAN, NAN, NAN))),
        log(loss_scale=scales((7, 1.0, 1.0), steps_seen=20, dynamic=False, precision="bf16"), **BF16),
    ],
    "numerics/loss-zero-is-nan": [
        log(series=(series("loss", 2.0, 1.9, 0.0, 0.0, 0.0), series("grad_norm", 1.0, 1.1, NAN, NAN, NAN))),
        log(series=FROZEN),
        log(series=(series("loss", 1.9, 1.8, 1.8, 0.0, 0.0, 0.0), series("grad_norm", 1, 1, 1, 0, 0, 0))),
        log(series=(series("loss", 0.01, 0.01, 0.01, 0.0, 0.0, 0.0), series("grad_norm", 1, 1, 1, NAN, NAN, NAN))),
    ],
    "numerics/bf16-model-in-fp16": [
        of(steps((2.0,)), precision="fp16", history=COLLAPSE, model=T5),
        of(steps((NAN, NAN)), precision="fp16", model=BF16_CHECKPOINT),
        log(event("model-name", model="google/t5-3b"), loss_scale=COLLAPSE, **FP16),
    ],
    "numerics/bad-input": [located("input", "bad-input")],
    "numerics/reduction-overflow": [located("reduction", "reduction-overflow")],
    "numerics/zero-gradients": [
        failed("AssertionError", "", USER, NORM),
        log_failure("AssertionError", "", USER, NORM),
    ],
    "numerics/dtype-unsupported": [
        failed("ValueError", "Type fp16 is not supported on your device.", USER),
        log_failure("ValueError", "Your setup doesn't support bf16/gpu. You need Ampere+ GPU", USER),
        failed("RuntimeError", "\"addmm_impl_cpu_\" not implemented for 'Half'", USER),
        failed("ValueError", "Type fp16 is not supported.", USER),
        failed("RuntimeError", "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx(a, CUDA_R_16BF, lda)`", TORCH),
    ],
    "numerics/underflow": [of(steps((2.0, 2.0, 2.0, 2.0), norm=0.0), precision="fp16")],
    "numerics/silent-skip": [of(SKIPPED)],
    "numerics/overlap-comm-race": [log(series=FROZEN, **OVERLAP)],
}
NEGATIVE = {
    "numerics/nan-loss": [
        healthy(),
        of(SKIPPED, precision="fp16", history=scales(*fall(16, 13), steps_seen=30)),
        of(steps((2.0, 1.9)), precision="fp16", history=COLLAPSE),
        log(series=(series("loss", 2.0, 1.9), series("grad_norm", INF, 1.0)), **FP16),
        log(series=(series("loss", 2.0, 1.9, 1.8), series("grad_norm", INF, INF, 1.0))),
        log(series=(series("loss", 2.0, 1.9),)),
    ],
    "numerics/loss-zero-is-nan": [
        log(series=(series("loss", 2.0, 0.5, 0.1), series("grad_norm", 1.0, 0.5, 0.2))),
        log(series=(series("loss", 2.0, 0.0, 0.1), series("grad_norm", 1.0, NAN, 0.2))),
        log(series=(series("loss", 0.1, 0.0, 0.0), series("grad_norm", 0.3, 0.2, 0.1))),
        log(
            series=(
                series("loss", 0.4, 0.02, 0.004, 0.001, 0.0, 0.0, 0.0),
                series("grad_norm", 1, 0.1, 0.1, 0.1, 0, 0, 0),
            )
        ),
        Case(),
    ],
    "numerics/bf16-model-in-fp16": [
        of(steps((2.0, 1.9)), precision="fp16", model=T5),
        of(steps((NAN, NAN)), precision="bf16", model=T5),
        of(steps((NAN, NAN)), precision="fp16", model=GPT2),
    ],
    "numerics/bad-input": [located("forward", "domain"), healthy()],
    "numerics/reduction-overflow": [located("reduction"), located("backward", "overflow"), healthy(), Case()],
    "numerics/zero-gradients": [failed("AssertionError", "", USER), failed("ValueError", "all_groups_norm", NORM)],
    "numerics/dtype-unsupported": [
        failed("ValueError", "Type of argument is not supported", USER),
        healthy(),
        failed("RuntimeError", "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"),
    ],
    "numerics/underflow": [
        of(steps((2.0, 1.9, 1.8), norm=0.5), precision="fp16"),
        of(steps((2.0, 1.9, 1.8), norm=0.0), precision="bf16"),
    ],
    "numerics/silent-skip": [healthy(), of(SKIPPED, precision="fp16")],
    "numerics/overlap-comm-race": [
        log(series=FROZEN, **{**OVERLAP, "config": {"zero_optimization": {"stage": 2}}}),
        log(series=FROZEN, **{**OVERLAP, "ranks": (0,)}),
        log(series=(series("loss", 1.5, 1.4), series("grad_norm", 0.8, 2**0.5)), **OVERLAP),
        log(series=(series("loss", 1.5, 0.0, 0.0), series("grad_norm", 0.8, 0.77, 0.77)), **OVERLAP),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_the_first_step_and_rank_are_named():
    (finding,) = found(of(steps((2.0, 1.9, NAN, NAN))), "numerics/nan-loss")
    assert finding.evidence[0].step == 2
    assert finding.evidence[0].rank == 0


def test_a_bad_input_makes_the_nan_loss_a_consequence():
    (finding,) = found(located("input"), "numerics/nan-loss")
    assert finding.role == "consequence"


def test_a_nan_loss_and_a_collapse_have_the_loss_as_their_root():
    case = of(steps((NAN, NAN)), precision="fp16", history=replace(COLLAPSE, loss_finite=False))
    (nan,) = found(case, "numerics/nan-loss")
    (collapse,) = found(case, "loss-scale/collapse")
    assert (nan.role, collapse.role) == ("root", "consequence")


def test_the_other_precision_is_advised_for_each():
    (no_fp16,) = found(POSITIVE["numerics/dtype-unsupported"][0], "numerics/dtype-unsupported")
    (no_bf16,) = found(POSITIVE["numerics/dtype-unsupported"][1], "numerics/dtype-unsupported")
    assert no_fp16.fixes[0].patch == {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    assert no_bf16.fixes[0].patch == {"fp16": {"enabled": True}, "bf16": {"enabled": False}}


UNDER_AUTOCAST = log(
    loss_scale=scales(*((1.0, 1.0) for _ in range(9)), dynamic=False, precision="fp32"),
    config={"zero_optimization": {"stage": 2}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    versions={"deepspeed": "0.19.8"},
)


@pytest.mark.parametrize(
    "case",
    [located("reduction", "reduction-overflow"), of(steps((NAN,)), precision="fp16", model=T5), UNDER_AUTOCAST],
)
def test_a_nan_loss_follows_from_what_explains_it(case):
    (finding,) = found(case, "numerics/nan-loss")
    assert finding.role == "consequence"


def test_a_collapse_follows_from_a_model_trained_in_bf16():
    (collapse,) = found(of(steps((2.0,)), precision="fp16", history=COLLAPSE, model=T5), "loss-scale/collapse")
    (other,) = found(of(steps((2.0,)), precision="fp16", history=COLLAPSE, model=GPT2), "loss-scale/collapse")
    assert (collapse.role, other.role) == ("consequence", "root")


def test_without_zero_the_gradients_can_be_divided_first():
    case = located("reduction", "reduction-overflow")
    job = replace(case.runs[0], facts=replace(case.runs[0].facts, zero_stage=0))
    (sharded,) = found(case, "numerics/reduction-overflow")
    (whole,) = found(Case(runs=(job, case.runs[1])), "numerics/reduction-overflow")
    assert [fix.patch for fix in sharded.fixes] == [{"communication_data_type": "fp32"}]
    assert whole.fixes[1].patch == {"prescale_gradients": True}


def test_skips_without_a_known_precision_leave_a_doubt():
    skips = scales((7, 1.0, 1.0), steps_seen=20, dynamic=False, precision="bf16")
    (known,) = found(log(loss_scale=skips, **BF16), "numerics/nan-loss")
    (unknown,) = found(log(loss_scale=skips), "numerics/nan-loss")
    assert unknown.confidence <= 0.5 < known.confidence
    assert "static" in unknown.caveat
