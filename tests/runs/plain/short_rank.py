"""Two ranks of which rank 1 stops a step early: `short_rank.py FOLDER`. Rank 0 writes where it found itself waiting."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from dsdoctor.runs import plain


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = plain.initialize(model=nn.Linear(2, 1), config=config)
    place = "start"
    try:
        for step in range(3 - engine.global_rank):
            loss = engine(torch.ones(1, 2)).sum()
            place = f"backward of step {step}"
            engine.backward(loss)
            engine.step()
        place = "end"
    except RuntimeError:
        place = f"{place} failed"
    (folder / f"rank{engine.global_rank}").write_text(place, encoding="utf-8")


if __name__ == "__main__":
    main()
