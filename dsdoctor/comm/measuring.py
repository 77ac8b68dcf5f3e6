"""How fast the ranks exchange: bus bandwidth a collective and size, pairs of ranks, and how fast each rank computes.

Bus bandwidth is the usual figure (NVIDIA's nccl-tests, PERFORMANCE.md): bytes over seconds, times a factor that makes
it comparable with the speed of the link whatever the number of ranks is. Imports torch; runs in rank processes only.
All figures are of this rank; what they mean together is for `comm.speeds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations

import torch
import torch.distributed as dist

from dsdoctor.comm.collectives import Group, compare_with

SECONDS = 0.15
"""Time spent on one collective and size, after one round that is not counted."""
_MOST_ROUNDS = 50
_PAIR_BYTES, _GPU_PAIR_BYTES = 4 << 20, 64 << 20
_MATRIX, _GPU_MATRIX = 384, 2048
"""Sides of the matrices of `compute`: some milliseconds of work at most, and more than it takes to start a kernel."""

Measured = tuple[str, int, float]
"""What was measured (`all_reduce`, `pair 0-3`, `compute`), bytes a round, seconds a round."""


class Measuring:
    """The measurements, which all ranks go through together.

    After `limit` seconds nothing more is begun: on a slow network figures are missing then, and the check has not
    failed.
    """

    def __init__(self, group: Group, limit: float) -> None:
        self._group = group
        self._end = time.perf_counter() + limit

    def collectives(self, sizes: tuple[int, ...]) -> Iterator[Measured]:
        """Every collective at every size in bytes."""
        group = self._group
        width = torch.tensor([], dtype=group.dtype).element_size()
        for size in sizes:
            elements = max(group.size, size // width // group.size * group.size)
            whole = torch.ones(elements, device=group.device, dtype=group.dtype)
            part = torch.ones(elements // group.size, device=group.device, dtype=group.dtype)
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, whole),
                "all_gather": partial(dist.all_gather_into_tensor, whole, part),
                "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
                "broadcast": partial(dist.broadcast, whole, src=0),
            }
            for name, call in calls.items():
                if not self._goes_on():
                    return
                whole.fill_(0.0)  # sums of ones would grow out of the precision
                yield name, elements * width, self._time(call)

    def pairs(self, ranks: tuple[int, ...]) -> Iterator[Measured]:
        """There and back between each two of `ranks` at its best, one pair after another; the others wait.

        Raises WrongValue.
        """
        group = self._group
        size = _GPU_PAIR_BYTES if group.device.type == "cuda" else _PAIR_BYTES
        tensor = torch.empty(size // 4, device=group.device, dtype=torch.float32)
        for low, high in combinations(ranks, 2):
            if not self._goes_on():
                return
            if group.rank in (low, high):
                tensor.fill_(low + 1.0 if group.rank == low else 0.0)
                other = high if group.rank == low else low
                seconds = self._there_and_back(tensor, other=other, first=group.rank == low)
                compare_with(tensor, low + 1.0, f"that came from rank {other}")
                if group.rank == low:
                    yield f"pair {low}-{high}", size, seconds / 2
            self._group.wait_for_device()
            dist.barrier()

    def compute(self) -> Iterator[Measured]:
        """A product of matrices, the same on every rank, at its best: what else goes on only makes it slower."""
        device = self._group.device
        side = _GPU_MATRIX if device.type == "cuda" else _MATRIX
        matrix = torch.ones(side, side, device=device, dtype=torch.float32)
        rounds: list[float] = []
        end = time.perf_counter() + SECONDS
        while not rounds or (time.perf_counter() < end and len(rounds) < _MOST_ROUNDS):
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            if device.type == "cuda":
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - start)
        yield "compute", 0, min(rounds)

    def _there_and_back(self, tensor: torch.Tensor, *, other: int, first: bool, rounds: int = 5) -> float:
        """As batches of one, for which NCCL uses the communicator of all ranks and makes none for this pair."""
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            for sends in (first, not first):
                transfer = dist.P2POp(dist.isend if sends else dist.irecv, tensor, other)
                for work in dist.batch_isend_irecv([transfer]):
                    work.wait()
            self._group.wait_for_device()
            times.append(time.perf_counter() - start)
        return min(times)

    def _time(self, call: Callable[[], object]) -> float:
        """Seconds a round. All ranks make the same number of rounds: rank 0's first one decides how many."""
        call()
        self._group.wait_for_device()
        start = time.perf_counter()
        call()
        self._group.wait_for_device()
        rounds = max(1, min(_MOST_ROUNDS, int(self._by_rank_0(SECONDS / max(time.perf_counter() - start, 1e-6)))))
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        self._group.wait_for_device()
        return (time.perf_counter() - start) / rounds

    def _goes_on(self) -> bool:
        """Is there time for one more; the same answer on every rank."""
        return self._by_rank_0(self._end - time.perf_counter()) > 0

    def _by_rank_0(self, value: float) -> float:
        told = torch.tensor([value], device=self._group.device)
        dist.broadcast(told, src=0)
        self._group.wait_for_device()
        return float(told)
