"""A model's shape out of its Hugging Face config.json, by arithmetic: neither torch nor Transformers is imported.

Only model types whose parameter counts were compared with what Transformers builds are taken for known; for others
`shape_of` guesses from the usual names and says `approximate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsdoctor.memory.shape import Shape

_LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gemma"})
_GPT2 = frozenset({"gpt2", "gpt_neox", "opt"})
_WITHOUT_BIAS = frozenset({"mistral", "mixtral", "qwen2", "qwen2_moe"})
"""Types of the first kind whose attention does not read `attention_bias`."""
_ENCODER_DECODERS = frozenset({"t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "marian", "whisper"})
"""Types whose config.json may leave `is_encoder_decoder` out."""
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "kv_heads": ("num_key_value_heads",),
    "head": ("head_dim",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_a_token": ("num_experts_per_tok", "moe_k"),
    "expert_intermediate": ("moe_intermediate_size",),
}
_BEYOND: Mapping[str, tuple[tuple[str, object], ...]] = {
    "gpt2": (("add_cross_attention", False),),
    "gpt_neox": (("attention_bias", True),),
    "opt": (
        ("do_layer_norm_before", True),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
        ("_remove_final_layer_norm", False),
    ),
    "qwen2_moe": (("qkv_bias", True),),
}
"""Switches of a type and the one position that the arithmetic covers."""
_HEADS = {"qwen3": 128, "gemma": 256}
"""Size of a head where the config leaves it out and it does not follow from the others."""
LARGEST = 10**9
"""No size in a config.json is larger; what is does not describe a model."""
_MOST_LAYERS = 10_000


class NoShape(Exception):
    """The config lacks a size that the arithmetic needs, or has an absurd one; `str()` is one line for the user."""


class AbsurdSize(NoShape):
    """A size that no model has: building it would be of no use either."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape that a config describes. Raises NoShape."""
    text = _text_part(config)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    if text.get("is_encoder_decoder") is True or kind in _ENCODER_DECODERS:
        raise NoShape("the arithmetic is that of a decoder, and this model has an encoder too")
    if kind in _GPT2:
        return _gpt2(text, kind)
    return _llama(text, kind, tied=_tied(config, text, default=kind == "gemma"))


def known(config: Mapping[str, Any]) -> bool:
    """Whether the arithmetic was checked for this type of model, with these switches and a head for the next token."""
    kind = config.get("model_type")
    if "text_config" in config or kind not in _LLAMA | _GPT2 or not _predicts_tokens(config):
        return False
    projected = config.get("word_embed_proj_dim", config.get("hidden_size")) != config.get("hidden_size")
    return not projected and all(config.get(name, usual) == usual for name, usual in _BEYOND.get(str(kind), ()))


def _predicts_tokens(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return not isinstance(first, str) or first.endswith(("ForCausalLM", "LMHeadModel"))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = (config.get(name) for name in ("text_config", "llm_config"))
    return next((part for part in nested if isinstance(part, Mapping)), config)


def _llama(config: Mapping[str, Any], kind: str, *, tied: bool) -> Shape:
    hidden, heads = _size(config, "hidden"), _size(config, "heads")
    experts = _size(config, "experts", default=0)
    layers = _size(config, "layers")
    inner = _size(config, "intermediate", default=4 * hidden)
    expert_inner = inner if kind == "mixtral" else _size(config, "expert_intermediate", default=inner)
    biased = kind not in _WITHOUT_BIAS and config.get("attention_bias") is True
    shared = config.get("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
    return Shape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=_size(config, "vocab"),
        intermediate=inner,
        kv_heads=_size(config, "kv_heads", default=heads),
        head=_size(config, "head", default=_HEADS.get(kind, hidden // heads)),
        tied=tied,
        qkv_bias=kind in ("qwen2", "qwen2_moe") or biased,
        output_bias=biased,
        mlp_bias=kind not in _LLAMA - {"llama"} and config.get("mlp_bias") is True,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=experts,
        experts_a_token=_size(config, "experts_a_token", default=2),
        expert_intermediate=expert_inner if experts else 0,
        shared_intermediate=int(shared or 0),
        shared_gate=kind == "qwen2_moe",
        dense_layers=_dense_layers(config, layers) if experts and kind != "mixtral" else frozenset(),
        approximate=kind not in _LLAMA,
    )


def _gpt2(config: Mapping[str, Any], kind: str) -> Shape:
    hidden, heads = _size(config, "hidden"), _size(config, "heads")
    positions = 0 if kind == "gpt_neox" else _size(config, "positions", default=1024)
    dropout = max((_number(config.get(name)) for name in ("resid_pdrop", "dropout", "hidden_dropout")), default=0.0)
    return Shape(
        family="gpt2",
        layers=_size(config, "layers"),
        hidden=hidden,
        heads=heads,
        vocab=_size(config, "vocab"),
        intermediate=_size(config, "intermediate", default=4 * hidden),
        kv_heads=heads,
        head=hidden // heads,
        positions=positions + (2 if kind == "opt" else 0),
        tied=_tied(config, config, default=kind != "gpt_neox"),
        packed=kind in ("gpt2", "gpt_neox"),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=0.1 if kind == "gpt2" and "resid_pdrop" not in config else dropout,
        python_gelu=config.get("activation_function", "gelu_new") == "gelu_new" and kind == "gpt2",
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers of a model with experts that have a plain feed-forward part (Qwen's and DeepSeek's keys)."""
    named = config.get("mlp_only_layers")
    only = {index for index in named if isinstance(index, int)} if isinstance(named, list) else set()
    step = config.get("decoder_sparse_step")
    every = step if isinstance(step, int) and step > 0 else 1
    first = config.get("first_k_dense_replace")
    until = first if isinstance(first, int) else 0
    return frozenset(i for i in range(layers) if i in only or (i + 1) % every or i < until)


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], *, default: bool) -> bool:
    said = (part.get("tie_word_embeddings") for part in (config, text))
    return next((value for value in said if isinstance(value, bool)), default)


def _size(config: Mapping[str, Any], what: str, *, default: int | None = None) -> int:
    """One size under any of its names. Raises NoShape, AbsurdSize."""
    for name in _NAMES[what]:
        value = config.get(name)
        if value is None:
            continue
        least = 0 if default is not None else 1
        most = _MOST_LAYERS if what == "layers" else LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise AbsurdSize(f"{name} is {value!r}, which is no size of a model")
        return value
    if default is None:
        raise NoShape(f"none of {', '.join(_NAMES[what])} is in it")
    return default


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
