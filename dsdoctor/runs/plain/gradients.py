"""Averages the gradients over the ranks, and measures them. Runs in rank processes only (imports torch).

Why not DistributedDataParallel: its hooks must see every use of a parameter, exactly once per backward. Scripts that
DeepSpeed runs break that: they leave parameters unused, call a module outside the engine, run forward twice before
backward, checkpoint re-entrantly. An all-reduce of the gradients that are there when accumulation ends is the same
mathematics (a mean over the same ranks, in the model's dtype) without those conditions. The mean of a mean is itself,
so a second backward in the same step may reduce again. As with DDP, a rank that stays away leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dsdoctor.runs.plain.settings import Settings

_BUCKET = 2**25
"""Elements that one all-reduce takes at most (unless one gradient is larger)."""


class Gradients:
    """The gradients of the trained parameters between two optimizer steps."""

    def __init__(self, parameters: Sequence[Tensor], settings: Settings) -> None:
        self.parameters = parameters
        self._settings = settings
        self._sums: dict[Tensor, Tensor] = {}
        self._reduced = False

    def after_backward(self, *, boundary: bool) -> None:
        """Fold one backward's gradients in, and average over the ranks where accumulation ends."""
        self._reduced = False
        self._fold()
        if boundary:
            self.reduce()

    def reduce(self) -> None:
        """Average over the ranks, once per accumulation; parameters without a gradient count as zero.

        A rank that saw no gradient at all does not take part, as with DDP.
        """
        if self._reduced or not self.any():
            return
        self._unfold()
        for parameter in self.parameters:
            parameter.grad = _dense(parameter)
        if dist.get_world_size() > 1:
            for bucket in _buckets([_real(p.grad) for p in self.parameters if p.grad is not None]):
                self._all_reduce(bucket)
        self._reduced = True

    def any(self) -> bool:
        """Whether any gradient is there."""
        return bool(self._sums) or any(p.grad is not None for p in self.parameters)

    def clear(self) -> None:
        """Forget them, after the optimizer step."""
        self._sums.clear()
        self._reduced = False

    def _fold(self) -> None:
        """Add the gradients into sums of `data_types.grad_accum_dtype`, where that is wider than the model."""
        dtype = self._settings.accumulate_in
        for parameter in self.parameters:
            if dtype is None or parameter.grad is None or parameter.dtype.itemsize >= dtype.itemsize:
                continue
            grad = parameter.grad.to(dtype)
            self._sums[parameter] = self._sums[parameter] + grad if parameter in self._sums else grad
            parameter.grad = None

    def _unfold(self) -> None:
        self._fold()
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

    def _all_reduce(self, bucket: list[Tensor]) -> None:
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        if self._settings.average:
            # Before the sum, as ZeRO and DDP do: in fp16 the sum may overflow where the mean does not.
            flat.div_(dist.get_world_size())
        dist.all_reduce(flat)
        for grad, reduced in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
            grad.copy_(reduced.view(grad.shape))


def _dense(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad.resolve_conj()


def _real(grad: Tensor) -> Tensor:
    """A view that a collective can take: complex as pairs of reals."""
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of gradients of one dtype, in order, small enough for one all-reduce. The same on every rank."""
    bucket: list[Tensor] = []
    size = 0
    for grad in sorted(grads, key=lambda g: str(g.dtype)):
        if bucket and (bucket[0].dtype != grad.dtype or size + grad.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket


def global_norm(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """L2 norm over all gradients, computed in fp32; not finite exactly where a gradient is not (or overflows it)."""
    norms = [torch.linalg.vector_norm(g.float() if g.dtype.itemsize < 4 else g).float() for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is up on any rank (a collective)."""
    if dist.get_world_size() == 1:
        return flag
    raised = torch.tensor([int(flag)], dtype=torch.uint8, device=device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised.item())
