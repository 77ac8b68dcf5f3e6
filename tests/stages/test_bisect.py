"""The search as a stage: which runs it makes, what it makes of them, and how it keeps to its time."""

import math
from dataclasses import replace

import pytest

from dsdoctor.blame.verdict import decide
from dsdoctor.diagnoses import diagnose
from dsdoctor.stages import bisect, legs, observe
from tests.stages import making

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2, "round_robin_gradients": True, "reduce_bucket_size": 1000},
}
BUCKET = "zero_optimization.reduce_bucket_size"


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Runs legs and search with made-up runs: `result(spec)` says what comes of an order."""

    def go(result, **job):
        orders = []

        def supervise(spec, plan, limits, leg, progress):
            orders.append((spec, limits))
            spec_folder = tmp_path / spec.folder
            spec_folder.mkdir(parents=True, exist_ok=True)
            return replace(result(spec), leg=leg)

        monkeypatch.setattr(observe, "supervise", supervise)
        examination = making.examination(tmp_path, CONFIG, **job)
        legs.with_deepspeed(examination)
        legs.without_deepspeed(examination)
        return bisect.search(examination), examination, orders

    return go


def bucket_fails(spec):
    """Raises in step 2 with DeepSpeed as long as the bucket is that small."""
    small = spec.config.get("zero_optimization", {}).get("reduce_bucket_size") == 1000
    if spec.engine == "deepspeed" and small:
        return making.run(spec, (1.0, 1.0), failure=making.failure())
    return making.run(spec)


def verdict(examination):
    return decide(examination.case, diagnose(examination.case, strict=True).findings)


def test_the_guilty_key_is_named_with_its_patch(stage):
    result, examination, orders = stage(bucket_fails)
    found = examination.case.bisection
    assert found.keys == (BUCKET,)
    assert found.patch == {"zero_optimization": {"reduce_bucket_size": None}}
    assert result.status == "failed"
    assert f"passes once {BUCKET} is changed" in result.why
    told = verdict(examination)
    assert (told.blame, told.culprit) == ("config", (BUCKET,))
    assert all(spec.steps == 6 for spec, _limits in orders[2:])  # it failed in step 2; three more to be safe
    assert [run.changed for run in examination.case.runs[2:]] == [trial.changed for trial in found.trials]


def test_the_finding_shows_the_patch(stage):
    _result, examination, _orders = stage(bucket_fails)
    first = next(f for f in diagnose(examination.case).findings if f.id == "config/guilty-key")
    assert first.fixes[0].patch == {"zero_optimization": {"reduce_bucket_size": None}}
    assert "train_micro_batch_size_per_gpu" in first.caveat


def test_what_is_wrong_at_every_config_is_deepspeeds(stage):
    def always(spec):
        if spec.engine == "deepspeed":
            return making.run(spec, (1.0, 1.0), failure=making.failure())
        return making.run(spec)

    result, examination, orders = stage(always)
    assert result.status == "passed"
    assert "no config that was tried passes" in result.why
    assert verdict(examination).blame == "deepspeed"
    assert len(orders) == 3


def test_another_failure_is_no_pass(stage):
    def another(spec):
        ran = bucket_fails(spec)
        if spec.engine == "deepspeed" and ran.outcome == "stopped":
            return making.run(spec, (1.0,), failure=making.failure("other", kind="KeyError", step=1))
        return ran

    _result, examination, _orders = stage(another)
    assert not examination.case.bisection.keys
    assert {trial.kind for trial in examination.case.bisection.trials} <= {"fails", "differs"}


def test_a_run_that_ends_before_the_failure_is_no_pass(stage):
    def short(spec):
        ran = bucket_fails(spec)
        return ran if ran.outcome == "raised" or spec.engine == "plain" else making.run(spec, (1.0, 1.0))

    _result, examination, _orders = stage(short)
    assert not examination.case.bisection.keys


def test_the_search_keeps_to_the_budget(stage):
    def slow(spec):
        return replace(bucket_fails(spec), seconds=100.0)

    result, examination, orders = stage(slow, budget=50.0)
    assert len(orders) == 2
    assert examination.case.bisection.stopped
    assert examination.out_of_budget
    assert result.status == "warned"
    assert verdict(examination).blame == "deepspeed"


def test_ctrl_c_keeps_what_was_found_so_far(stage):
    def impatient(spec):
        if spec.config["zero_optimization"].get("round_robin_gradients") is None and "gradient_clipping" in spec.config:
            raise KeyboardInterrupt
        return bucket_fails(spec)

    result, examination, _orders = stage(impatient, bisect="asked")
    assert examination.interrupted
    assert examination.case.bisection.stopped == "stopped by the user"
    assert "stopped by the user" in result.why


def test_losses_that_move_away_are_searched_like_any_failure(stage):
    def away(spec):
        moved = spec.engine == "deepspeed" and spec.config["zero_optimization"].get("round_robin_gradients")
        return making.run(spec, [1.0, 1.0, *([3.0] * 6)] if moved else [1.0] * 8)

    _result, examination, _orders = stage(away)
    assert examination.case.run("repeat") is not None
    assert examination.case.bisection.keys == ("zero_optimization.round_robin_gradients",)
    told = verdict(examination)
    assert (told.blame, told.culprit) == ("config", ("zero_optimization.round_robin_gradients",))


def test_a_script_that_does_not_repeat_its_losses_is_not_searched(stage):
    count = iter(range(100))

    def restless(spec):
        return making.run(spec, [1.0 + next(count)] * 8)

    result, examination, orders = stage(restless)
    assert result.status == "skipped"
    assert [spec.engine for spec, _limits in orders] == ["deepspeed", "plain", "plain"]
    assert verdict(examination).blame == "healthy"


def test_equal_losses_cost_no_second_run_without_deepspeed(stage):
    _result, _examination, orders = stage(making.run)
    assert len(orders) == 2


def test_a_nan_that_only_deepspeed_has_is_repeated_without_it(stage):
    def nan(spec):
        return making.run(spec, [1.0, math.nan] if spec.engine == "deepspeed" else [1.0] * 8)

    _result, examination, _orders = stage(nan)
    assert examination.case.run("repeat") is not None
    assert verdict(examination).blame == "deepspeed"


def test_blame_without_bisect_tries_suspicions_only(stage):
    result, _examination, orders = stage(bucket_fails, bisect="suspects")
    assert (result.status, len(orders)) == ("skipped", 2)
    assert "--bisect" in result.why
