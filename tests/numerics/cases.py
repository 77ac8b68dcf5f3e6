"""One planted fault for each cause class, with what must be named: model, batches and settings of a DeepSpeed run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NAN, INF = float("nan"), float("inf")
STEPS = 3
STAGES = (0, 2, 3)


class Net(nn.Module):
    """Two layers around the part that goes wrong."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.part = part
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(torch.tanh(self.first(x))))


class Part(nn.Module):
    """Does `function` to its input in calls from the third on (that is in step 2), before that nothing."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Once(nn.Module):
    """NaN in the one call that counts, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.given = False

    def forward(self, x: Tensor) -> Tensor:
        if Once.spoil and self.training:
            Once.spoil = False
            return x * torch.full_like(x, NAN)
        return x

    spoil = False


def masked_row(x: Tensor) -> Tensor:
    mask = torch.zeros(4, 4, dtype=x.dtype)
    mask[1] = -INF
    return torch.softmax(x @ x.T + mask, dim=-1) @ x


def unwritten(x: Tensor) -> Tensor:
    """torch fills memory that nothing was written to with NaN where it is asked to be deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        return x + torch.empty(8, dtype=x.dtype)
    finally:
        torch.use_deterministic_algorithms(False)


def mean_square(out: Tensor, _: Tensor) -> Tensor:
    return out.float().pow(2).mean()


def ignored(out: Tensor, _: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float(), torch.full((len(out),), -100))


@dataclass(frozen=True, kw_only=True)
class Case:
    """`expected` are the fields of the first bad value that must be right on the rank that saw it first; `first_rank`
    is that rank, where one alone is to blame. `impossible` tells for a stage why the class cannot occur there."""

    build: Callable[[], nn.Module]
    expected: dict[str, Any]
    precision: str = "bf16"
    lr: float = 1e-3
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square
    spoil: Callable[[int, int, Tensor, nn.Module], None] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    first_rank: int | None = None
    impossible: dict[int, str] = field(default_factory=dict)

    def open_in_auto(self, stage: int) -> set[str]:
        """Fields that the always-on watch may leave open: of a loss that the script computes, and at ZeRO-3, where one
        rank alone cannot run a batch again, what lies inside a block."""
        if self.expected["phase"] == "forward" and stage == 3:
            return {"module", "op", "cause", "kind"}
        return {"cause"} if self.expected["phase"] == "loss" else set()


def bad_batch(rank: int, step: int, batch: Tensor, _: nn.Module) -> None:
    if rank == 1 and step == 1:
        batch[0, 0] = NAN


def only_now(rank: int, step: int, batch: Tensor, _: nn.Module) -> None:
    Once.spoil = rank == 1 and step == 1


def with_nan_weight() -> nn.Module:
    net = Net(nn.Linear(8, 8))
    with torch.no_grad():
        net.part.weight[0, 0] = NAN  # type: ignore[index, operator]
    return net


def large_linear() -> nn.Module:
    net = Net(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with torch.no_grad():
        net.part[0].weight.fill_(6e4)  # type: ignore[index, union-attr, operator]
        net.first.weight.zero_()
        net.first.bias.fill_(1.0)
    return net


CASES: dict[str, Case] = {
    "overflow": Case(
        build=large_linear,
        precision="fp16",
        expected={"step": 0, "phase": "forward", "module": "part.0", "kind": "inf", "op": "aten.addmm"},
    ),
    "cast-overflow": Case(
        build=lambda: Net(Part(lambda x: ((x.float() * 0 + 1) * 1e6).to(torch.float16))),
        precision="fp16",
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "inf", "op": "aten._to_copy"},
    ),
    "domain": Case(
        build=lambda: Net(Part(lambda x: torch.log(x * 0))),
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "inf", "op": "aten.log"},
    ),
    "backward-singularity": Case(
        build=lambda: Net(Part(lambda x: torch.sqrt((x * 0).pow(2)) + x)),
        expected={"step": 0, "phase": "backward", "module": "part", "kind": "nan"},
    ),
    "masked-row": Case(
        build=lambda: Net(Part(masked_row)),
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "nan", "op": "aten._softmax"},
    ),
    "ignored-labels": Case(
        build=lambda: Net(nn.Tanh()),
        loss=ignored,
        expected={"step": 0, "phase": "loss", "module": "", "tensor": "loss", "kind": "nan"},
    ),
    "inf-minus-inf": Case(
        build=lambda: Net(Part(lambda x: torch.full_like(x, -INF) + x - torch.full_like(x, -INF))),
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "nan", "op": "aten.sub"},
    ),
    "lost-eps": Case(
        build=lambda: Net(Part(lambda x: x / ((x * 0).abs() + 1e-8))),
        precision="fp16",
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "inf", "op": "aten.div"},
    ),
    "bad-input": Case(
        build=lambda: Net(nn.Tanh()),
        spoil=bad_batch,
        expected={"step": 1, "phase": "input", "module": "", "tensor": "input[0]", "kind": "nan"},
        first_rank=1,
    ),
    "corrupted-weights": Case(
        build=with_nan_weight,
        expected={"step": 0, "phase": "parameter", "module": "part", "tensor": "weight", "kind": "nan"},
    ),
    "exploded-weights": Case(
        build=lambda: Net(nn.Linear(8, 8)),
        lr=1e25,
        expected={"step": 1, "phase": "forward"},
    ),
    "optimizer-born": Case(
        build=lambda: Net(nn.Linear(8, 8)),
        loss=lambda out, _: out.float().pow(2).sum() * 100,
        settings={  # without clipping, which is DeepSpeed's default, the gradients are as large as that
            "optimizer": {"type": "SGD", "params": {"lr": 3e38}},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
        expected={"step": 0, "phase": "step"},
    ),
    "uninitialised": Case(
        build=lambda: Net(Part(unwritten)),
        expected={"step": 0, "phase": "forward", "module": "part", "kind": "nan", "op": "aten.empty"},
    ),
    "reduction-overflow": Case(
        build=lambda: Net(nn.Tanh()),
        loss=lambda out, _: out.float().mean() * 1e8,
        settings={"communication_data_type": "fp16"},
        expected={"step": 0, "phase": "reduction"},
    ),
    "not-reproducible": Case(
        build=lambda: Net(Once()),
        spoil=only_now,
        expected={"step": 1, "phase": "forward", "module": "part", "kind": "nan"},
        first_rank=1,
    ),
}


def config(case: Case, stage: int) -> dict[str, Any]:
    """The ds_config of a case."""
    settings = config_for(stage, case.precision, lr=case.lr) | case.settings
    if case.precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4
    return settings


def config_for(stage: int, precision: str, *, lr: float) -> dict[str, Any]:
    """A ds_config for small batches. At stage 3 nothing stays gathered between uses."""
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero |= dict.fromkeys(
            ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 0
        ) | {"stage3_prefetch_bucket_size": 0}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": zero,
    }
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    return settings
