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
ODD_SIZES = (1, 1_000_003)
"""One element, and a prime number of them, which no number of ranks or channels divides."""
REPEATS = 20
_EXACT = 256
"""The largest sum of ones that bf16 holds exactly."""


class WrongValue(Exception):
    """A collective completed and its result is not what it must be."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Where this rank stands in the process group, and the kind of tensors it uses."""

    rank: int
    size: int
    device: torch.device
    dtype: torch.dtype

    def wait_for_device(self) -> None:
        """Until the device has done what was queued: on a GPU the call of a collective only queues it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def all_reduce(group: Group) -> None:
    tensor = _share(group, group.rank, ELEMENTS)
    dist.all_reduce(tensor)
    group.wait_for_device()
    _compare(tensor, _whole(group, ELEMENTS), lambda index: index % group.size, "the contribution of")


def barrier(group: Group) -> None:
    dist.barrier()
    group.wait_for_device()


def all_gather_into_tensor(group: Group) -> None:
    output = torch.zeros(group.size * ELEMENTS, device=group.device, dtype=group.dtype)
    dist.all_gather_into_tensor(output, _own(group, group.rank))
    group.wait_for_device()
    expected = torch.cat([_own(group, rank) for rank in range(group.size)])
    _compare(output, expected, lambda index: index // ELEMENTS, "the part of")


def reduce_scatter_tensor(group: Group) -> None:
    output = torch.zeros(ELEMENTS, device=group.device, dtype=group.dtype)
    whole = group.size * ELEMENTS
    dist.reduce_scatter_tensor(output, _share(group, group.rank, whole))
    group.wait_for_device()
    start = group.rank * ELEMENTS
    expected = _whole(group, whole)[start : start + ELEMENTS]
    _compare(output, expected, lambda index: (start + index) % group.size, "the contribution of")


def broadcast(group: Group) -> None:
    tensor = _own(group, 0) if group.rank == 0 else torch.zeros(ELEMENTS, device=group.device, dtype=group.dtype)
    dist.broadcast(tensor, src=0)
    group.wait_for_device()
    _compare(tensor, _own(group, 0), lambda index: 0, "what came from")


def all_to_all_single(group: Group) -> None:
    """Rank r sends its block number k to rank k, so that everyone ends with one block of each rank."""
    block = max(1, ELEMENTS // group.size)
    sent = torch.cat([_block(group, group.rank, to, block) for to in range(group.size)])
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent)
    group.wait_for_device()
    expected = torch.cat([_block(group, source, group.rank, block) for source in range(group.size)])
    _compare(received, expected, lambda index: index // block, "the block of")


def ring(group: Group) -> None:
    """Everyone sends to the next rank and receives from the one before, at the same time."""
    if group.size < 2:
        return
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = torch.zeros(ELEMENTS, device=group.device, dtype=group.dtype)
    sent = _own(group, group.rank)
    transfers = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    group.wait_for_device()
    _compare(received, _own(group, before), lambda index: before, "what came from")


STEPS: tuple[Callable[[Group], None], ...] = (
    all_reduce,
    barrier,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    broadcast,
    all_to_all_single,
    ring,
)
"""What runs in every precision of the config."""


def all_reduce_of(group: Group, elements: int) -> None:
    """A sum of any size, for the sizes of the job: nothing is allocated beyond the tensor and its comparison."""
    tensor = torch.full((elements,), float(group.rank < _EXACT), device=group.device, dtype=group.dtype)
    dist.all_reduce(tensor)
    group.wait_for_device()
    compare_with(tensor, float(min(group.size, _EXACT)), "of the sum")


def all_gather_of(group: Group, elements: int) -> None:
    """A whole of that many elements out of one equal part a rank, as a ZeRO stage gathers its parameters."""
    part = -(-elements // group.size)
    own = torch.full((part,), float(group.rank % 120 + 1), device=group.device, dtype=group.dtype)
    output = torch.zeros(part * group.size, device=group.device, dtype=group.dtype)
    dist.all_gather_into_tensor(output, own)
    group.wait_for_device()
    for rank in range(group.size):
        compare_with(output[rank * part : (rank + 1) * part], float(rank % 120 + 1), f"of the part of rank {rank}")


def repeated_all_reduce(group: Group) -> None:
    """Small sums one after another with a new value each, so that a late or doubled one shows."""
    tensor = torch.zeros(8, device=group.device, dtype=group.dtype)
    for number in range(REPEATS):
        value = float(number % 4 + 1)
        tensor.fill_(value if group.rank == number % group.size else 0.0)
        dist.all_reduce(tensor)
        group.wait_for_device()
        compare_with(tensor, value, f"of sum {number}, to which rank {number % group.size} contributed")


def several_groups(group: Group) -> None:
    """A second group of everyone, and one each of the even and the odd ranks, as parallel dimensions make them."""
    everyone = list(range(group.size))
    for ranks in (everyone, everyone[::2], everyone[1::2]):
        if not ranks:
            continue
        part = dist.new_group(ranks)
        if group.rank in ranks:
            tensor = torch.ones(8, device=group.device, dtype=group.dtype)
            dist.all_reduce(tensor, group=part)
            group.wait_for_device()
            compare_with(tensor, float(min(len(ranks), _EXACT)), f"of the sum over ranks {ranks[0]}, …, {ranks[-1]}")
            dist.destroy_process_group(part)


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


def _block(group: Group, source: int, target: int, elements: int) -> torch.Tensor:
    """What `source` sends to `target`."""
    return torch.full((elements,), float((7 * source + target) % 120 + 1), device=group.device, dtype=group.dtype)


def compare_with(found: torch.Tensor, expected: float, what: str) -> None:
    """Every element has that one value. Raises WrongValue, whose text says how many `what` have not."""
    wrong = int((found != expected).count_nonzero())
    if wrong:
        first = float(found[int((found != expected).nonzero()[0])])
        raise WrongValue(f"{wrong} of {found.numel()} elements {what} are wrong: {first:g} instead of {expected:g}")


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
