"""The schedules against DeepSpeed's own, rate for rate over 200 steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from dsdoctor.runs.plain import release, schedules

ADAM = torch.optim.AdamW
SGD = torch.optim.SGD
CASES: list[tuple[str, dict[str, Any], type[torch.optim.Optimizer]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 30}, ADAM),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": [0.01, 0.02], "warmup_type": "linear"}, ADAM),
    ("WarmupLR", {"warmup_num_steps": 1}, SGD),
    ("WarmupDecayLR", {"total_num_steps": 150, "warmup_max_lr": 0.01, "warmup_num_steps": 20}, ADAM),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 20, "warmup_type": "linear"}, ADAM),
    ("WarmupCosineLR", {"total_num_steps": 120, "warmup_num_steps": 25}, ADAM),
    ("WarmupCosineLR", {"total_num_steps": 120, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}, SGD),
    ("WarmupCosineLR", {"total_num_steps": 90, "warmup_num_steps": 10, "warmup_type": "linear"}, ADAM),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 7}, ADAM),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 9, "lr_range_test_step_rate": 3.0, "lr_range_test_staircase": True},
        SGD,
    ),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 40}, ADAM),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-3,
            "cycle_max_lr": [1e-2, 2e-2],
            "cycle_first_step_size": 30,
            "cycle_second_step_size": 50,
            "cycle_first_stair_count": 5,
            "cycle_second_stair_count": 4,
            "decay_step_size": 10,
            "decay_lr_rate": 0.5,
            "decay_mom_rate": 0.01,
            "cycle_min_mom": 0.7,
        },
        ADAM,
    ),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_momentum": False}, ADAM),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 20}, SGD),
]


def optimizer_of(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.05 * (i + 1)} for i in range(2)]
    return kind(groups)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "params", "kind"), CASES)
def test_follows_deepspeed(name: str, params: dict[str, Any], kind: type[torch.optim.Optimizer]) -> None:
    theirs, ours = optimizer_of(kind), optimizer_of(kind)
    reference = getattr(lr_schedules, name)(theirs, **params)
    notes: list[str] = []
    schedule = schedules.from_config(name, ours, params, notes)
    assert notes == []
    for step in range(200):
        for expected, got in zip(theirs.param_groups, ours.param_groups, strict=True):
            assert got["lr"] == pytest.approx(expected["lr"], rel=1e-12, abs=1e-15), step
            assert got.get("betas", ()) == pytest.approx(expected.get("betas", ()), rel=1e-12), step
        reference.step()
        schedule.step()
        assert schedule.get_last_lr() == pytest.approx(reference.get_last_lr(), rel=1e-12, abs=1e-15)


def test_goes_on_from_a_saved_state() -> None:
    first, second = optimizer_of(ADAM), optimizer_of(ADAM)
    schedule = schedules.WarmupLR(first, warmup_num_steps=50)
    for _ in range(20):
        schedule.step()
    resumed = schedules.WarmupLR(second, warmup_num_steps=50)
    resumed.load_state_dict(schedule.state_dict())
    schedule.step()
    resumed.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()


def test_torch_schedules_go_by_their_class_name() -> None:
    notes: list[str] = []
    optimizer = optimizer_of(SGD)
    schedule = schedules.from_config("StepLR", optimizer, {"step_size": 2, "gamma": 0.1, "speed": 3}, notes)
    assert isinstance(schedule, torch.optim.lr_scheduler.StepLR)
    assert "speed" in notes[0]


def test_old_releases_have_a_fixed_warm_up_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "warmup_max_lr", lambda: 0.001)
    schedule = schedules.WarmupLR(optimizer_of(ADAM), warmup_num_steps=2)
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == [0.001, 0.001]


def test_values_for_the_wrong_number_of_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parameter groups"):
        schedules.WarmupLR(optimizer_of(ADAM), warmup_max_lr=[0.1, 0.2, 0.3])
