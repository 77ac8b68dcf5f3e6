"""Plants faults in the user's own model, one after another, and sees whether the detector names each. Rank processes.

Every fault is planted in copies of the weights for one forward and backward of a real batch; attributes, buffers and
random numbers are put back after it. So a long run in which the detector stays silent means something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import replay, trees
from dsdoctor.numerics.again import Batch, NoCommunication
from dsdoctor.numerics.attaching import attach
from dsdoctor.numerics.bench import Bench
from dsdoctor.numerics.forward import loss_labels
from dsdoctor.numerics.replay import NotReplayable

NAN, INF = float("nan"), float("inf")
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planted fault. `found` is what the detector named, `right` whether that is what was planted; None: not
    planted, for the reason in `why`."""

    fault: str
    planted: str
    found: str
    right: bool | None
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _overflowing(x: Tensor) -> Tensor:
    return ((x.detach() * 0 + 300).half() * 300).to(x.dtype) + x


def _masked(x: Tensor) -> Tensor:
    return torch.softmax(torch.full_like(x, -INF), dim=-1) + x


_ACTIVATIONS: dict[str, tuple[Function, dict[str, Any]]] = {
    "inf in an activation": (lambda x: x + torch.full_like(x, torch.finfo(x.dtype).max) * 2, {"phase": "forward"}),
    "NaN in an activation": (lambda x: x * torch.full_like(x, -1).sqrt(), {"phase": "forward", "kind": "nan"}),
    "fp16 overflow": (_overflowing, {"phase": "forward", "cause": "overflow", "op": "aten.mul"}),
    "log of zero": (lambda x: torch.log(x * 0), {"phase": "forward", "cause": "domain", "op": "aten.log"}),
    "row that is masked as a whole": (_masked, {"phase": "forward", "cause": "masked-row"}),
    "NaN gradient of a finite forward": (
        lambda x: x + torch.sqrt((x * 0).pow(2)),
        {"phase": "backward", "kind": "nan"},
    ),
}
"""What is done to a module's output, and what has to be named for it."""


