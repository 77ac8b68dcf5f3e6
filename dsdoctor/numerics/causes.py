"""Why one operation gave a non-finite result: its cause class, told from its operands. Runs in rank processes only.

The proof of an overflow is the same operation in float64: finite there, and larger than the type can hold.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dsdoctor.numerics.events import Origin
from dsdoctor.numerics.stats import floats, measure, only_minus_inf, type_name

_CASTS = {"_to_copy", "copy_", "_autocast_to_reduced_precision"}
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"}
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
_DOMAIN = {
    "log", "log2", "log10", "log1p", "logit", "xlogy", "special_entr", "sqrt", "rsqrt", "reciprocal", "div",
    "true_divide", "pow", "acos", "asin", "acosh", "atanh", "fmod", "remainder", "digamma", "lgamma",
}  # fmt: skip
_GUARDING = {"add", "sub", "clamp", "clamp_min", "maximum"}
_SOFTMAX = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp"}
_CONTRACTIONS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "linear", "convolution"}
_LOSSES = {"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d"}
_MEAN = 1
"""The `reduction` of a loss that divides by what counts."""
_GRAPH = 64
"""Nodes of the loss's graph that are looked at, nearest first."""
_LARGEST_PROOF = 2**28
"""Elements up to which the operation is repeated in float64 (2 GiB an operand)."""


def name(func: Any) -> str:
    """`aten.addmm` for the operator `aten::addmm.out`."""
    return f"{func.namespace}.{func._opname}"


def mutates(func: Any) -> bool:
    """Whether it writes into an operand."""
    return bool(func._schema.is_mutable)


def overwrites(func: Any) -> bool:
    """Whether it writes its first operand without reading it."""
    return func._opname in _OVERWRITING


def is_view(func: Any) -> bool:
    """Whether the result shares the storage of an operand without writing to it."""
    aliases = [a.alias_info for a in func._schema.arguments if a.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases) and func._opname != "lift_fresh"


def explain(func: Any, args: Any, kwargs: Any, output: Tensor) -> Origin:
    """The origin of a bad result that good operands (masks apart) were turned into."""
    op = name(func)
    if func._opname in _UNWRITTEN:
        return Origin(op=op, cause="uninitialised", detail="memory that nothing was written to")
    if _is_constant(func, args, kwargs, output):
        return Origin(op=op, detail="a constant of the program", deliberate=True)
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    plain = func._opname.rstrip("_")
    if func._opname in _CASTS:
        return _cast(op, operands, output)
    attention = func._opname in _SOFTMAX or "scaled_dot_product" in func._opname
    if attention and any(_has_minus_inf(operand) for operand in operands):
        return Origin(op=op, cause="masked-row", detail="a row of only -inf: every position of it is masked")
    if func._opname in _LOSSES and output.isnan().any():
        return Origin(op=op, cause="ignored-labels", detail="no label counts: the mean is taken over nothing")
    exact = _exact(func, args, kwargs, operands)
    if exact is not None and bool(exact.isfinite().all()):
        return _overflow(op, exact, output)
    if plain in _DOMAIN:
        return Origin(op=op, cause="domain", detail=_domain(plain, operands, args))
    if any(_has_inf(operand) for operand in operands):
        return Origin(op=op, cause="inf-minus-inf", detail="an operand holds inf")
    if exact is not None and not bool(exact.isnan().any()):
        return Origin(op=op, cause="overflow", detail="the exact result is larger than even float64 can hold")
    return Origin(op=op)


def _cast(op: str, operands: list[Tensor], output: Tensor) -> Origin:
    largest = max((seen.high for o in operands if (seen := measure(o)) is not None and seen.kind is None), default=0.0)
    limit = torch.finfo(output.dtype).max
    return Origin(
        op=op,
        cause="cast-overflow",
        detail=f"{largest:.4g} was cast to {type_name(output.dtype)}, which ends at {limit:.4g}",
    )


def _overflow(op: str, exact: Tensor, output: Tensor) -> Origin:
    largest, limit = float(exact.abs().max()), torch.finfo(output.dtype).max
    if largest > limit:
        detail = f"the exact result reaches {largest:.4g}, {type_name(output.dtype)} ends at {limit:.4g}"
    else:
        detail = f"the exact result ({largest:.4g}) fits {type_name(output.dtype)}, sums on the way to it do not"
    return Origin(op=op, cause="overflow", detail=detail)


