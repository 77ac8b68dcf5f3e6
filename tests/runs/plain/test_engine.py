"""The engine on one rank: what it computes, against torch by hand, and what a script may ask of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dsdoctor.runs import plain
from dsdoctor.runs.plain.stepping import PlainOptimizer

pytestmark = pytest.mark.usefixtures("alone")

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
BASE = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, **SGD}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def start(model: nn.Module | None = None, **more: Any) -> plain.PlainEngine:
    keywords = {k: more.pop(k) for k in ("optimizer", "lr_scheduler", "model_parameters", "args") if k in more}
    client = "optimizer" in keywords and keywords["optimizer"] is not None
    config = {**BASE, **more}
    if client:
        del config["optimizer"]
    engine, *_ = plain.initialize(model=model or net(), config=config, **keywords)
    return engine


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(batch(step, dtype)).float().square().mean()


def train(engine: plain.PlainEngine, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for step in range(steps):
        loss = loss_of(engine, step, dtype)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# Mathematics


def test_fp32_is_plain_torch_with_clipping_and_accumulation() -> None:
    engine = start(gradient_accumulation_steps=2, gradient_clipping=0.1)
    train(engine, 6)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(0, 6, 2):
        ((loss_of(model, step) + loss_of(model, step + 1)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(engine.module), weights(model))
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-6)
    assert norm > 0.1, "the reported norm is the one before clipping"
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 6, 12)


def test_bf16_keeps_what_a_bf16_weight_would_lose() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    engine = start(model, bf16={"enabled": True})
    for _ in range(8):
        # a gradient of 0.01 and a rate of 0.1: each step is 0.001, below the 0.0039 to the next bf16 number under 1
        engine.backward((engine(torch.ones(1, 1, dtype=torch.bfloat16)) * 0.01).sum())
        engine.step()
    assert model.weight.dtype is torch.bfloat16
    assert engine.optimizer is not None
    master = engine.optimizer.param_groups[0]["params"][0]
    assert master.dtype is torch.float32
    assert master.item() == pytest.approx(1 - 0.008, abs=1e-4)
    assert model.weight.item() == pytest.approx(0.992, abs=0.002)


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_without_fp16_a_nan_goes_into_the_weights(precision: dict[str, Any]) -> None:
    engine = start(**precision)
    loss = loss_of(engine, 0, next(engine.parameters()).dtype) * float("nan")
    engine.backward(loss)
    engine.step()
    assert engine.was_step_applied()
    assert all(parameter.isnan().all() for parameter in engine.parameters())


def test_fp16_skips_until_the_scale_fits_and_holds_the_schedule_back() -> None:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    warm = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2, "warmup_type": "linear"}}
    engine = start(model, scheduler=warm, **FP16)
    seen = []
    for _ in range(4):
        # gradient 10000 at scale 16, 8, 4: only the last is within fp16's 65504
        engine.backward((engine(torch.full((1, 1), 10000.0, dtype=torch.float16)).float()).sum())
        engine.step()
        seen.append((engine.was_step_applied(), engine.cur_scale, engine.lr_scheduler.last_batch_iteration))
    assert seen == [(False, 8.0, -1), (False, 4.0, -1), (True, 4.0, 0), (True, 4.0, 1)]
    assert (engine.skipped_steps, engine.global_steps) == (2, 4)
    assert float(engine.get_global_grad_norm()) == pytest.approx(10000)


def test_a_skipped_step_reports_an_infinite_norm_and_ends_the_run_at_the_floor() -> None:
    engine = start(fp16={"enabled": True, "initial_scale_power": 1, "hysteresis": 1})
    engine.backward(loss_of(engine, 0, torch.float16) * float("inf"))
    engine.step()
    assert engine.optimizer.overflow
    assert math.isinf(engine.get_global_grad_norm())
    engine.backward(loss_of(engine, 0, torch.float16) * float("inf"))
    with pytest.raises(Exception, match="Current loss scale already at minimum"):
        engine.step()


def test_fp16_trains_like_fp32_within_its_rounding() -> None:
    low = train(start(**FP16), 10, torch.float16)
    full = train(start(), 10)
    # fp16 rounds to 2**-11; the few operations between input and loss add up to some of these
    assert low == pytest.approx(full, rel=20 * 2**-11)


def test_autocast_runs_the_forward_low_and_keeps_fp32_weights() -> None:
    engine = start(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert engine(batch(0)).dtype is torch.bfloat16
    assert next(engine.parameters()).dtype is torch.float32
    assert train(engine, 5) == pytest.approx(train(start(), 5), rel=20 * 2**-8)


def test_fp16_autocast_scales_and_skips() -> None:
    engine = start(torch_autocast={"enabled": True, "dtype": "float16"})
    assert engine.cur_scale == 2.0**16
    engine.backward(loss_of(engine, 0) * float("inf"))
    engine.step()
    assert (engine.skipped_steps, engine.cur_scale) == (1, 2.0**15)


def test_auto_cast_halves_positional_inputs_however_nested() -> None:
    class Nested(nn.Linear):
        def forward(self, pair: dict[str, list[Tensor]]) -> Tensor:  # type: ignore[override]
            return super().forward(pair["x"][0])

    engine = start(Nested(3, 1), fp16={"enabled": True, "auto_cast": True})
    assert engine({"x": [batch(0)]}).dtype is torch.float16


def test_buffers_keep_their_precision_or_follow_the_config() -> None:
    def with_buffer() -> nn.Module:
        model = net()
        model.register_buffer("table", torch.zeros(2))
        return model

    assert start(with_buffer(), bf16={"enabled": True}).module.table.dtype is torch.float32
    cast = start(with_buffer(), bf16={"enabled": True}, data_types={"buffer_dtype": "bf16"})
    assert cast.module.table.dtype is torch.bfloat16


# Ways of a script


def test_a_direct_backward_is_shared_over_the_accumulation_steps() -> None:
    direct, usual = start(gradient_accumulation_steps=2), start(gradient_accumulation_steps=2)
    for step in range(4):
        loss_of(direct, step).backward()
        direct.step()
    train(usual, 4)
    torch.testing.assert_close(weights(direct.module), weights(usual.module))


def test_one_engine_s_backward_through_another_s_model_is_shared_once() -> None:
    first, second = start(gradient_accumulation_steps=2), start(nn.Linear(1, 1), gradient_accumulation_steps=2)
    second.set_gradient_accumulation_boundary(False)
    second.backward(second(first(batch(0))).square().mean())
    alone, through = net(), second.module
    through(alone(batch(0))).square().mean().div(2).backward()
    torch.testing.assert_close(first.module[0].weight.grad, alone[0].weight.grad)


def test_fp16_refuses_a_direct_backward_unless_it_was_scaled() -> None:
    engine = start(**FP16)
    loss_of(engine, 0, torch.float16).backward()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine.step()
    engine.zero_grad()
    before = weights(engine.module)
    engine.scale(loss_of(engine, 0, torch.float16)).backward()
    engine.step()
    assert not torch.equal(before[0], weights(engine.module)[0])


def test_two_backwards_in_one_step_add_up() -> None:
    twice, once = start(), start()
    twice.backward(loss_of(twice, 0))
    twice.backward(loss_of(twice, 1))
    twice.step()
    once.backward(loss_of(once, 0) + loss_of(once, 1))
    once.step()
    torch.testing.assert_close(weights(twice.module), weights(once.module))


def test_the_script_may_own_the_boundary() -> None:
    engine = start()
    before = weights(engine.module)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert not engine.was_step_applied()
    torch.testing.assert_close(weights(engine.module), before)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(loss_of(engine, 1))
    engine.step()
    assert engine.was_step_applied()
    assert engine.global_steps == 1


def test_unmanaged_accumulation_steps_when_step_is_called() -> None:
    engine = start(managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    for step in range(3):
        engine.backward(loss_of(engine, step), scale_wrt_gas=False)
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 6)


def test_stepping_inside_no_sync_is_refused() -> None:
    engine = start()
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
        with pytest.raises(AssertionError, match="no_sync"):
            engine.step()
    engine.step()
    assert engine.was_step_applied()


def test_a_module_used_outside_the_engine_is_trained_too() -> None:
    engine = start()
    before = engine.module[2].weight.detach().clone()
    hidden = engine.module[0](batch(0))
    engine.backward((hidden @ engine.module[2].weight.t()).square().mean())
    engine.step()
    assert not torch.equal(engine.module[2].weight, before)


def test_parameters_from_a_generator_and_in_groups() -> None:
    model = net()
    assert len(start(model, model_parameters=(p for p in model.parameters())).optimizer.pairs) == 4
    model = net()
    groups = [{"params": [model[0].weight], "lr": 0.5}, {"params": [model[2].weight], "weight_decay": 0.1}]
    engine = start(model, model_parameters=groups, bf16={"enabled": True})
    assert engine.get_lr() == [0.5, 0.1]
    bias = model[0].bias.detach().clone()
    train(engine, 2, torch.bfloat16)
    assert torch.equal(model[0].bias, bias), "not given, not trained"


def test_frozen_parameters_stay_as_they_are() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    engine = start(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    model[0].weight.requires_grad_(True)
    train(engine, 2)
    assert torch.equal(model[0].weight, before), "DeepSpeed fixes at the start what it trains"


def test_a_model_without_trainable_parameters_only_runs_forward() -> None:
    model = net().requires_grad_(False)
    config = {key: value for key, value in BASE.items() if key != "optimizer"}
    engine, optimizer, loader, schedule = plain.initialize(model=model, config=config)
    assert (optimizer, loader, schedule) == (None, None, None)
    assert engine(batch(0)).shape == (2, 1)
    with pytest.raises(AssertionError, match="optimizer"):
        engine.step()


def test_a_client_optimizer_and_its_scheduler_go_on_working() -> None:
    model = net()
    client = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(client, 0.5)
    engine = start(model, optimizer=client, lr_scheduler=schedule, bf16={"enabled": True})
    train(engine, 3, torch.bfloat16)
    assert engine.get_lr() == [pytest.approx(0.1 * 0.5**3)]
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.lr_scheduler is schedule
    torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)


def test_callables_make_optimizer_and_scheduler() -> None:
    engine = start(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.2),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    train(engine, 1)
    assert engine.get_lr() == [0.1]


def test_a_loss_that_is_none_is_refused() -> None:
    engine = start()
    for loss in (torch.ones(2, requires_grad=True) * 2, torch.tensor(1.0), 3.0):
        with pytest.raises(AssertionError, match="scalar"):
            engine.backward(loss)  # type: ignore[arg-type]


def test_building_draws_no_random_numbers() -> None:
    model = net()
    before = torch.get_rng_state()
    engine = plain.initialize(model=model, config=BASE, training_data=TensorDataset(torch.zeros(8, 3)))[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(engine.training_dataloader) == 4


# Questions


def test_names_of_parameters_are_as_in_deepspeed_s_engine() -> None:
    engine = start()
    assert next(iter(engine.state_dict())) == "module.0.weight"
    assert next(iter(engine.module_state_dict())) == "0.weight"


def test_attributes_of_the_model_pass_through() -> None:
    model = net()
    model.vocabulary = 17
    engine = start(model)
    assert engine.vocabulary == 17
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = engine.nothing_like_it


def test_what_only_deepspeed_has_says_so_and_hasattr_says_no() -> None:
    engine = start()
    with pytest.raises(plain.NotPlayed, match=r"engine\.offload_states has no plain counterpart"):
        _ = engine.offload_states
    assert not hasattr(engine, "offload_states")


def test_it_says_so_with_the_plain_engine_in_deepspeed_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.runtime.engine.DeepSpeedEngine", plain.PlainEngine)
    engine = start()
    for name in ("offload_states", "tput_timer"):
        with pytest.raises(plain.NotPlayed, match=name):
            getattr(engine, name)


def test_refuses_a_pipeline_and_partitioned_parameters() -> None:
    class PipelineModule(nn.Linear):
        pass

    with pytest.raises(plain.NotPlayed, match="pipeline"):
        start(PipelineModule(1, 1))
    model = net()
    model[0].weight.ds_id = 0
    with pytest.raises(plain.NotPlayed, match=r"0\.weight.*zero\.Init"):
        start(model)


def test_the_train_batch_can_be_set_through_accumulation() -> None:
    engine = start()
    engine.set_train_batch_size(6)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 6)
    with pytest.raises(ValueError, match="multiple"):
        engine.set_train_batch_size(5)


def test_answers_for_the_settings() -> None:
    engine = start(**FP16, steps_per_print=7)
    assert (engine.train_micro_batch_size_per_gpu(), engine.steps_per_print()) == (2, 7)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.dynamic_loss_scale()) == (True, False, True)
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (False, 0)
    assert (engine.local_rank, engine.global_rank, engine.world_size) == (0, 0, 1)
    assert engine.device == torch.device("cpu")
    engine.eval()
    assert not engine.module.training


# Checkpoints


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, FP16])
def test_goes_on_from_a_checkpoint_as_if_never_stopped(precision: dict[str, Any], tmp_path: Path) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    warm = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    engine, *_ = plain.initialize(model=net(), config={**BASE, **adam, **warm, **precision})
    dtype = next(engine.parameters()).dtype
    train(engine, 3, dtype)
    assert engine.save_checkpoint(str(tmp_path), client_state={"epoch": 4})
    expected = train(engine, 3, dtype)
    other, *_ = plain.initialize(model=net(), config={**BASE, **adam, **warm, **precision})
    path, client = other.load_checkpoint(str(tmp_path))
    assert path == str(tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    assert client == {"epoch": 4}
    assert other.global_steps == 3
    assert train(other, 3, dtype) == expected


def test_no_checkpoint_is_none_and_a_missing_tag_an_error(tmp_path: Path) -> None:
    engine = start()
    assert engine.load_checkpoint(str(tmp_path)) == (None, None)
    with pytest.raises(FileNotFoundError):
        engine.load_checkpoint(str(tmp_path), tag="global_step9")


def test_saves_the_weights_alone(tmp_path: Path) -> None:
    engine = start(bf16={"enabled": True})
    assert engine.save_16bit_model(str(tmp_path), "weights.bin")
    saved = torch.load(tmp_path / "weights.bin")
    assert saved["0.weight"].dtype is torch.bfloat16


def test_masters_follow_when_weights_are_loaded() -> None:
    engine = start(bf16={"enabled": True})
    state = {name: torch.ones_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict(state)
    assert isinstance(engine.optimizer, PlainOptimizer)
    assert all(bool((pair.master == 1).all()) for pair in engine.optimizer.pairs)
