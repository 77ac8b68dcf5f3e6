"""What a tensor holds, in four numbers by which two runs can be compared. Runs in rank processes only.

Smallest and largest magnitude tell where values are, the norm how much of them there is, the digest whether two tensors
are the same to the bit.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dsdoctor.numerics.stats import floats, has_values, measure

_WORD = 8
_COLUMNS = 61
"""Words are summed by their place modulo this: a prime, so that rows that changed places give another digest."""
_BLOCK = _WORD * _COLUMNS


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`norm` is the Euclidean norm, None for integers and where it does not fit float32 (float64 for float64)."""

    low: float
    high: float
    norm: float | None
    digest: int


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """The numbers of a tensor; waits for its device. None where there is nothing to measure (empty, meta, …)."""
    with torch.no_grad():
        found = measure(tensor)
        values = floats(tensor)
        if values is not None and found is not None:
            return Fingerprint(found.low, found.high, _norm(values), digest(values))
        plain = tensor.detach()
        if plain.layout is not torch.strided or not has_values(plain) or plain.is_nested or not plain.numel():
            return None
        if plain.dtype is torch.bool:
            found = measure(plain.view(torch.uint8))
        return Fingerprint(found.low, found.high, None, digest(plain)) if found is not None else None


def _norm(values: Tensor) -> float | None:
    if values.element_size() == 1:
        values = values.float()
    wide = torch.float64 if values.dtype is torch.float64 else torch.float32
    norm = float(torch.linalg.vector_norm(values, dtype=wide))
    return norm if math.isfinite(norm) else None


def digest(values: Tensor) -> int:
    """32 bits that depend on all bits of a tensor and on their places. The same on every device."""
    flat = values.contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = octets.numel() // _BLOCK * _BLOCK
    sums = octets[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
    rest = octets.new_zeros(_BLOCK)
    rest[: octets.numel() - whole] = octets[whole:]
    total = sums + rest.view(torch.int64)
    columns = total.tolist() if type(total) is Tensor else [int(one) for one in total.unbind()]  # subclasses have none
    return zlib.crc32(struct.pack(f"<{_COLUMNS}q", *columns))
