"""What a bisection would look at, from what the legs have shown."""

import math
from dataclasses import replace

import pytest

from dsdoctor.blame.plan import plan
from dsdoctor.case import Case
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Finding, FirstBad, Fix
from dsdoctor.runs.facts import EngineFacts, Failure, RankRun, Run, Step

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
FINE = tuple(Step(index=i, losses=(1.0,)) for i in range(8))
BAD = (*FINE[:4], Step(index=4, losses=(math.nan,)))
BAD_AT_ONCE = (Step(index=0, losses=(math.nan,)),)


def leg(name, steps=FINE, *, failure=None, precision="bf16", **values):
    facts = EngineFacts(framework="deepspeed", config=CONFIG, precision=precision, zero_stage=2, optimizer="AdamW")
    ranks = tuple(
        RankRun(rank=r, steps=steps, called_engine=True, failure=failure if r == 0 else None, **values)
        for r in range(2)
    )
    return Run(
        leg=name,
        engine="deepspeed",
        precision="as-configured",
        outcome="raised" if failure else "stopped",
        ranks=ranks,
        seconds=1.0,
        folder="",
        world_size=2,
        facts=facts,
    )


def planned(*runs, depth="automatic", config=CONFIG, findings=()):
    return plan(Case(config=ConfigFacts(path="ds.json", data=config, release="0.19.8"), runs=runs), findings, depth)


def keys(found):
    return {change.keys[0] for change in found.pool}


def wrong_rate(rate):
    return {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}}}


ALONE = (leg("with-deepspeed", BAD), leg("without-deepspeed"), leg("repeat"))
BOTH = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), leg("control-fp32", BAD))


def test_nothing_is_searched_where_nothing_failed():
    assert planned(leg("with-deepspeed"), leg("without-deepspeed")).why_not == "nothing failed"
    assert planned().why_not


def test_what_only_deepspeed_gets_wrong_is_no_matter_of_the_optimizers_values():
    assert keys(planned(*ALONE)) == {"zero_optimization.overlap_comm", "zero_optimization.stage"}


def test_the_class_of_a_schedule_can_be_what_deepspeed_does_not_take():
    config = {**CONFIG, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}
    assert {"scheduler.type"} == keys(planned(*ALONE, config=config)) - keys(planned(*ALONE))


def test_accumulation_and_clipping_are_deepspeeds_own_business_too():
    config = {**CONFIG, "gradient_clipping": 0.1}
    assert "gradient_clipping" in keys(planned(*ALONE, config=config))


def test_a_run_gets_safely_past_the_step_in_which_the_given_config_failed():
    assert planned(*ALONE).steps == 8


def test_a_script_that_fails_anyway_costs_no_run_unless_a_value_is_out_of_all_measure():
    assert planned(*BOTH).why_not
    assert keys(planned(*BOTH, config=wrong_rate(3.0))) == {"optimizer.params.lr"}
    assert keys(planned(*BOTH, depth="asked")) == {"optimizer.params.lr"}


def test_the_optimizer_is_innocent_of_the_first_step_and_of_the_input():
    at_once = [leg(name, BAD_AT_ONCE) for name in ("with-deepspeed", "without-deepspeed", "control-fp32")]
    assert planned(*at_once, config=wrong_rate(3.0), depth="asked").why_not
    bad = FirstBad(rank=0, step=4, micro_step=0, phase="input", module="", tensor="x", kind="nan")
    numerics = leg("numerics", first_bad=bad)
    assert planned(*BOTH, numerics, config=wrong_rate(3.0)).why_not


def test_a_suspicion_of_lint_is_tried_at_any_depth():
    suspicion = Finding(
        id="config/suspicious-value",
        severity="warning",
        role="root",
        confidence=0.7,
        title="t",
        cause="c",
        evidence=(),
        fixes=(Fix(text="f", patch={"optimizer": {"params": {"lr": 1e-4}}}),),
        keys=("optimizer.params.lr",),
    )
    found = planned(*BOTH, depth="suspects", findings=[suspicion])
    assert [change.keys for change in found.suspicions] == [("optimizer.params.lr",)]
    assert found.pool == ()
    assert found.seen == 2  # the run without DeepSpeed failed alike


@pytest.mark.parametrize("identifier", ["memory/host-oom-kill", "version/known-defect"])
def test_what_is_explained_already_is_not_searched(identifier):
    known = Finding(
        id=identifier, severity="error", role="root", confidence=0.9, title="t", cause="c", evidence=(), keys=("k",)
    )
    assert planned(*ALONE, findings=[known]).why_not


def test_a_loss_scale_gets_the_time_to_fall():
    failure = Failure(rank=0, type="RuntimeError", message="boom", step=2)
    given = leg("with-deepspeed", FINE[:2], failure=failure)
    scaled = EngineFacts(
        framework="deepspeed", config=CONFIG, precision="fp16", zero_stage=2, optimizer=None, dynamic_loss_scale=True
    )
    assert planned(given, leg("without-deepspeed")).steps == 6
    assert planned(replace(given, facts=scaled), leg("without-deepspeed")).steps is None


def test_a_weight_that_the_first_step_made_bad_can_be_the_optimizers_numbers():
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 0.0, "torch_adam": True}}}
    bad = FirstBad(rank=0, step=0, micro_step=0, phase="step", module="inp", tensor="weight", kind="nan")
    late = (*FINE[:1], Step(index=1, losses=(math.nan,)))
    legs = [leg(name, late) for name in ("with-deepspeed", "without-deepspeed", "control-fp32")]
    seen = leg("numerics", late, first_bad=bad)
    assert keys(planned(*legs, seen, config=config)) == {"optimizer.params.eps"}


@pytest.mark.parametrize(("key", "value"), [("min_loss_scale", 65536), ("hysteresis", 0), ("loss_scale", 2**20)])
def test_a_loss_scale_that_cannot_fall_may_be_why_only_fp32_passes(key, value):
    config = {**wrong_rate(3e4), "bf16": {}, "fp16": {"enabled": True, key: value, "loss_scale_window": 50}}
    skipped = tuple(replace(step, skipped=True, loss_scale=65536.0) for step in FINE)
    legs = [leg(name, skipped, precision="fp16") for name in ("with-deepspeed", "without-deepspeed")]
    assert keys(planned(*legs, leg("control-fp32"), config=config)) == {f"fp16.{key}"}


def test_a_loss_scale_that_can_fall_is_not_searched():
    config = {**CONFIG, "bf16": {}, "fp16": {"enabled": True, "min_loss_scale": 1, "initial_scale_power": 20}}
    skipped = tuple(replace(step, skipped=True, loss_scale=65536.0) for step in FINE)
    legs = [leg(name, skipped, precision="fp16") for name in ("with-deepspeed", "without-deepspeed")]
    assert planned(*legs, leg("control-fp32"), config=config).why_not
