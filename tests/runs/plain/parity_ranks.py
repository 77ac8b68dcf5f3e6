"""Trains the same small models with real DeepSpeed and with the plain engine, in the same ranks, and writes what came.

Started by test_parity under torchrun: `parity_ranks.py OUT.json`. Rank 0 writes, for each rank, case and
engine: losses, loss scales, norms, learning rates, counters, and the random state right after initialize.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.data import TensorDataset

from dsdoctor.runs import plain

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
L2 = {"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}


class Net(nn.Module):
    """Small, with a part that is never used, dropout (random numbers) and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(16)
        self.unused = nn.Linear(16, 16)
        self.last = nn.Linear(16, 1)
        self.register_buffer("factor", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.drop(torch.relu(self.first(x))))) * self.factor.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A ds_config beyond the common part, and what the script does in its own way."""

    zero: int = 1
    more: dict[str, Any] = field(default_factory=dict)
    client: bool = False
    direct: bool = False

    def config(self) -> dict[str, Any]:
        optimizer = {} if self.client else {"optimizer": ADAM}
        common = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": self.zero},
            "zero_allow_untested_optimizer": True,
        }
        return json.loads(json.dumps({**common, **optimizer, **self.more}))


def fp16(**keys: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "loss_scale_window": 3, **keys}}


BF16 = {"bf16": {"enabled": True}}
CASES = {
    "fp32-zero1": Case(),
    "fp32-zero2-accumulated": Case(
        zero=2, more={"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "scheduler": WARMUP}
    ),
    "fp32-clipped": Case(more={"gradient_clipping": 0.01}),
    "fp32-l2": Case(more={"optimizer": L2}),
    "fp32-client-optimizer": Case(client=True),
    "fp32-direct-backward": Case(direct=True, more={"gradient_accumulation_steps": 2}),
    "bf16-zero2": Case(zero=2, more={**BF16, "gradient_clipping": 0.5}),
    "bf16-zero3": Case(zero=3, more=BF16),
    "bf16-fp32-accumulation": Case(
        more={**BF16, "gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": "fp32"}}
    ),
    "fp16-overflow": Case(zero=2, more={**fp16(initial_scale_power=15, hysteresis=2), "scheduler": WARMUP}),
    "fp16-overflow-accumulated": Case(
        more={**fp16(initial_scale_power=15, hysteresis=1), "gradient_accumulation_steps": 2}
    ),
    "fp16-static-too-high": Case(more=fp16(loss_scale=2.0**26)),
}


def train(initialize: Any, case: Case, micro_steps: int) -> dict[str, Any]:
    """Run one case with one engine and return what this rank saw."""
    torch.manual_seed(11 + dist.get_rank())
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) if case.client else None
    halved = (lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)) if case.client else None
    engine, optimizer, _, _ = initialize(
        model=model,
        model_parameters=(p for p in model.parameters()),
        optimizer=optimizer,
        lr_scheduler=halved,
        config=case.config(),
    )
    seen: dict[str, Any] = {"rng": torch.get_rng_state().tolist(), "prefix": next(iter(engine.state_dict()))}
    seen.update(losses=[], scales=[], norms=[], rates=[], applied=[])
    dtype = next(engine.parameters()).dtype
    for step in range(micro_steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, 8, generator=generator)
        output = engine(x.to(dtype)).float()
        loss = nn.functional.mse_loss(output, x.sum(1, keepdim=True))
        if case.direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        seen["losses"].append(float(loss.detach()))
        seen["scales"].append(float(optimizer.cur_scale) if hasattr(optimizer, "cur_scale") else 1.0)
        norm = engine.get_global_grad_norm()
        seen["norms"].append(None if norm is None else float(norm))
        seen["rates"].append(float(engine.get_lr()[0]))
        seen["applied"].append(engine.was_step_applied())
    if case.zero < 3:
        seen["unused"] = model.unused.weight.float().tolist()
    seen["counters"] = [engine.skipped_steps, engine.global_steps, engine.global_samples, engine.micro_steps]
    engine.destroy()
    return seen


class Spectral(nn.Module):
    """A complex weight on the spectrum, which DeepSpeed's flat fp32 buffers cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 5).to(torch.cfloat))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8))


def spectral_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.mse_loss(model(x), x.roll(1, 1)[:, :1])


def spectral() -> dict[str, Any]:
    """The same steps with the plain engine, and by hand: one process that averages the losses of both ranks."""
    seen: dict[str, Any] = {"plain": [], "by hand": []}
    torch.manual_seed(3)
    model = Spectral()
    by_hand = deepcopy(model)
    optimizer = torch.optim.AdamW(
        by_hand.parameters(), **{k: v for k, v in ADAM["params"].items() if k != "torch_adam"}
    )
    engine, *_ = plain.initialize(model=model, config=Case().config() | {"gradient_clipping": 0.0})
    for step in range(8):
        loss = spectral_loss(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        both = [spectral_loss(by_hand, step, rank) for rank in range(dist.get_world_size())]
        torch.stack(both).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen["plain"].append(loss.item())
        seen["by hand"].append(both[dist.get_rank()].item())
    return seen


RESUMED = {
    "zero1-fp16": Case(zero=1, more={**fp16(initial_scale_power=14, hysteresis=1), "scheduler": WARMUP}),
    "zero2-bf16": Case(zero=2, more=BF16),
    "zero3-bf16": Case(zero=3, more=BF16),
    "zero3-fp32": Case(zero=3, more={"gradient_clipping": 0.5}),
}


def resumed(case: Case, folder: str) -> dict[str, Any]:
    """A checkpoint that DeepSpeed writes after some steps, and how DeepSpeed and the plain engine go on from it."""
    seen: dict[str, Any] = {}
    whole = saved(deepspeed.initialize, case, folder)
    for name, initialize in (("deepspeed", deepspeed.initialize), ("plain", plain.initialize)):
        torch.manual_seed(99)
        model = Net().eval()
        engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=case.config())
        engine.load_checkpoint(folder, tag="here")
        seen[name] = [*steps_of(engine, 6, 12), float(engine.global_steps)]
        engine.destroy()
    seen["without a break"] = whole
    return seen


def saved(initialize: Any, case: Case, folder: str) -> list[float]:
    torch.manual_seed(5)
    model = Net().eval()
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=case.config())
    steps_of(engine, 0, 6)
    engine.save_checkpoint(folder, tag="here")
    whole = [*steps_of(engine, 6, 12), float(engine.global_steps)]
    engine.destroy()
    return whole


def steps_of(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        output = engine(x.to(next(engine.parameters()).dtype)).float()
        loss = nn.functional.mse_loss(output, x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def batches(initialize: Any) -> list[list[int]]:
    """Two passes over the engine's own data loader, without worker processes."""
    model = nn.Linear(1, 1)
    config = Case(more={"dataloader_drop_last": True}).config()
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = engine.deepspeed_io(TensorDataset(torch.arange(30.0)), num_local_io_workers=0, pin_memory=False)
    return [batch[0].int().tolist() for _ in range(2) for batch in loader]


def main() -> None:
    out = sys.argv[1]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed()
    engines = {"deepspeed": deepspeed.initialize, "plain": plain.initialize}
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        results[name] = {engine: train(initialize, case, 12) for engine, initialize in engines.items()}
    results["batches"] = {engine: batches(initialize) for engine, initialize in engines.items()}
    results["spectral"] = spectral()
    results["resumed"] = {name: resumed(case, f"{out}-{name}") for name, case in RESUMED.items()}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(gathered), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
