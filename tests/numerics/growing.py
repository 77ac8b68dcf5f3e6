"""What each of two ranks runs to see a forecast: real DeepSpeed, and activations that grow by a third every step.

    torchrun --nproc_per_node 2 -m tests.numerics.growing FOLDER PRECISION:STAGE:MODE…

Each rank writes FOLDER/RANK.json: by PRECISION:STAGE:MODE the warnings, the first bad value and the problems.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from dsdoctor.numerics import attach
from tests.numerics.rank_script import run_keys

GROWTH, STEPS, START = 1.3, 12, 2000.0
"""2000 * 1.3 ** 11 is 35,800: still finite in fp16."""


class Grows(nn.Module):
    """The block passes on what it is given, larger each step, as a residual stream that drifts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.last(torch.tanh(hidden / 1e5))
        return out


class Block(nn.Module):
    size = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1) * self.scale * Block.size / (2 if x.abs().max() > 1 else 1)


def run(precision: str, stage: int, mode: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Grows()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
    }
    if precision == "fp16":
        settings["fp16"]["initial_scale_power"] = 4
    engine = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=settings)[0]
    dtype = next(engine.module.parameters()).dtype
    detector = attach(engine, mode=mode, on_first_bad=lambda *_: None)
    for step in range(STEPS):
        Block.size = START * GROWTH**step
        batch = torch.randn(4, 8).to(dtype)
        engine.backward(engine(batch).float().pow(2).mean())
        engine.step()
    detector.detach()
    bad = detector.first_bad
    return {"warnings": detector.warnings, "bad": bad and bad.module, "problems": detector.problems}


if __name__ == "__main__":
    run_keys(lambda precision, stage, mode: run(precision, int(stage), mode))
