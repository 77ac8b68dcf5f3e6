"""Runs a bundle's micro-batch again on the model that the script builds anew. Runs in a rank process only."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import again
from dsdoctor.numerics.bundle import Bundle
from dsdoctor.numerics.calls import versions
from dsdoctor.numerics.examined import Examined
from dsdoctor.numerics.examiner import examined
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.report import hit_report

_FRAMES = 21
Replayed = tuple[FirstBad, str, Examined]
"""The first bad value of the second run, the report of its frames, and what trying it again showed."""


def run_again(model: nn.Module, bundle: Bundle) -> Replayed:
    """Give the model the bundle's weights and run its batch again, with frames and with remedies.

    A value that does not come back has the cause `not-reproducible`.

    Raises:
        NotReplayable: the bundle has no weights, or they are not those of this model.
    """
    recorded = FirstBad(**bundle.about["first_bad"])
    put_weights(model, bundle)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batch = _on(bundle.batch, device)
    gradients = {label: gradient.to(device) for label, gradient in bundle.gradients.items()}

    seen = again.framed(model, batch, again.events_of(recorded.step), _FRAMES)
    known = examined(model, batch, gradients, recorded)
    if seen is not None:
        return seen.first_bad(recorded.rank), hit_report(seen, recorded.rank), known
    if known.again != "finite":
        return recorded, "", known
    detail = "the batch is finite when it runs again with the same weights and random numbers"
    if known.repeats is not None:
        detail += f"; {known.repeats.meaning}"
    return replace(recorded, cause="not-reproducible", op=None, detail=detail), "", known


def put_weights(model: nn.Module, bundle: Bundle) -> None:
    """Copy the bundle's parameters and buffers into the model. Raises NotReplayable where they do not fit."""
    if not bundle.weights:
        raise NotReplayable("the bundle has no weights: they were partitioned over the ranks, or too large to keep")
    own = dict([*model.named_parameters(), *model.named_buffers()])
    odd = [name for name, value in own.items() if _shape(bundle.weights.get(name)) != value.shape]
    if odd:
        raise NotReplayable(f"the script builds another model than the bundle's: {', '.join(odd[:3])} differ")
    with torch.no_grad():
        for name, value in own.items():
            value.data = bundle.weights[name].to(value.device)


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return tensor.shape if tensor is not None else None


def _on(batch: again.Batch, device: torch.device) -> again.Batch:
    """The batch with its tensors on the model's device."""
    moved = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, (batch.args, dict(batch.kwargs)))
    tensors: list[Tensor] = []
    tree_map(lambda v: tensors.append(v) if isinstance(v, Tensor) else None, moved)
    return replace(batch, args=moved[0], kwargs=moved[1], versions=tuple(versions(tensors)))
