"""Writes the numbers of a run while it trains. Runs in rank processes only.

Every batch's inputs, every weight once per optimizer step, every module's inputs and outputs and all gradients are read
where they are made, each tensor once. Nothing is kept but the place in the file.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsdoctor
from dsdoctor.numerics import engines, trees
from dsdoctor.numerics.clock import Clock
from dsdoctor.numerics.fingerprint import fingerprint
from dsdoctor.numerics.hooks import guarded, recomputing, remove
from dsdoctor.numerics.numbers import MOST, NAME, Moment, Number, path_of
from dsdoctor.numerics.stats import type_name


class Recording:
    """Hooks on every module and parameter, from `follow` to `detach`. Written through after each batch.

    Raises OSError where `folder` cannot be written.
    """

    def __init__(self, folder: Path, clock: Clock, problem: Callable[[Exception], None], *, backward: bool) -> None:
        self._engine: Any = None
        self._clock = clock
        self._problem = problem
        self._backward = backward
        self._names: dict[int, str] = {}
        self._training = False
        self._batch: int | None = None
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._contents: set[tuple[int, int]] = set()
        self._weights: dict[int, int] = {}
        self._left = MOST
        folder.mkdir(parents=True, exist_ok=True)
        self._file: Any = open(path_of(folder, engines.rank()), "w", encoding="utf-8")  # noqa: SIM115
        about = {"kind": NAME, "dsdoctor": dsdoctor.__version__, "torch": torch.__version__, "rank": engines.rank()}
        print(json.dumps({**about, "world_size": engines.world_size()}), file=self._file)
        self._handles: list[Any] = []

    def follow(self, target: Any) -> None:
        """Put the hooks on the model, after those of the detector: its clock then knows of the batch that begins."""
        self._engine = target if engines.is_engine(target) else None
        self._handles = self._register(engines.user_model(target))

    def _register(self, root: nn.Module) -> list[Any]:
        handles = []
        enter, leave = guarded(self._enter, self._problem), guarded(self._exit, self._problem)
        for name, module in root.named_modules():
            if not engines.takes_hooks(module):
                continue
            self._names[id(module)] = name
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, prepend=True, with_kwargs=True))
        for name, parameter in root.named_parameters() if self._backward else ():
            module, _, label = name.rpartition(".")
            if parameter.requires_grad:
                handles.append(parameter.register_hook(self._gradient_hook(module, f"{label}.grad", None)))
        return handles

    def detach(self) -> None:
        """Remove every hook and close the file. A second call does nothing."""
        remove(self._handles)
        self._engine = None
        if self._file is not None:
            self._file.close()
            self._file = None

    # ------------------------------------------------------------------ hooks

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if recomputing():
            return
        begins = self._clock.batch != self._batch
        if begins:
            self._batch, self._training = self._clock.batch, torch.is_grad_enabled()
            self._seen.clear()
            self._contents.clear()
            self._file.flush()
        if not self._training:
            return
        name = self._names.get(id(module), type(module).__name__)
        for label, leaf in trees.arguments(args, kwargs):
            if isinstance(leaf, Tensor):
                self._once("input" if begins else "forward", "" if begins else name, label, leaf)
        self._read_weights(module, name)

    def _read_weights(self, module: nn.Module, name: str) -> None:
        for label, parameter in module._parameters.items():
            if parameter is None or not engines.is_gathered(parameter):
                continue
            if self._weights.get(id(parameter)) != self._clock.step:
                self._weights[id(parameter)] = self._clock.step
                self._write("parameter", name, label, parameter)

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not self._training:
            return
        name = self._names.get(id(module), type(module).__name__)
        for label, leaf in trees.leaves(output, "output"):
            if isinstance(leaf, Tensor) and (recomputing() or self._once("forward", name, label, leaf)):
                self._watch_gradient(leaf, name, label)

    def _watch_gradient(self, tensor: Tensor, name: str, label: str) -> None:
        if self._backward and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            moment = (self._clock.batch, self._clock.step, self._clock.micro_step)
            tensor.register_hook(self._gradient_hook(name, f"{label}.grad", moment))

    def _gradient_hook(self, module: str, label: str, moment: tuple[int, int, int] | None) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if torch.compiler.is_compiling():
                return
            try:
                self._write("backward", module, label, gradient, moment)
            except Exception as error:
                self._problem(error)

        return hook

    # ------------------------------------------------------------------ writing

    def _once(self, phase: Moment, module: str, label: str, tensor: Tensor) -> bool:
        """Write a tensor of the forward, unless it was written in this batch; whether it was not.

        Another tensor object with the same contents is none: ZeRO-3 hands on such in place of what a module returned.
        Only contents that vary tell that; zeros and NaN are alike everywhere.
        """
        version = -1 if tensor.is_inference() else tensor._version
        known = self._seen.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version >= 0:
            return False
        self._seen[id(tensor)] = (weakref.ref(tensor), version)
        return self._write(phase, module, label, tensor)

    def _write(
        self, phase: Moment, module: str, label: str, tensor: Tensor, moment: tuple[int, int, int] | None = None
    ) -> bool:
        found = fingerprint(tensor) if self._file is not None and self._left > 0 else None
        if found is None:
            return False
        if phase in ("input", "forward") and found.low < found.high < math.inf:
            contents = (found.digest, tensor.numel())
            if phase == "forward" and contents in self._contents:
                return False
            self._contents.add(contents)
        self._left -= 1
        clock = self._clock
        scale = engines.loss_scale(self._engine).value if phase == "backward" and self._engine is not None else 1.0
        number = Number(
            *(moment or (clock.batch, clock.step, clock.micro_step)),
            phase,
            module,
            label,
            type_name(tensor.dtype),
            tensor.numel(),
            found.low / scale,
            found.high / scale,
            found.norm / scale if found.norm is not None else None,
            found.digest,
        )
        print(number.line(), file=self._file)
        return True
