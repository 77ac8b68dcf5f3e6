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
_MASK = 1
"""Bytes of an element of a dropout mask on a GPU (bool)."""


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

    @property
    def tokens(self) -> int:
        return self.micro_batch * (self.sequence or 0)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes. `saved` lives from forward to backward; `loss` is the highest that logits and loss add to it.

    `working` is what one layer needs at most while it is computed again under checkpointing. `source` says how the
    figures were found; empty where they were not.
    """

    saved: int = 0
    loss: int = 0
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
    around = _norm(shape, work, weight)
    if work.checkpointing:
        return Activations(
            saved=shape.layers * entry + around,
            loss=_loss(shape, work, weight),
            working=layer,
            source="arithmetic of the model's shape, with activation checkpointing",
        )
    return Activations(
        saved=shape.layers * layer + around,
        loss=_loss(shape, work, weight),
        source="arithmetic of the model's shape",
    )


def _layer(shape: Shape, work: Workload, weight: int) -> int:
    """One layer: its norms, attention, feed-forward part and dropouts."""
    dropouts = 2 * _dropout(shape, weight) * work.tokens * shape.hidden
    return (
        shape.norms * _norm(shape, work, weight)
        + _attention(shape, work, weight)
        + _mixed(shape, work, weight)
        + dropouts
    )


def _norm(shape: Shape, work: Workload, weight: int) -> int:
    """RMS norms save an fp32 copy, the normalized value and the result; layer norms their input and the result.

    The result is what the linear layers after it save as their input.
    """
    each = _FP32 + 2 * weight if shape.family == "llama" else 2 * weight
    return each * work.tokens * shape.hidden


def _attention(shape: Shape, work: Workload, weight: int) -> int:
    """Queries, keys, values, the result twice (for the kernel and for the output layer), and what the kernel keeps."""
    inner, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    kept = weight * work.tokens * (3 * inner + 2 * keys)
    if work.attention == "eager":
        pairs = work.tokens * (work.sequence or 0) * shape.heads
        return kept + pairs * (_FP32 + weight + _dropout(shape, weight))
    return kept + _FP32 * work.tokens * shape.heads


def _mixed(shape: Shape, work: Workload, weight: int) -> int:
    """The feed-forward part, over dense layers and layers with experts on the average."""
    if not shape.experts:
        return _feed_forward(shape, shape.intermediate, weight) * work.tokens
    dense = len(shape.dense_layers)
    width = shape.experts_a_token * shape.expert_intermediate
    routed = _feed_forward(shape, width, weight) + 2 * weight * shape.experts_a_token * shape.hidden
    shared = _feed_forward(shape, shape.shared_intermediate, weight)
    mean = (
        dense * _feed_forward(shape, shape.intermediate, weight) + (shape.layers - dense) * (routed + shared)
    ) / max(1, shape.layers)
    return round(mean * work.tokens)


def _feed_forward(shape: Shape, width: int, weight: int) -> int:
    """Bytes a token: gated ones save both branches, the activation and the product; plain ones input and output."""
    if shape.family == "llama":
        return 4 * weight * width
    return (5 if shape.python_gelu else 2) * weight * width


def _dropout(shape: Shape, weight: int) -> int:
    return _MASK if shape.dropout else 0


def _loss(shape: Shape, work: Workload, weight: int) -> int:
    """Logits, which the script's output holds, and in fp32 their log-softmax and two gradients of it."""
    return (3 * _FP32 + weight) * work.tokens * shape.vocab
