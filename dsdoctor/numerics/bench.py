"""Runs one micro-batch's forward, and backward where it can, again under changed conditions. Rank processes only.

Everything happens on copies: the weights are detached clones (so no hook of an engine on a parameter hears of it), the
module's attributes, buffers and random numbers are put back, and nothing may communicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map

from dsdoctor.numerics import replay, trees
from dsdoctor.numerics.again import Batch, NoCommunication, overwritten
from dsdoctor.numerics.engines import is_whole
from dsdoctor.numerics.examined import Outcome
from dsdoctor.numerics.fingerprint import fingerprint
from dsdoctor.numerics.forward import loss_labels
from dsdoctor.numerics.hooks import second_run
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.stats import looks_like_mask, measure

Change = Callable[[nn.Module], None]
Inspect = Callable[[list[Tensor]], None]
"""Is handed the outputs that backward is about to start from."""


@dataclass(frozen=True, slots=True)
class Peak:
    """One module call: largest magnitudes that went in and came out, inf where something was not finite."""

    name: str
    taken: float
    made: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run of the batch ended. `bad_rows` are the rows of the watched module's output that are not finite, where
    others are; `rows` how many there are. `digest` is of all bits of outputs and gradients, where it was asked for."""

    outcome: Outcome
    loss: float | None = None
    why: str = ""
    peaks: tuple[Peak, ...] = ()
    bad_rows: tuple[int, ...] = ()
    rows: int = 0
    digest: int = 0