def _domain(op: str, operands: list[Tensor], args: Any) -> str:
    """Which value lies outside: the operand's smallest magnitude, or its sign."""
    divisor = operands[-1] if op in ("div", "true_divide", "fmod", "remainder") and operands else None
    value = divisor if divisor is not None else (operands[0] if operands else None)
    seen = floats(value) if value is not None else None
    if seen is None:
        return f"{op} of a value it is not defined for"
    if bool((seen == 0).any()):
        return f"division by zero ({int((seen == 0).sum())} elements)" if divisor is not None else f"{op} of zero"
    return f"{op} of {float(seen.min()):.4g}" if bool((seen < 0).any()) else f"{op} outside its domain"


def _exact(func: Any, args: Any, kwargs: Any, operands: list[Tensor]) -> Tensor | None:
    """The operation in float64, None where it cannot be repeated (random, in place without a twin, too large)."""
    if sum(operand.numel() for operand in operands) > _LARGEST_PROOF or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    kwargs = {key: torch.float64 if isinstance(value, torch.dtype) else value for key, value in kwargs.items()}
    try:
        result = func(*tree_map(_double, args), **tree_map(_double, kwargs))
    except Exception:
        return None
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return outputs[0] if outputs else None


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def lost_constants(func: Any, args: Any, kwargs: Any) -> list[str]:
    """Small constants that an operation adds, or holds a value above, and that are 0 in its type: an eps that is lost.

    torch rounds the result, not the constant, so a constant is lost where it is less than half the smallest number.
    """
    if func._opname.rstrip("_") not in _GUARDING:
        return []
    values = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    dtype = values[0].dtype if values else torch.float64
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    scalars = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, float)]
    return [
        f"{scalar:g} is 0 in {type_name(dtype)} ({name(func)})" for scalar in scalars if 0 < abs(scalar) <= smallest / 2
    ]


def _is_constant(func: Any, args: Any, kwargs: Any, output: Tensor) -> bool:
    """Whether the bad value was written down rather than computed: a literal, or the lowest number plus a score."""
    scalars = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, float)]
    if func._opname == "lift_fresh" or any(math.isinf(scalar) for scalar in scalars):
        return True
    if func._opname in _CONTRACTIONS or not bool((output.float() == -math.inf).any()) or not only_minus_inf(output):
        return False
    lowest = torch.finfo(output.dtype).min
    return any(_lowest(operand, lowest) for operand in tree_leaves((args, kwargs)) if isinstance(operand, Tensor))


def _lowest(operand: Tensor, lowest: float) -> bool:
    values = floats(operand)
    return values is not None and bool((values <= lowest).any())


def _has_inf(operand: Tensor) -> bool:
    seen = measure(operand)
    return seen is not None and seen.kind is not None and "inf" in seen.kind


def _has_minus_inf(operand: Tensor) -> bool:
    values = floats(operand)
    return values is not None and bool((values == -math.inf).any())


def explain_loss(loss: Tensor) -> Origin:
    """The origin of a bad loss that was computed outside the model, as far as its own graph tells."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    for node in nodes:
        if len(nodes) > _GRAPH:
            break
        total = getattr(node, "_saved_total_weight", None)
        averages = getattr(node, "_saved_reduction", 0) == _MEAN
        if averages and isinstance(total, Tensor) and "NllLoss" in node.name() and float(total) == 0:
            return Origin(op="aten.nll_loss_forward", cause="ignored-labels", detail="every label is the ignored one")
        nodes += [parent for parent, _ in getattr(node, "next_functions", ()) if parent is not None]
    return Origin()


def explain_gradient(kind: str, dtype: torch.dtype, largest: float) -> Origin:
    """The cause of a gradient that backward made bad after a good forward. `largest` is the largest good one before."""
    near_limit = largest > torch.finfo(dtype).max * 1e-4 if dtype.is_floating_point else False
    if kind == "inf" and (dtype == torch.float16 or near_limit):
        return Origin(cause="overflow", detail=f"the largest finite gradient before it was {largest:.4g}")
    return Origin(cause="backward-singularity", detail="forward is finite here, its derivative is not")