class _Unscaled:
    """An engine without a loss scale, so that no overflow can be the search for one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """Nothing is trained here."""

    def is_gradient_accumulation_boundary(self) -> bool:
        return True


def selftest(model: nn.Module, batch: Batch) -> list[Row]:
    """Plant every fault in turn. Raises NotReplayable where the batch cannot be run again."""
    calls = Bench(model, batch, {}, None).run()
    if calls.outcome == "failed":
        raise NotReplayable(f"the batch cannot be run again: {calls.why}")
    module = _middle(model, [peak.name for peak in calls.peaks if peak.made > 0])
    rows = [_row("nothing planted", "", {}, *_watched(model, batch))]
    for fault, (function, expected) in _ACTIVATIONS.items():
        seen = _watched(model, batch, change=lambda f=function: _plant(model, module, f))  # type: ignore[misc]
        rows.append(_row(fault, module, {**expected, "module": module}, *seen))
    return [*rows, _weight(model, batch, module), _input(model, batch)]


def _weight(model: nn.Module, batch: Batch, module: str) -> Row:
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    owner = module if module in owners else sorted(owners)[0]
    name = next(n for n, _ in model.named_parameters() if n.rpartition(".")[0] == owner)
    seen = _watched(model, batch, spoiled=name)
    expected = {"phase": "parameter", "module": owner, "tensor": name.rpartition(".")[2]}
    return _row("NaN in a weight", name, expected, *seen)


def _input(model: nn.Module, batch: Batch) -> Row:
    labels = [label for label, leaf in trees.arguments(batch.args, batch.kwargs) if _is_float(leaf)]
    if not labels:
        why = "no input of the model is a floating-point tensor"
        return Row(fault="NaN in the batch", planted="", found="", right=None, why=why)
    seen = _watched(model, batch, bad_input=True)
    return _row("NaN in the batch", labels[0], {"phase": "input", "tensor": labels[0]}, *seen)


def _row(fault: str, planted: str, expected: dict[str, Any], found: FirstBad | None, why: str) -> Row:
    if why:
        return Row(fault=fault, planted=planted, found="", right=None, why=why)
    told = "nothing" if found is None else f"{found.kind} in {found.phase} of {found.module or 'the model'}"
    if found is not None:
        told += f" ({found.tensor}{f', {found.op}' if found.op else ''}), cause {found.cause}"
    right = (found is None) == (not expected)
    if found is not None and expected:
        right = all(getattr(found, name) == value for name, value in expected.items())
    return Row(fault=fault, planted=planted or "nothing", found=told, right=right)


def _watched(
    model: nn.Module,
    batch: Batch,
    *,
    change: Callable[[], None] = lambda: None,
    spoiled: str = "",
    bad_input: bool = False,
) -> tuple[FirstBad | None, str]:
    """One forward and backward under a detector of its own: what it named, or why the model could not be run."""
    found: list[FirstBad] = []
    with _copies(model, batch, spoiled):
        change()
        args, kwargs = _with_nan(batch) if bad_input else (batch.args, dict(batch.kwargs))
        engine = _Unscaled(model)
        detector = attach(engine, mode="frames", on_first_bad=lambda bad, *_: found.append(bad))
        try:
            engine.backward(_objective(model(*args, **kwargs)))
        except Exception as error:
            return None, f"the model raised {type(error).__name__}: {error}"
        finally:
            detector.detach()
    return (found[0] if found else None), ""


@contextmanager
def _copies(model: nn.Module, batch: Batch, spoiled: str) -> Iterator[None]:
    """The model without hooks and on copies of its weights, one of them spoiled, under the batch's conditions."""
    weights: dict[str, Tensor] = {}
    for name, value in model.named_parameters():
        weights[name] = nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
    if spoiled:
        weights[spoiled].data.flatten()[0] = NAN
    device, dtype = batch.autocast or ("cpu", torch.bfloat16)
    with replay.undone(model, batch.random), torch.enable_grad(), NoCommunication():
        replay.strip_hooks(model, None, [])
        with (
            _reparametrize_module(model, weights, tie_weights=True),
            torch.autocast(device, dtype=dtype, enabled=batch.autocast is not None),
        ):
            yield


def _plant(model: nn.Module, path: str, function: Function) -> None:
    """Do something to the first floating-point tensor of a module's output."""
    module = model.get_submodule(path)
    forward = module.forward

    def planted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return _first_changed(output, function)

    module.forward = planted


def _first_changed(output: Any, function: Function) -> Any:
    if _is_float(output):
        return function(output)
    if isinstance(output, tuple) and output and not hasattr(output, "_fields"):
        return (_first_changed(output[0], function), *output[1:])
    return output


def _with_nan(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch with a NaN in its first floating-point tensor."""
    left = [True]

    def spoil(value: Any) -> Any:
        if not left[0] or not _is_float(value):
            return value
        left[0] = False
        bad = value.detach().clone()
        bad.view(-1)[0] = NAN
        return bad

    return tuple(spoil(value) for value in batch.args), {key: spoil(value) for key, value in batch.kwargs.items()}


def _middle(model: nn.Module, names: list[str]) -> str:
    """A module without submodules from the middle of the forward, called once if there is one."""
    leaves = [name for name in names if name and not list(model.get_submodule(name).children())]
    single = [name for name in leaves if names.count(name) == 1] or leaves or [""]
    return single[len(single) // 2]


def _objective(output: Any) -> Tensor:
    """The model's own loss, or a mean square of all that it returns."""
    tensors = {label: leaf for label, leaf in trees.leaves(output, "output") if _is_float(leaf)}
    loss: Tensor | None = tensors.get(next(iter(loss_labels(output)), ""))
    if loss is not None and loss.requires_grad:
        return loss
    return torch.stack([t.float().pow(2).mean() for t in tensors.values() if t.requires_grad]).sum()


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
