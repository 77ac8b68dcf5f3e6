"""What the blocks of compiled code return, written into fixed cells by code that is compiled along. Rank processes.

A hook that was there when torch compiled a module is part of the compiled code. Inside it nothing may depend on values
or on Python's state, so each block has one cell, which keeps the extremes of all calls since it was read; NaN sticks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.numerics.hooks import Hook

_WIDE = (torch.float32, torch.float16, torch.bfloat16)
"""Types that a cell of float32 holds exactly."""


class Cell(Hook):
    """A forward hook that works in compiled code only. `block` is the name of its module."""

    def __init__(self, block: str, device: torch.device) -> None:
        super().__init__(self._write)
        self.block = block
        self.values = torch.tensor([math.inf, -math.inf], device=device)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            self._write(args[-1])

    def _write(self, output: Any) -> None:
        if isinstance(output, Tensor):
            output = (output,)
        elif isinstance(output, dict):
            output = tuple(output.values())
        if not isinstance(output, (tuple, list)):
            return
        for tensor in output:
            if isinstance(tensor, Tensor) and tensor.dtype in _WIDE and tensor.numel():
                if tensor.device != self.values.device:
                    continue
                low, high = torch.aminmax(tensor.detach())
                self.values[0].copy_(torch.minimum(self.values[0], low.float()))
                self.values[1].copy_(torch.maximum(self.values[1], high.float()))


class Cells:
    """The cells of all blocks."""

    def __init__(self, points: Iterable[tuple[str, nn.Module]]) -> None:
        self._cells = []
        self.handles = []
        for name, module in points:
            parameter = next(module.parameters(), None)
            if parameter is not None:
                cell = Cell(name, parameter.device)
                self._cells.append(cell)
                self.handles.append(module.register_forward_hook(cell, prepend=True, with_kwargs=True))

    def read(self) -> list[tuple[str, float, float]]:
        """Block, smallest and largest value of each cell that was written since the last call. Waits for the device."""
        found = []
        for device in {cell.values.device for cell in self._cells}:
            cells = [cell for cell in self._cells if cell.values.device == device]
            rows = torch.stack([cell.values for cell in cells]).tolist()
            for cell, (low, high) in zip(cells, rows, strict=True):
                if not low > high:
                    found.append((cell.block, low, high))
                    cell.values.copy_(torch.tensor([math.inf, -math.inf]))
        order = {cell.block: index for index, cell in enumerate(self._cells)}
        return sorted(found, key=lambda row: order[row[0]])
