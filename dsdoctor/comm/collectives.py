"""The collectives that every rank of the check runs, each with its result compared with the value it must have.

Imports torch; runs in rank processes only. All values are small integers, exact in fp32, bf16 and fp16 for any number
of ranks: in a sum every element is contributed by exactly one rank and is zero on the others, so a wrong element names
the rank whose contribution was lost, doubled or damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

ELEMENTS = 1 << 16
"""Elements a rank and collective: enough to leave the small-message paths, little enough for any device."""


class WrongValue(Exception):
    """A collective completed and its result is not what it must be."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Where this rank stands in the process group, and the kind of tensors it uses."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype


def all_reduce(group: Group) -> None:
    tensor = _share(group, group.rank, ELEMENTS)
    dist.all_reduce(tensor)
    _compare(tensor, _whole(group, ELEMENTS), lambda index: index % group.size, "the contribution of")


def barrier(group: Group) -> None:
    dist.barrier()


def all_gather_into_tensor(group: Group) -> None:
    output = torch.zeros(group.size * ELEMENTS, device=group.device, dtype=group.dtype)
    dist.all_gather_into_tensor(output, _own(group, group.rank))
    expected = torch.cat([_own(group, rank) for rank in range(group.size)])
    _compare(output, expected, lambda index: index // ELEMENTS, "the part of")


def reduce_scatter_tensor(group: Group) -> None:
    output = torch.zeros(ELEMENTS, device=group.device, dtype=group.dtype)
    whole = group.size * ELEMENTS
    dist.reduce_scatter_tensor(output, _share(group, group.rank, whole))
    start = group.rank * ELEMENTS
    expected = _whole(group, whole)[start : start + ELEMENTS]
    _compare(output, expected, lambda index: (start + index) % group.size, "the contribution of")


def broadcast(group: Group) -> None:
    tensor = _own(group, 0) if group.rank == 0 else torch.zeros(ELEMENTS, device=group.device, dtype=group.dtype)
    dist.broadcast(tensor, src=0)
    _compare(tensor, _own(group, 0), lambda index: 0, "what came from")


STEPS: tuple[Callable[[Group], None], ...] = (
    all_reduce,
    barrier,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    broadcast,
)


def _whole(group: Group, elements: int) -> torch.Tensor:
    """What the sum over the ranks must be: 1, 2, 3, 4 in blocks as wide as there are ranks."""
    index = torch.arange(elements, device=group.device)
    return (index // group.size % 4 + 1).to(group.dtype)


def _share(group: Group, rank: int, elements: int) -> torch.Tensor:
    """This rank's part of that sum."""
    index = torch.arange(elements, device=group.device)
    return torch.where(index % group.size == rank, _whole(group, elements), torch.zeros_like(index).to(group.dtype))


def _own(group: Group, rank: int) -> torch.Tensor:
    """Values that tell one rank from its neighbours."""
    index = torch.arange(ELEMENTS, device=group.device)
    return (rank % 120 + 1 + index % 7).to(group.dtype)


def _compare(found: torch.Tensor, expected: torch.Tensor, owner: Callable[[int], int], what: str) -> None:
    wrong = (found != expected).nonzero().flatten()
    if wrong.numel() == 0:
        return
    first = int(wrong[0])
    ranks = sorted({owner(int(index)) for index in wrong[:1000]})
    raise WrongValue(
        f"{wrong.numel()} of {found.numel()} elements are wrong, the first at {first}: "
        f"{found[first].item():g} instead of {expected[first].item():g}; "
        f"{what} rank {', '.join(map(str, ranks[:8]))}{', …' if len(ranks) > 8 else ''} is not what it sent"
    )
