"""What each of two ranks runs to agree who was first: gloo and the tiny engine, no DeepSpeed.

RANK=… WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python -m tests.numerics.agreeing FOLDER SCENARIO…
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsdoctor.numerics import Detector, announcing, attach
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import Net, batches

NAN = float("nan")


def engine(part: nn.Module | None = None, *, together: bool = True) -> TinyEngine:
    torch.manual_seed(0)
    return TinyEngine(Net(part), reduce=(lambda gradient: dist.all_reduce(gradient)) if together else None)


def train(one: TinyEngine, data: list[Tensor], folder: Path) -> Detector:
    with attach(one, mode="frames", out=str(folder)) as detector:
        for batch in data:
            one.backward(one(batch).pow(2).mean())
            one.step()
    return detector


def one_bad_batch(rank: int, folder: Path) -> Detector:
    """Rank 1 has it in its input, rank 0 sees it after the reduction."""
    data = batches(3, seed=rank)
    if rank == 1:
        data[1][0, 0] = NAN
    return train(engine(), data, folder)


def shared_weight(rank: int, folder: Path) -> Detector:
    """The same weight is bad on both ranks."""
    one = engine()
    one.module.last.weight.data[0, 0] = NAN  # type: ignore[union-attr, index]
    return train(one, batches(1, seed=rank), folder)


def reduction(rank: int, folder: Path) -> Detector:
    """Finite on both, not finite when summed."""

    def largest(gradient: Tensor) -> None:
        gradient.fill_(3e38)
        dist.all_reduce(gradient)

    one = TinyEngine(Net(), reduce=largest)
    return train(one, batches(1, seed=rank), folder)


def uneven(rank: int, folder: Path) -> Detector:
    """Rank 0 has a batch more, and it is bad; rank 1 waits in a barrier meanwhile."""
    data = batches(1)
    data[0][0, 0] = NAN
    detector = train(engine(together=False), data if rank == 0 else [], folder)
    dist.barrier()
    return detector


def dies(rank: int, folder: Path) -> Detector:
    """The rank that keeps the store dies, the other one has a hit after that."""
    if rank == 0:
        os._exit(0)
    time.sleep(1)
    data = batches(1)
    data[0][0, 0] = NAN
    return train(engine(together=False), data, folder)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    announcing.DEADLINE = 4.0
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        start = time.monotonic()
        print(f"=== {name}", file=sys.stderr, flush=True)
        detector = globals()[name](rank, folder / name)
        took = time.monotonic() - start
        print(f"--- {took < 12} {detector.problems}", file=sys.stderr, flush=True)
        dist.barrier() if name != "dies" else None
    os._exit(0)


if __name__ == "__main__":
    main()