@dataclass
class _Watch:
    """Forward hooks that note what each module takes and makes; `place` is the module that was flagged."""

    place: str
    peaks: list[Peak] = field(default_factory=list)
    bad: bool = False
    bad_rows: tuple[int, ...] = ()
    rows: int = 0

    def register(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name), with_kwargs=True)

    def _hook(self, name: str) -> Callable[..., None]:
        def made(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensors = _tensors(output)
            taken = [leaf for _, leaf in trees.arguments(args, kwargs) if isinstance(leaf, Tensor)]
            self.peaks.append(Peak(name, _largest(taken), _largest(tensors)))
            if name == self.place and not self.bad:
                self._look(tensors)

        return made

    def _look(self, tensors: list[Tensor]) -> None:
        for tensor in filter(_is_bad, tensors):
            self.bad = True
            if tensor.dim() > 1:
                rows = ~tensor.detach().flatten(1).isfinite().all(1)
                self.bad_rows, self.rows = tuple(rows.nonzero().flatten().tolist()), len(rows)
            return


class Bench:
    """Runs one batch of a model. `place` is the module whose output was flagged, None if it was no output.

    `gradients` are the gradients of the root's outputs that the run's own backward used, by label.

    Raises:
        NotReplayable: weights are partitioned, or an input was overwritten since.
    """

    def __init__(self, model: nn.Module, batch: Batch, gradients: Mapping[str, Tensor], place: str | None) -> None:
        if not is_whole(model):
            raise NotReplayable("its weights are partitioned: every rank would have to take part")
        if overwritten(batch):
            raise NotReplayable("its inputs were overwritten since")
        self.batch = batch
        self._model = model
        self._gradients = dict(gradients)
        self._place = place

    def run(
        self,
        *,
        dtype: torch.dtype | None = None,
        change: Change | None = None,
        batch: Batch | None = None,
        gradients: dict[str, Tensor] | None = None,
        factor: float = 1.0,
        inspect: Inspect | None = None,
        bits: bool = False,
    ) -> Result:
        """The batch once more: weights, buffers and inputs in `dtype` (None: as they are), `change` done to the model.

        `gradients` takes the gradients of the parameters, `factor` multiplies what backward starts from, `bits` asks
        for a digest. What the model raises is an outcome; NotReplayable is handed on.
        """
        batch = batch or self.batch
        watch = _Watch(self._place if self._place is not None else "\0")
        with replay.undone(self._model, batch.random), second_run(), torch.enable_grad(), NoCommunication():
            replay.strip_hooks(self._model, None, [])
            try:
                weights = self._weights(None if batch.autocast is not None else dtype)
                if change is not None:
                    change(self._model)
                watch.register(self._model)
                wide = None if batch.autocast is not None else dtype
                # in force through backward too: activation checkpointing runs forwards there
                with _reparametrize_module(self._model, weights, tie_weights=True), _autocast(batch, dtype):
                    output = self._model(*_cast(batch.args, wide), **dict(_cast(batch.kwargs, wide)))
                    result = self._judge(output, weights, watch, factor, inspect)
                if bits:
                    result = replace(result, digest=_digest([*_tensors(output), *_gradients(weights)]))
                if gradients is not None:
                    gradients.update({name: w.grad for name, w in weights.items() if w.grad is not None})
                return result
            except NotReplayable:
                raise
            except Exception as error:
                return Result(outcome="failed", why=" ".join(f"{type(error).__name__}: {error}".split())[:200])

    @property
    def on_cpu(self) -> bool:
        """Whether all weights are in host memory."""
        return all(value.device.type == "cpu" for value in self._model.parameters())

    def _weights(self, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Clones of parameters and buffers; a parameter keeps whether it wants a gradient."""
        copies: dict[str, Tensor] = {}
        for name, value in [*self._model.named_parameters(), *self._model.named_buffers()]:
            wide = dtype if dtype is not None and value.is_floating_point() else value.dtype
            copies[name] = value.detach().clone().to(wide).requires_grad_(value.requires_grad)
        return copies

    def _judge(
        self, output: Any, weights: Mapping[str, Tensor], watch: _Watch, factor: float, inspect: Inspect | None
    ) -> Result:
        tensors = {label: leaf for label, leaf in trees.leaves(output, "output") if isinstance(leaf, Tensor)}
        label = next(iter(loss_labels(output)), None)
        loss = float(tensors[label].detach()) if label is not None else None
        seen = {"loss": loss, "peaks": tuple(watch.peaks), "rows": watch.rows}
        bad = next((label for label, tensor in tensors.items() if _is_bad(tensor)), None)
        why = f"{bad} is not finite" if bad is not None else ""
        if watch.bad and not why:
            why = f"the output of {watch.place or 'the model'} is not finite"
        why = why or self._bad_gradient(tensors, label, weights, factor, inspect)
        rows = watch.bad_rows if len(watch.bad_rows) < watch.rows else ()
        return Result(outcome="not-finite" if why else "finite", why=why, bad_rows=rows, **seen)  # type: ignore[arg-type]

    def _bad_gradient(
        self,
        tensors: Mapping[str, Tensor],
        loss: str | None,
        weights: Mapping[str, Tensor],
        factor: float,
        inspect: Inspect | None,
    ) -> str:
        """Run backward from what the run's own backward came from, or from the loss; a bad gradient in words."""
        roots = {label: tensor for label, tensor in tensors.items() if tensor.requires_grad}
        given = {label: g for label, g in self._gradients.items() if label in roots and bool(g.isfinite().all())}
        given = {label: g.to(roots[label].dtype) for label, g in given.items() if g.shape == roots[label].shape}
        if not given and loss in roots:
            given = {str(loss): torch.ones_like(roots[str(loss)])}
        if given and inspect is not None:
            inspect([roots[label] for label in given])
        if given:
            torch.autograd.backward(
                [roots[label] for label in given], [gradient * factor for gradient in given.values()]
            )
        bad = next((name for name, w in weights.items() if w.grad is not None and _is_bad(w.grad)), None)
        return f"the gradient of {bad} is not finite" if bad is not None else ""


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for _, leaf in trees.leaves(output, "") if isinstance(leaf, Tensor)]


def _gradients(weights: Mapping[str, Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights.values() if weight.grad is not None]


def _digest(tensors: list[Tensor]) -> int:
    """Of all bits of these tensors, as far as there is something to read."""
    found = [fingerprint(tensor.detach()) for tensor in tensors]
    return hash(tuple(one.digest for one in found if one is not None))


def _largest(tensors: list[Tensor]) -> float:
    """The largest magnitude of floating values; inf where one is not finite (masks apart)."""
    largest = 0.0
    for tensor in tensors:
        seen = measure(tensor) if tensor.is_floating_point() else None
        if seen is not None and not (seen.kind is not None and looks_like_mask(tensor)):
            largest = max(largest, float("inf") if seen.kind is not None else seen.high)
    return largest


def _is_bad(tensor: Tensor) -> bool:
    seen = measure(tensor)
    return seen is not None and seen.kind is not None and not looks_like_mask(tensor)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    def cast(value: Any) -> Any:
        if dtype is not None and isinstance(value, Tensor) and value.is_floating_point():
            return value.to(dtype)
        return value

    return tree_map(cast, values)


@contextlib.contextmanager
def _autocast(batch: Batch, dtype: torch.dtype | None) -> Iterator[None]:
    """The autocast region of the batch, in another type where one is asked for; none at all for float32."""
    device, usual = batch.autocast or ("cpu", torch.bfloat16)
    wanted = dtype or usual
    on = batch.autocast is not None and wanted is not torch.float32
    with torch.autocast(device, dtype=wanted if on else usual, enabled=on, cache_enabled=False):
        yield
