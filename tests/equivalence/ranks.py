"""Trains a small model with real DeepSpeed and with the plain engine in the same two ranks, case after case.

Started under torchrun: `ranks.py OUT.json PATTERN…`. Rank 0 writes, for each case of `cases.configs` whose name begins
with one of the patterns: the losses and rates of both engines on both ranks, or why DeepSpeed did not build the engine.
"""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from dsdoctor.runs import plain
from tests.equivalence.cases import MICRO_STEPS, configs, parts

_WIDTH = 16


class Net(nn.Module):
    """Small, with dropout (random numbers), a norm, an embedding and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, _WIDTH)
        self.first = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(2 * _WIDTH)
        self.last = nn.Linear(2 * _WIDTH, 1)
        self.register_buffer("factor", torch.tensor(1.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.drop(torch.relu(self.first(self.words(ids)))))
        return self.last(hidden) * self.factor.to(hidden.dtype)


def train(initialize: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What this rank saw of one engine."""
    torch.manual_seed(3)
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.use_muon = parameter.ndim == 2 and name not in ("words.weight", "last.weight")
    engine, _, _, _ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    torch.manual_seed(100 + dist.get_rank())
    seen: dict[str, Any] = {"losses": [], "rates": [], "skipped": []}
    for step in range(MICRO_STEPS):
        generator = torch.Generator().manual_seed(50 * step + dist.get_rank())
        ids = torch.randint(0, 10, (4,), generator=generator)
        loss = nn.functional.mse_loss(engine(ids).float().squeeze(1), ids.float() / 5)
        engine.backward(loss)
        engine.step()
        seen["losses"].append(loss.item())
        seen["rates"].append(float(engine.get_lr()[0]))
        seen["skipped"].append(int(engine.skipped_steps))
    engine.destroy()
    return seen


def attempt(initialize: Any, config: dict[str, Any]) -> dict[str, Any]:
    try:
        return train(initialize, config)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main() -> None:
    out, patterns = sys.argv[1], tuple(sys.argv[2:])
    type(get_accelerator()).is_fp16_supported = lambda self: True
    deepspeed.init_distributed()
    logging.disable(logging.WARNING)
    results: dict[str, Any] = {}
    for name, config in configs().items():
        if name.startswith(patterns):
            print(name, file=sys.stderr, flush=True)
            results[name] = {
                "deepspeed": attempt(deepspeed.initialize, json.loads(json.dumps(config))),
                "plain": attempt(partial(plain.initialize, zero_stage=parts(name)[0]), config),
            }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(gathered), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
