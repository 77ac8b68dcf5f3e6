"""Patches that keep one module's operations where they are defined: text only, ready to paste. No torch."""

from __future__ import annotations

from string import Template
from textwrap import indent

_IN = " " * 4

_TEMPLATE = Template("""\
# $comment
# Paste this after the model is built (before deepspeed.initialize, or on engine.module after it).
def guard(model, path):
    import functools

    import torch
    from torch.overrides import TorchFunctionMode

$mode

    module = model.get_submodule(path)
    forward = module.forward

    @functools.wraps(forward)
    def guarded(*args, **kwargs):
        with Guard():
            return forward(*args, **kwargs)

    module.forward = guarded


guard(model, "$path")
""")

_EPS = Template('''\
class Guard(TorchFunctionMode):
    """Logarithms, roots and divisions that never see a number below EPS, nor one at which they have no gradient."""

    EPS = $eps

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, args = getattr(function, "__name__", "").strip("_"), list(args)
        if name in ("log", "log2", "log10", "sqrt", "rsqrt") or (name == "pow" and isinstance(args[1], float)):
            args[0] = self.above(args[0])
        elif name in ("div", "true_divide", "divide", "truediv", "itruediv"):
            args[1] = self.away(args[1])
        elif name in ("reciprocal", "rdiv", "rtruediv"):
            args[0] = self.away(args[0])
        return function(*args, **(kwargs or {}))

    def above(self, value):
        return value.clamp_min(self.EPS) if torch.is_tensor(value) and value.is_floating_point() else value

    def away(self, value):
        if not torch.is_tensor(value) or not value.is_floating_point():
            return value
        return torch.where(value.abs() < self.EPS, torch.full_like(value, self.EPS).copysign(value), value)''')

_MASK = '''\
class Guard(TorchFunctionMode):
    """Softmax and attention that see the lowest finite number in place of -inf: a row without any place is even."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, args, kwargs = getattr(function, "__name__", "").strip("_"), list(args), dict(kwargs or {})
        if name in ("softmax", "log_softmax"):
            args[0] = args[0].clamp_min(torch.finfo(args[0].dtype).min)
        elif name == "scaled_dot_product_attention":
            mask = kwargs.pop("attn_mask", None) if len(args) < 4 else args.pop(3)
            kwargs["attn_mask"] = self.finite(mask, args[0].dtype)
        return function(*args, **kwargs)

    def finite(self, mask, dtype):
        if mask is None:
            return None
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        return mask.clamp_min(torch.finfo(mask.dtype).min)'''

_LABELS = '''\
class Guard(TorchFunctionMode):
    """A mean over the labels that count is 0, with a gradient of 0, where none of them does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("cross_entropy", "nll_loss") and len(args) > 1:
            target = args[1]
            if not target.is_floating_point() and not bool((target != kwargs.get("ignore_index", -100)).any()):
                return args[0].float().sum() * 0
        return function(*args, **kwargs)'''

_CAST = '''\
class Guard(TorchFunctionMode):
    """Casts that clamp to the limits of the type they cast to."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name not in ("to", "type", "half", "bfloat16") or not torch.is_tensor(result):
            return result
        if not result.is_floating_point() or not args[0].is_floating_point():
            return result
        limit = min(torch.finfo(result.dtype).max, torch.finfo(args[0].dtype).max)
        return function(args[0].clamp(-limit, limit), *args[1:], **(kwargs or {}))'''

_SMALLEST = {"float16": "1e-4"}
"""An eps that the type can hold and whose root has a gradient that fits; 1e-6 for the wider ones."""


def eps_patch(path: str, dtype: str) -> str:
    """Source text that gives the logarithms, roots and divisions of a module an eps."""
    eps = _SMALLEST.get(dtype, "1e-6")
    comment = f"Gives the logarithms, roots and divisions of {_name(path)} an eps of {eps}."
    return _TEMPLATE.substitute(comment=comment, mode=indent(_EPS.substitute(eps=eps), _IN), path=path)


def mask_patch(path: str) -> str:
    """Source text that masks with a finite minimum inside a module."""
    return _TEMPLATE.substitute(
        comment=f"Masks with a finite minimum in {_name(path)}.", mode=indent(_MASK, _IN), path=path
    )


def labels_patch(path: str) -> str:
    """Source text for a module whose loss has no label that counts."""
    comment = f"Gives a loss of 0 where no label counts in {_name(path)}."
    return _TEMPLATE.substitute(comment=comment, mode=indent(_LABELS, _IN), path=path)


def cast_patch(path: str) -> str:
    """Source text that clamps what a module casts to a narrower type."""
    comment = f"Clamps before each cast in {_name(path)} to the limits of the type."
    return _TEMPLATE.substitute(comment=comment, mode=indent(_CAST, _IN), path=path)


def _name(path: str) -> str:
    return path or "the model"
