"""The shape of a transformer, and the parameters that follow from it by arithmetic alone.

Counts were held to the models that Transformers builds from the same config.json (`tests/memory/test_shape.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dsdoctor.memory.parameter import Parameter


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. All counts are elements or pieces; `experts` is 0 for a dense model.

    `family` decides on norms, biases and the feed-forward part: `llama` has RMS norms and a gated feed-forward,
    `gpt2` layer norms, biases, learned positions and a plain one. `approximate` says that nobody checked whether the
    model is one of these.
    """

    family: Literal["llama", "gpt2"]
    layers: int
    hidden: int
    heads: int
    vocab: int
    intermediate: int
    kv_heads: int
    head: int
    positions: int = 0
    tied: bool = False
    packed: bool = False
    """Queries, keys and values come out of one matrix."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    """Norms of a layer."""
    experts: int = 0
    experts_a_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_layers: frozenset[int] = frozenset()
    """Layers of a model with experts that have none."""
    dropout: float = 0.0
    python_gelu: bool = False
    """The activation is composed of single operations, each of which keeps its input."""
    approximate: bool = False

    @property
    def active(self) -> float:
        """Share of the feed-forward parameters that a token passes through."""
        return 1.0 if not self.experts else self.experts_a_token / self.experts


def parameters(shape: Shape, *, loaded: float = 4.0) -> tuple[Parameter, ...]:
    """The parameters in the order of the forward pass; `loaded` are the bytes of an element in the model's files."""
    found = (*_embeddings(shape), *(one for i in range(shape.layers) for one in _layer(shape, i)), *_head(shape))
    return tuple(Parameter(name, elements, True, loaded, expert) for name, elements, expert in found if elements)


_Sized = tuple[str, int, bool]


def _embeddings(shape: Shape) -> Iterator[_Sized]:
    yield "embed_tokens.weight", shape.vocab * shape.hidden, False
    yield "embed_positions.weight", shape.positions * shape.hidden, False


def _head(shape: Shape) -> Iterator[_Sized]:
    yield "norm.weight", shape.hidden, False
    yield "norm.bias", shape.hidden if shape.family == "gpt2" else 0, False
    yield "lm_head.weight", 0 if shape.tied else shape.vocab * shape.hidden, False


def _layer(shape: Shape, index: int) -> Iterator[_Sized]:
    name = f"layers.{index}"
    for norm in range(shape.norms):
        yield f"{name}.norm{norm}.weight", shape.hidden, False
        yield f"{name}.norm{norm}.bias", shape.hidden if shape.family == "gpt2" else 0, False
    yield from _attention(shape, f"{name}.attention")
    if shape.experts and index not in shape.dense_layers:
        yield from _experts(shape, f"{name}.mlp")
    else:
        yield from _feed_forward(shape, f"{name}.mlp", shape.intermediate)


def _attention(shape: Shape, name: str) -> Iterator[_Sized]:
    inner, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    parts = (("qkv", inner + 2 * keys),) if shape.packed else (("q", inner), ("k", keys), ("v", keys))
    for part, size in parts:
        yield f"{name}.{part}.weight", shape.hidden * size, False
        yield f"{name}.{part}.bias", size if shape.qkv_bias else 0, False
    if shape.qk_norm:
        yield f"{name}.q_norm.weight", shape.head, False
        yield f"{name}.k_norm.weight", shape.head, False
    yield f"{name}.o.weight", inner * shape.hidden, False
    yield f"{name}.o.bias", shape.hidden if shape.output_bias else 0, False


def _feed_forward(shape: Shape, name: str, intermediate: int, *, expert: bool = False) -> Iterator[_Sized]:
    ways = ("gate", "up") if shape.family == "llama" else ("up",)
    for way in ways:
        yield f"{name}.{way}.weight", shape.hidden * intermediate, expert
        yield f"{name}.{way}.bias", intermediate if shape.mlp_bias else 0, expert
    yield f"{name}.down.weight", shape.hidden * intermediate, expert
    yield f"{name}.down.bias", shape.hidden if shape.mlp_bias else 0, expert


def _experts(shape: Shape, name: str) -> Iterator[_Sized]:
    """Each expert's matrices in one tensor a layer, as Transformers 5 keeps them."""
    yield f"{name}.router.weight", shape.hidden * shape.experts, False
    yield f"{name}.experts.gate_up", shape.experts * 2 * shape.hidden * shape.expert_intermediate, True
    yield f"{name}.experts.down", shape.experts * shape.hidden * shape.expert_intermediate, True
    if shape.shared_intermediate:
        yield from _feed_forward(shape, f"{name}.shared", shape.shared_intermediate)
    yield f"{name}.shared_gate.weight", shape.hidden if shape.shared_gate else 0, False
