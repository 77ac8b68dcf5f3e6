"""What a tensor holds: smallest and largest magnitude, and whether it has inf or NaN. Runs in rank processes only.

A float's bits without the sign bit, read as an integer, are ordered like its magnitude, with inf and then the NaNs
above all finite values. So one integer `aminmax` answers everything at once, in the same way for float8, where torch
lacks the float reductions, and it keeps the smallest magnitude of a tensor that also holds a NaN.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["inf", "nan", "inf+nan"]


@dataclass(frozen=True, slots=True)
class Bits:
    """How a float type reads as an integer. `infinity` is the pattern of inf, or what the first NaN exceeds.

    `formats` are those of `struct` for integer and float; where they differ in size (bfloat16 is the upper half of
    float32) the pattern is shifted first.
    """

    integer: torch.dtype
    magnitude: int
    infinity: int
    formats: tuple[str, str] | None
    has_inf: bool = True
    shift: int = 0


BITS = {
    torch.float64: Bits(torch.int64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000, ("<q", "<d")),
    torch.float32: Bits(torch.int32, 0x7FFFFFFF, 0x7F800000, ("<i", "<f")),
    torch.float16: Bits(torch.int16, 0x7FFF, 0x7C00, ("<h", "<e")),
    torch.bfloat16: Bits(torch.int16, 0x7FFF, 0x7F80, ("<i", "<f"), shift=16),
    torch.float8_e5m2: Bits(torch.uint8, 0x7F, 0x7C, None),
    torch.float8_e4m3fn: Bits(torch.uint8, 0x7F, 0x7E, None, has_inf=False),
}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


@dataclass(frozen=True, slots=True)
class Range:
    """Magnitudes of one tensor, inf or NaN where the values are; `kind` is None if all are finite."""

    low: float
    high: float
    kind: Kind | None = None


def floats(tensor: Tensor) -> Tensor | None:
    """The plain real floats behind a tensor, without a copy; None where there is nothing to measure.

    DTensors give their local shard, sparse tensors their stored values, complex ones pairs of reals. Integers, bools,
    empty, meta and quantized tensors hold nothing that could be non-finite (or nothing at all).
    """
    if not has_values(tensor):
        return None
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout is torch.strided:
        pass
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    else:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype not in BITS or tensor.numel() == 0:
        return None
    return tensor.resolve_neg()


def type_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16, as reports say it."""
    return str(dtype).removeprefix("torch.")


def has_values(tensor: Tensor) -> bool:
    """Whether there is something to read: not on the meta device, nor inside a transformation of `torch.func`."""
    return not (tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def measure(tensor: Tensor) -> Range | None:
    """Magnitudes and kind of one tensor; waits for its device once. None where there is nothing to measure."""
    with torch.no_grad():
        values = floats(tensor)
        if values is None:
            return _integer_range(tensor.detach())
        bits = BITS[values.dtype]
        low, high = _magnitudes(values.view(bits.integer), bits.magnitude)
        if values.device.type == "cpu":
            least, most = low.item(), high.item()
        else:
            least, most = torch.stack((low, high)).tolist()
        most = int(most)
        return Range(decoded(int(least), values.dtype), decoded(most, values.dtype), _kind(most, bits, values))


class _Scratch(threading.local):
    """One buffer a thread, type and device, for tensors whose magnitudes would else ask for fresh pages every time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, values: Tensor) -> Tensor:
        """A flat buffer of as many elements."""
        key = (values.device, values.dtype)
        known = self._buffers.get(key)
        if known is None:
            known = self._buffers[key] = torch.empty(_PIECE, dtype=values.dtype, device=values.device)
        return known[: values.numel()]


_scratch = _Scratch()
_SMALL, _PIECE = 2**17, 2**20
"""Elements up to which a fresh buffer costs little, and elements that are read at a time."""


def _magnitudes(patterns: Tensor, mask: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest pattern without the sign bit."""
    if patterns.numel() <= _SMALL or not patterns.is_contiguous():
        low, high = torch.aminmax(patterns & mask)
        return low, high
    extremes: list[Tensor] = []
    for piece in patterns.view(-1).split(_PIECE):
        buffer = _scratch.like(piece)
        torch.bitwise_and(piece, mask, out=buffer)
        extremes += torch.aminmax(buffer)
    if len(extremes) == 2:
        return extremes[0], extremes[1]
    low, high = torch.aminmax(torch.stack(extremes))
    return low, high


def decoded(pattern: int, dtype: torch.dtype) -> float:
    """The float of that type with these bits; many times as fast as asking torch."""
    bits = BITS[dtype]
    if bits.formats is None:
        return float(torch.tensor(pattern, dtype=torch.uint8).view(dtype).float())
    whole, real = bits.formats
    value: float = struct.unpack(real, struct.pack(whole, pattern << bits.shift))[0]
    return value


def _integer_range(tensor: Tensor) -> Range | None:
    countable = tensor.dtype in _INTEGERS and tensor.layout is torch.strided
    if not countable or not has_values(tensor) or tensor.numel() == 0:
        return None
    low, high = torch.aminmax(tensor.abs() if tensor.dtype.is_signed else tensor)
    return Range(float(low), float(high))


def _kind(largest: int, bits: Bits, values: Tensor) -> Kind | None:
    if largest < bits.infinity or (largest == bits.infinity and not bits.has_inf):
        return None
    if largest == bits.infinity:
        return "inf"
    return "inf+nan" if bits.has_inf and bool(torch.isinf(values.float()).any()) else "nan"


def _comparable(tensor: Tensor) -> Tensor | None:
    """As `floats`, in a type that has comparisons."""
    values = floats(tensor)
    return values.float() if values is not None and values.element_size() == 1 else values


def only_minus_inf(tensor: Tensor) -> bool:
    """Whether -inf is all that keeps the tensor from being finite."""
    with torch.no_grad():
        values = _comparable(tensor)
        return values is not None and not bool((torch.isnan(values) | torch.isposinf(values)).any())


def looks_like_mask(tensor: Tensor) -> bool:
    """Whether the values are those of an additive mask: zeros, and -inf or the lowest finite number.

    A tensor of -inf alone is no mask: `log` of zeros looks the same.
    """
    with torch.no_grad():
        values = _comparable(tensor)
        if values is None:
            return False
        zero, lowest = values == 0, values <= torch.finfo(tensor.dtype).min
        return bool((zero | lowest).all()) and bool(zero.any())


def detect_overflow(tensor: Tensor, context: str) -> bool:
    """Print whether the tensor holds NaN or inf, with `context` as its name, and return whether it does."""
    found = measure(tensor)
    kind = found.kind if found is not None else None
    if kind is None:
        return False
    if "nan" in kind:
        print(f"{context} has nans")
    if "inf" in kind:
        print(f"{context} has infs")
    return True
