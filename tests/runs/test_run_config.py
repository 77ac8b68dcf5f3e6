"""What is changed in the copy of the ds_config, and what is read from it."""

from __future__ import annotations

from typing import Any

import pytest

from dsdoctor.runs import run_config


def test_fp32_drops_every_key_that_asks_for_less() -> None:
    config = {
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "torch_autocast": {"enabled": True},
        "communication_data_type": "fp16",
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
    }
    assert run_config.in_fp32(config) == {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    assert config["fp16"] == {"enabled": True}, "the given config is left alone"


def test_log_level_is_only_ever_raised() -> None:
    assert run_config.with_visible_overflows({})["log_level"] == "info"
    assert run_config.with_visible_overflows({"log_level": "error"})["log_level"] == "info"
    assert run_config.with_visible_overflows({"log_level": "debug"})["log_level"] == "debug"


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "fp32"),  # outside Hugging Face nobody resolves it, DeepSpeed drops it
        ({"torch_autocast": {"enabled": True, "dtype": "torch.float16"}}, "fp16"),
        ({"torch_autocast": {"enabled": True}}, "bf16"),
    ],
)
def test_precision(config: dict[str, Any], precision: str) -> None:
    assert run_config.precision(config) == precision


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({}, 0),
        ({"zero_optimization": {"stage": 3}}, 3),
        ({"zero_optimization": True}, 1),
        ({"zero_optimization": {}}, 0),
    ],
)
def test_zero_stage(config: dict[str, Any], stage: int) -> None:
    assert run_config.zero_stage(config) == stage


def test_accumulation_follows_from_the_batch_sizes() -> None:
    assert run_config.accumulation_steps({"gradient_accumulation_steps": 4}, 2) == 4
    assert run_config.accumulation_steps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, 2) == 4
    assert run_config.accumulation_steps({"train_batch_size": "auto"}, 2) == 1


def test_loss_scale_of_the_config() -> None:
    assert run_config.dynamic_loss_scale({"fp16": {"enabled": True}})
    assert not run_config.dynamic_loss_scale({"fp16": {"enabled": True, "loss_scale": 128}})
    assert not run_config.dynamic_loss_scale({"bf16": {"enabled": True}})
    assert run_config.min_loss_scale({"fp16": {"enabled": True}}) == 1  # DeepSpeed's default
    assert run_config.min_loss_scale({"fp16": {"enabled": True, "min_loss_scale": 8}}) == 8
    assert run_config.min_loss_scale({"bf16": {"enabled": True}}) is None


def test_differences_are_dotted_keys() -> None:
    given = {"a": 1, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    passed = {"a": 1, "zero_optimization": {"stage": 3, "overlap_comm": True}, "b": {}}
    assert run_config.differences(given, passed) == ("b", "zero_optimization.stage")
    assert run_config.differences(given, given) == ()


def test_monitors_without_a_path_would_write_into_the_home() -> None:
    config = {"tensorboard": {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": "x"}}
    assert list(run_config.written_paths(config)) == [
        ("tensorboard", "output_path", "~/tensorboard"),
        ("csv_monitor", "output_path", "x"),
    ]
