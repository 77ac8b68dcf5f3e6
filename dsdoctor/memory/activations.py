"""What forward keeps for backward, and what the loss needs for itself, of one rank and one micro-step.

The formulas count the tensors that autograd saves in Transformers' own modules, operation by operation; they were held
to the allocator's peaks of real training steps by `tests/benchmarks/bench_memory.py`. A model of another make saves
other tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsdoctor.memory.shape import Shape

Attention = Literal["fused", "eager"]
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one micro-step of a rank works on. `sequence` counts tokens, `micro_batch` sequences.

    `attention` is `eager` where the matrix of all pairs of tokens is written out, which `fused` kernels (SDPA, flash)
    avoid. `checkpointing` keeps only the input of each layer and computes the rest again.
    """

    micro_batch: int = 1
    sequence: int | None = None
    attention: Attention = "fused"
    checkpointing: bool = False
    frozen: bool = False
    """Only adapters are trained: what a frozen layer would save for its own gradient is not kept."""
    frozen_inputs: bool = False
    """Linear layers keep their input though they are frozen."""
    mask: int = 1
    """Bytes of an element of a dropout mask: 1 on a GPU, as many as an activation's on a CPU."""

    @property
    def unkept(self) -> bool:
        """The input of a frozen linear layer is not kept."""
        return self.frozen and not self.frozen_inputs

    @property
    def tokens(self) -> int:
        return self.micro_batch * (self.sequence or 0)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes. `saved` lives from forward to backward.

    `loss_forward` and `loss` are the most that logits and loss add to it in forward and in backward; `output` is what
    the script holds of them all the while. `passing` are the gradients within one layer, `working` is what that layer
    needs while it is computed again under checkpointing. `source` says how the figures were found; empty where they
    were not.
    """

    saved: int = 0
    loss: int = 0
    loss_forward: int = 0
    output: int = 0
    passing: int = 0
    working: int = 0
    source: str = ""

    @property
    def known(self) -> bool:
        return bool(self.source)


NOTHING = Activations()


def of_transformer(shape: Shape, work: Workload, *, weight: int) -> Activations:
    """The activations of a decoder. `weight` are the bytes of an element in the precision of the forward pass."""
    if work.sequence is None:
        return NOTHING
    layer = _layer(shape, work, weight)
    entry = weight * work.tokens * shape.hidden
    checkpointed = ", with activation checkpointing" if work.checkpointing else ""
    logits = work.tokens * shape.vocab
    return Activations(
        saved=shape.layers * (entry if work.checkpointing else layer) + _norm(shape, work, weight, feeds=False),
        loss=(weight + 3 * _FP32) * logits,
        loss_forward=(weight + (2 * _FP32 if weight < _FP32 else _FP32)) * logits,
        output=weight * logits,
        passing=_passing(shape, work, weight),
        working=layer if work.checkpointing else 0,
        source=f"arithmetic of the model's shape{checkpointed}",
    )


def _layer(shape: Shape, work: Workload, weight: int) -> int:
    """One layer: its norms, attention, feed-forward part and dropouts. Adapters sit in the attention."""
    norms = _norm(shape, work, weight, feeds=True) + (shape.norms - 1) * _norm(shape, work, weight, feeds=False)
    dropouts = 2 * (work.mask if shape.dropout else 0) * work.tokens * shape.hidden
    return norms + _attention(shape, work, weight) + _mixed(shape, work, weight) + dropouts


def _norm(shape: Shape, work: Workload, weight: int, *, feeds: bool) -> int:
    """RMS norms save an fp32 copy, the normalized value and the result; layer norms their input and the result.

    The result is what the linear layers after it save as their input, the normalized value what its own weight needs:
    of frozen ones neither is kept, unless the result `feeds` an adapter.
    """
    own = _FP32 if shape.family == "llama" else weight
    normalized = weight if shape.family == "llama" and not work.frozen else 0
    result = weight if feeds or not work.frozen or work.frozen_inputs else 0
    return (own + normalized + result) * work.tokens * shape.hidden


def _attention(shape: Shape, work: Workload, weight: int) -> int:
    """Queries, keys, values and the result, which the output layer shares, and what the kernel keeps."""
    inner, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    kept = weight * work.tokens * (2 * inner + 2 * keys)
    if work.attention == "eager":
        pairs = work.tokens * (work.sequence or 0) * shape.heads
        return kept + pairs * (_FP32 + weight + (work.mask if shape.dropout else 0))
    return kept + _FP32 * work.tokens * shape.heads


def _mixed(shape: Shape, work: Workload, weight: int) -> int:
    """The feed-forward part, over dense layers and layers with experts on the average."""
    if not shape.experts:
        return _feed_forward(shape, work, shape.intermediate, weight)
    dense = len(shape.dense_layers)
    width = shape.experts_a_token * shape.expert_intermediate
    routed = 2 * weight * work.tokens * shape.experts_a_token * shape.hidden
    sparse = _feed_forward(shape, work, width, weight) + routed
    sparse += _feed_forward(shape, work, shape.shared_intermediate, weight)
    whole = dense * _feed_forward(shape, work, shape.intermediate, weight) + (shape.layers - dense) * sparse
    return round(whole / max(1, shape.layers))


def _feed_forward(shape: Shape, work: Workload, width: int, weight: int) -> int:
    """Gated ones save both branches, the activation and the product; plain ones input and output of the activation."""
    tensors = 4 if shape.family == "llama" else 5 if shape.python_gelu else 2
    return (tensors - work.unkept) * weight * work.tokens * width


def _passing(shape: Shape, work: Workload, weight: int) -> int:
    """Gradients of both branches and the product of a feed-forward part, and those on the way past it."""
    width = shape.experts_a_token * shape.expert_intermediate if shape.experts else shape.intermediate
    branches = 3 if shape.family == "llama" else 2
    return weight * work.tokens * (branches * width + 2 * shape.hidden)
