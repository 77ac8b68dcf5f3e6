"""Smallest and largest value of many tensors, kept on their device and read in one go. Runs in rank processes only.

Writing a row is one kernel and nothing that the host waits for. Reading is one copy for each device and type: started
where the rows are complete, finished after the engine has waited for the device for reasons of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsdoctor.numerics.stats import BITS, decoded, floats

_CHUNK = 256
"""Rows by which a ring grows."""
LIMIT = 2**14
"""Rows between two readings; what comes after is not recorded."""

_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types without a reduction of their own: their bits without the sign are reduced instead."""
Place = tuple["_Rows", int]


class Rings:
    """Rows of all devices and types, from one reading to the next."""

    def __init__(self) -> None:
        self._rows: dict[tuple[torch.device, torch.dtype], _Rows] = {}

    def record(self, tensor: Tensor) -> Place | None:
        """Write one row; where it lies. None for a tensor that holds nothing to measure, or when all rows are used."""
        values = floats(tensor)
        if values is None:
            return None
        key = (values.device, values.dtype)
        rows = self._rows.get(key)
        if rows is None:
            rows = self._rows[key] = _Rows(*key)
        return rows.record(values)

    def start_reading(self) -> None:
        """Start to copy what was recorded to the host. No row may be written until `finish_reading`."""
        for rows in self._rows.values():
            rows.start_reading()

    def finish_reading(self) -> None:
        """Wait for the copies (not at all, if the device was waited for since), and begin anew."""
        for rows in self._rows.values():
            rows.finish_reading()


class _Rows:
    """The rows of one device and type. `read` holds those of the last reading."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.read: list[list[float]] = []
        self._device = device
        self._dtype = dtype
        self._bits = BITS[dtype]
        self._stored = torch.uint8 if dtype in _NARROW else dtype
        self._chunks: list[Tensor] = []
        self._cells: list[tuple[Tensor, Tensor]] = []
        self._used = 0
        self._streams: set[Any] = set()
        self._copies: list[Tensor] = []
        self._copied: Any = None

    def record(self, values: Tensor) -> Place | None:
        if self._used == len(self._cells) and not self._grow():
            return None
        if self._device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(self._device))
        if self._stored is not self._dtype:
            values = values.view(torch.uint8) & self._bits.magnitude
        torch.aminmax(values, out=self._cells[self._used])
        self._used += 1
        return self, self._used - 1

    def _grow(self) -> bool:
        if len(self._cells) >= LIMIT:
            return False
        chunk = torch.empty(_CHUNK, 2, dtype=self._stored, device=self._device)
        self._chunks.append(chunk)
        self._cells.extend((row[0], row[1]) for row in chunk.unbind())
        return True

    def start_reading(self) -> None:
        full = [chunk[: max(0, self._used - index * _CHUNK)] for index, chunk in enumerate(self._chunks)]
        full = [chunk for chunk in full if chunk.numel()]
        if self._device.type != "cuda":
            self._copies = [chunk.to("cpu", copy=True) for chunk in full]
            return
        stream = torch.cuda.current_stream(self._device)
        for other in self._streams - {stream}:
            stream.wait_stream(other)
        self._streams.clear()
        self._copies = [torch.empty(chunk.shape, dtype=chunk.dtype, pin_memory=True) for chunk in full]
        for copy, chunk in zip(self._copies, full, strict=True):
            copy.copy_(chunk, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(stream)

    def finish_reading(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self.read = [pair for copy in self._copies for pair in self._decoded(copy)]
        self._copies = []
        self._used = 0

    def _decoded(self, copy: Tensor) -> Iterator[list[float]]:
        if self._stored is self._dtype:
            yield from copy.double().tolist()
            return
        for low, high in copy.tolist():
            bad = high > self._bits.infinity or (high == self._bits.infinity and not self._bits.has_inf)
            yield [math.nan] * 2 if bad else [decoded(low, self._dtype), decoded(high, self._dtype)]
