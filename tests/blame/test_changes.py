"""What may be changed in a config, and into what."""

import pytest

from dsdoctor.blame.bisect import changed
from dsdoctor.blame.changes import KEPT, changes
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.schema import schema_for
from tests.dsconfig.real import ask

MICRO = {"train_micro_batch_size_per_gpu": 4}


def pool(config, accumulation=1):
    return changes(Effective(data={**MICRO, **config}, schema=schema_for("0.19.8")), accumulation=accumulation)


def by_key(config, **more):
    return {change.keys[0]: change for change in pool(config, **more)}


def test_values_at_their_default_are_no_change():
    assert pool({"gradient_clipping": 1.0, "zero_optimization": {"stage": 0, "reduce_bucket_size": 500_000_000}}) == ()


def test_precision_and_batch_are_kept():
    found = by_key({"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 128}, "train_batch_size": 8})
    assert set(found) == {"fp16.loss_scale"}
    assert not {key for change in pool({"bf16": {"enabled": True}}) for key in change.keys} & set(KEPT)


def test_a_stage_is_lowered_step_by_step_and_takes_what_needs_it_along():
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    change = by_key({"zero_optimization": zero})["zero_optimization.stage"]
    assert [patch["zero_optimization"]["stage"] for patch in (*change.nearer, change.patch)] == [2, 1, 0]
    assert change.nearer[0]["zero_optimization"] == {"stage": 2, "offload_param": None}
    lowest = changed({**MICRO, "zero_optimization": zero}, [change])
    assert lowest["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize("needs", [{"fp16": {"enabled": True}}, {"data_types": {"grad_accum_dtype": "fp32"}}])
def test_what_stage_0_cannot_do_ends_at_stage_1(needs):
    change = by_key({"zero_optimization": {"stage": 2}, **needs})["zero_optimization.stage"]
    assert change.patch == {"zero_optimization": {"stage": 1}}
    assert "zero_optimization.stage" not in by_key({"zero_optimization": {"stage": 1}, **needs})


def test_overlap_comm_is_a_switch_where_nobody_wrote_it():
    assert "zero_optimization.overlap_comm" in by_key({"zero_optimization": {"stage": 3}})
    assert "zero_optimization.overlap_comm" not in by_key({"zero_optimization": {"stage": 2}})


def test_the_old_form_of_the_section():
    change = by_key({"zero_optimization": True})["zero_optimization.stage"]
    assert changed({"zero_optimization": True}, [change]) == {"zero_optimization": {"stage": 0}}


@pytest.mark.parametrize(
    ("optimizer", "rate", "insane"),
    [("AdamW", 1e-3, False), ("AdamW", 0.05, True), ("Lion", 0.05, True), ("SGD", 0.05, False), ("SGD", 50, True)],
)
def test_which_rates_are_out_of_all_measure(optimizer, rate, insane):
    change = by_key({"optimizer": {"type": optimizer, "params": {"lr": rate}}})["optimizer.params.lr"]
    assert (change.value, change.insane) == (True, insane)


def test_a_small_rate_is_innocent_and_auto_is_the_frameworks():
    assert "optimizer.params.lr" not in by_key({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}})
    assert "optimizer.params.lr" not in by_key({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})


def test_accumulation_goes_and_the_batch_triangle_holds():
    both = {"train_batch_size": 32, "gradient_accumulation_steps": 4}
    change = by_key(both, accumulation=4)["gradient_accumulation_steps"]
    assert changed({**MICRO, **both}, [change]) == {**MICRO, "gradient_accumulation_steps": 1}
    only = {"train_batch_size": 32, "gradient_accumulation_steps": 4}
    effective = Effective(data=only, schema=schema_for("0.19.8"))
    (change,) = [c for c in changes(effective, accumulation=4) if "gradient_accumulation_steps" in c.keys]
    assert changed(only, [change]) == {"train_batch_size": 8, "gradient_accumulation_steps": 1}


FULL = {
    **MICRO,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.3,
    "prescale_gradients": False,
    "communication_data_type": "fp32",
    "wall_clock_breakdown": True,
    "bf16": {"enabled": True, "check_grad_overflow": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "optimizer": {"type": "Lion", "params": {"lr": 0.1, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 0.1}},
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "aio": {"queue_depth": 16},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_bucket_size": 1000,
        "stage3_max_live_parameters": 1000,
        "sub_group_size": 1000,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "buffer_count": 5},
        "offload_param": {"device": "cpu", "pin_memory": False},
    },
}


def test_deepspeed_takes_the_config_with_any_single_change_and_with_all():
    found = pool(FULL, accumulation=2)
    tried = [changed(FULL, [change]) for change in found]
    tried += [changed(FULL, [type(c)(keys=c.keys, patch=p, group=c.group)]) for c in found for p in c.nearer]
    tried.append(changed(FULL, found))
    refused = [(config, answer.error) for config, answer in zip(tried, ask(tried), strict=True) if answer.error]
    assert refused == []
    assert len(found) > 25


def test_all_changes_together_leave_the_smallest_config():
    left = changed(FULL, pool(FULL, accumulation=2))
    assert {key for key, _value in keys.leaves(left)} == {
        *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16.enabled"),
        *("optimizer.type", "optimizer.params.lr", "optimizer.params.torch_adam"),
        *("zero_optimization.stage", "zero_optimization.overlap_comm"),
        *("activation_checkpointing", "data_types", "flops_profiler", "aio", "prescale_gradients"),
    }
    assert left["zero_optimization"]["stage"] == 1
