"""The search for the guilty keys, over made-up failures: one key, two, one that needs another, none, chance, budget."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsdoctor.blame.bisect import Outcome, OutOfBudget, bisect, changed
from dsdoctor.blame.changes import RACES, changes
from dsdoctor.blame.ddmin import ddmin
from dsdoctor.dsconfig import keys, patch
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.schema import schema_for

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "communication_data_type": "fp16",
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 3}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 1000,
        "stage3_max_live_parameters": 1000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
    },
    "activation_checkpointing": {"cpu_checkpointing": True},
    "wall_clock_breakdown": True,
}
POOL = changes(Effective(data=CONFIG, schema=schema_for("0.19.8")), accumulation=2)
KEYS = tuple(change.keys[0] for change in POOL)
SINGLE = tuple(key for key in KEYS if key != "optimizer.type" and key != "scheduler.type")
"""Keys whose own value can be guilty; the two types are changed together with all their parameters."""
IN_HARNESS = st.sampled_from(SINGLE)
RACE = "zero_optimization.overlap_comm"


def standing(config, key):
    """Whether the key is as in CONFIG, and does something: ZeRO keys need their stage."""
    value, mine = keys.get(config, key), keys.get(CONFIG, key)
    if isinstance(mine, dict):
        return value is not None
    if key.endswith("overlap_comm") and value is None:
        return keys.get(config, "zero_optimization.stage") == 3
    return value == mine


class Machine:
    """Counts and judges runs: `fails(config)` decides, `limit` is how many runs the budget allows."""

    def __init__(self, fails, limit=10**6, differs=lambda config: False):
        self.fails, self.limit, self.differs = fails, limit, differs
        self.made = []

    def __call__(self, config, touched, left):
        if len(self.made) >= self.limit:
            raise OutOfBudget("no time")
        self.made.append(json.dumps(config, sort_keys=True))
        if self.differs(config):
            return Outcome(kind="differs", why="another")
        return Outcome(kind="fails" if self.fails(config) else "passes")


def found(machine, **more):
    return bisect(CONFIG, POOL, runs=machine, **more)


def test_everything_that_the_config_holds_is_in_the_pool():
    left = {key for key, _value in keys.leaves(CONFIG)} - set(KEYS)
    assert left == {
        *("train_micro_batch_size_per_gpu", "bf16.enabled"),  # kept
        *("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"),  # as sections
    }


@given(IN_HARNESS)
@settings(deadline=None)
def test_a_single_guilty_key_is_found_and_nothing_else(key):
    machine = Machine(lambda config: standing(config, key))
    result = found(machine)
    assert result.keys == (key,)
    assert result.verified
    assert result.minimal
    assert not machine.fails(patch.apply(CONFIG, result.patch))


@given(IN_HARNESS, IN_HARNESS)
@settings(deadline=None)
def test_of_two_keys_that_fail_only_together_one_is_named(one, other):
    result = found(Machine(lambda config: standing(config, one) and standing(config, other)))
    assert result.verified
    assert len(result.keys) == 1
    # A change that takes its whole section away changes the key too.
    assert not standing(patch.apply(CONFIG, result.patch), one) or not standing(
        patch.apply(CONFIG, result.patch), other
    )


@given(st.sets(IN_HARNESS, min_size=2, max_size=3))
@settings(deadline=None)
def test_keys_that_each_fail_are_all_named_and_no_more(guilty):
    def fails(config):
        return any(standing(config, key) for key in guilty)

    result = found(Machine(fails))
    assert result.verified
    assert not fails(patch.apply(CONFIG, result.patch))
    for left_out in result.keys:
        rest = [change for change in POOL if set(change.keys) & (set(result.keys) - {left_out})]
        assert fails(changed(CONFIG, rest))


def test_a_key_that_needs_another_is_named_and_not_what_it_needs():
    def fails(config):
        zero = config["zero_optimization"]
        return zero["stage"] == 3 and "offload_param" in zero

    result = found(Machine(fails))
    assert result.keys == ("zero_optimization.offload_param",)
    assert result.patch == {"zero_optimization": {"offload_param": None}}


def test_the_stage_is_lowered_no_further_than_needed():
    result = found(Machine(lambda config: config["zero_optimization"]["stage"] == 3))
    assert result.keys == ("zero_optimization.stage",)
    assert result.patch["zero_optimization"] == {"stage": 2, "offload_param": None}


def test_a_rate_is_lowered_no_further_than_needed():
    result = found(Machine(lambda config: config["optimizer"]["params"]["lr"] > 1e-2))
    assert result.keys == ("optimizer.params.lr",)
    assert result.patch == {"optimizer": {"params": {"lr": 1e-3}}}


def test_where_nothing_passes_two_runs_say_so_and_no_key_is_named():
    machine = Machine(lambda config: True)
    result = found(machine)
    assert result.nothing_passes
    assert (result.keys, result.patch) == ((), {})
    assert len(machine.made) == 1


def test_a_group_that_breaks_something_of_its_own_is_left_out_of_the_whole():
    def breaks(config):
        return config["optimizer"]["type"] != "SGD"

    result = found(Machine(lambda config: standing(config, "communication_data_type"), differs=breaks))
    assert result.keys == ("communication_data_type",)


def test_a_change_that_only_uncovers_another_failure_is_told():
    def other(config):
        return "communication_data_type" not in config

    result = found(Machine(lambda config: not other(config), differs=other))
    assert not result.keys
    suspicion = next(change for change in POOL if change.keys == ("communication_data_type",))
    result = found(Machine(lambda config: not other(config), differs=other), suspicions=[suspicion])
    assert result.masked == ("communication_data_type",)


@given(IN_HARNESS)
@settings(deadline=None)
def test_what_is_suspected_costs_two_runs(key):
    suspicion = next(change for change in POOL if change.keys == (key,))
    machine = Machine(lambda config: standing(config, key))
    result = bisect(CONFIG, (), suspicions=[suspicion], runs=machine, seen=2)
    assert result.keys == (key,)
    assert len(machine.made) == (4 if key in RACES else 2)


@given(IN_HARNESS, st.integers(0, 30))
@settings(deadline=None)
def test_a_spent_budget_leaves_a_change_that_passed_or_none(key, limit):
    machine = Machine(lambda config: standing(config, key), limit=limit)
    result = found(machine)
    assert len(machine.made) <= limit
    if result.stopped:
        assert result.stopped == "no time"
        assert not result.nothing_passes
        assert not result.keys or not machine.fails(patch.apply(CONFIG, result.patch))
    else:
        assert result.keys == (key,)
    if limit == 0:
        assert any("communication_data_type" in words for words in result.untried)


@given(IN_HARNESS)
@settings(deadline=None)
def test_no_config_is_run_twice_except_to_be_sure_of_the_result(key):
    machine = Machine(lambda config: standing(config, key))
    found(machine)
    again = len(machine.made) - len(set(machine.made))
    assert again <= 4


def test_a_race_is_shown_by_rates():
    chance = random.Random(1)
    result = found(Machine(lambda config: standing(config, RACE) and chance.random() < 0.8))
    assert (result.keys, result.verified) == ((RACE,), True)
    assert (str(result.given), str(result.changed)) == ("2 of 3", "0 of 3")


def test_a_race_that_does_not_come_again_is_not_proved():
    result = found(Machine(lambda config: False))
    assert (str(result.given), result.verified) == ("1 of 3", False)


def test_a_failure_that_never_comes_again_is_laid_to_no_key():
    one = [change for change in POOL if change.keys == ("communication_data_type",)]
    result = bisect(CONFIG, (), suspicions=one, runs=Machine(lambda config: False))
    assert (str(result.given), result.verified) == ("1 of 2", False)
    assert bisect(CONFIG, (), suspicions=one, runs=Machine(lambda config: False), seen=2).verified


def test_chance_is_seldom_taken_for_proof():
    right = wrong = 0
    for seed in range(100):
        chance = random.Random(seed)
        result = found(Machine(lambda config: standing(config, RACE) and chance.random() < 0.9))  # noqa: B023
        if result.verified:
            right, wrong = right + (result.keys == (RACE,)), wrong + (result.keys != (RACE,))
    assert right >= 80
    assert wrong <= 15


def test_a_change_that_fails_when_it_is_run_again_is_not_believed():
    times = []

    def fails(config):
        times.append(config)
        return len(times) % 2 == 0

    assert not found(Machine(fails)).verified


@given(st.sets(st.integers(0, 30), min_size=1, max_size=5))
def test_ddmin_keeps_what_is_needed(needed):
    assert set(ddmin(range(31), lambda items: needed <= set(items))) == needed


def test_ddmin_of_one_item_asks_nothing():
    assert ddmin([1], lambda items: pytest.fail("asked")) == [1]
