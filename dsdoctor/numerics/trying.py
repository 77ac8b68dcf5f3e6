"""Tries remedies on the flagged micro-batch before they are advised. Runs in rank processes only.

Each cause class has its candidates. One is applied in a copy, the batch runs again with the same weights and random
numbers, and what comes of it is told with the advice. The text of a patch that is printed is the text that was run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import guards, islands
from dsdoctor.numerics.bench import Bench, Result
from dsdoctor.numerics.examined import Trial
from dsdoctor.numerics.patch import island, limit_of

SECONDS = 20.0
"""How long the runs of one hit's batch may take together; the other ranks wait meanwhile."""
_MARGIN = 2.0
"""An island takes in what comes within this factor of the type's limit."""
_BF16 = {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
_RANGE = ("overflow", "cast-overflow", "inf-minus-inf", "unknown")
_NO_TRIAL = {
    "exploded-weights": "a lower learning rate, warm-up or clipping acts over steps, not on one batch",
    "optimizer-born": "the step has changed the weights already",
    "reduction-overflow": "the sum over the ranks cannot be made again on one of them",
    "corrupted-weights": "the weights themselves are not finite: only a good checkpoint or initialisation helps",
}


@dataclass(frozen=True, kw_only=True)
class _Remedy:
    """`run` tries it; None where it can only be named."""

    name: str
    text: str
    run: Callable[[], Result] | None = None
    patch: str = ""
    config: Mapping[str, Any] | None = None


def trials(bench: Bench, found: FirstBad, shadow: Result, rows: tuple[int, ...], until: float) -> tuple[Trial, ...]:
    """The remedies for a bad value, tried one after another until one of each kind helps.

    `shadow` is the batch in fp32, `rows` the samples that alone are bad; nothing is begun after `until` (monotonic).
    """
    done: list[Trial] = []
    for remedy in _remedies(bench, found, shadow, rows):
        if any(trial.remedy == remedy.name and trial.outcome == "finite" for trial in done):
            continue
        done = [trial for trial in done if trial.remedy != remedy.name]
        done.append(_tried(remedy, until, shadow))
    return tuple(done)


def untried(found: FirstBad, why: str) -> tuple[Trial, ...]:
    """What would be tried if the batch could run again."""
    names = {"domain": "eps", "backward-singularity": "eps", "lost-eps": "eps", "masked-row": "mask"}
    if found.cause in names:
        return (_named(names[found.cause], found.module, found.dtype, why),)
    if found.cause in _RANGE and found.dtype == "float16":
        return (Trial(remedy="bf16", text=_BF16_TEXT, outcome="not-tried", why=why, config=_BF16),)
    return ()


_BF16_TEXT = "train in bf16, whose range is that of fp32"


def _named(name: str, module: str, dtype: str, why: str) -> Trial:
    eps = name == "eps"
    patch = guards.eps_patch(module, dtype) if eps else guards.mask_patch(module)
    text = f"give the operation in {_place(module)} an eps" if eps else f"mask {_place(module)} with a finite minimum"
    return Trial(remedy=name, text=text, outcome="not-tried", why=why, patch=patch)


def _tried(remedy: _Remedy, until: float, shadow: Result) -> Trial:
    trial = Trial(remedy=remedy.name, text=remedy.text, outcome="not-tried", patch=remedy.patch, config=remedy.config)
    if remedy.run is None or time.monotonic() > until:
        why = _NO_TRIAL.get(remedy.name, "the batch alone cannot show it") if remedy.run is None else "out of time"
        return replace(trial, why=why)
    result = remedy.run()
    why = result.why
    if (
        result.outcome == "finite"
        and result.loss is not None
        and shadow.outcome == "finite"
        and shadow.loss is not None
    ):
        why = f"in fp32 {shadow.loss:.4g}"
    return replace(trial, outcome=result.outcome, loss=result.loss, why=why)


def _remedies(bench: Bench, found: FirstBad, shadow: Result, rows: tuple[int, ...]) -> Iterator[_Remedy]:
    """The candidates for a cause. Several of one name are alternatives, the best one first."""
    place = _place(found.module)
    if found.cause in _NO_TRIAL:
        yield _Remedy(name=found.cause, text=_WITHOUT_TRIAL[found.cause].format(place=place))
        return
    if found.dtype == "float16" and shadow.outcome == "finite":
        yield _Remedy(name="bf16", text=_BF16_TEXT, run=lambda: bench.run(dtype=torch.bfloat16), config=_BF16)
        if found.phase in ("forward", "backward", "loss"):
            yield from _islands(bench, found, shadow)
    if found.cause in ("domain", "backward-singularity", "lost-eps"):
        patch = guards.eps_patch(found.module, found.dtype)
        yield _patched(bench, "eps", f"give the logarithms, roots and divisions of {place} an eps", patch)
    if found.cause == "cast-overflow":
        patch = guards.cast_patch(found.module)
        yield _patched(bench, "clamp", f"clamp before the cast in {place}, or move the cast to where it fits", patch)
    if found.cause == "masked-row":
        patch = guards.mask_patch(found.module)
        yield _patched(bench, "mask", f"mask with a finite minimum instead of -inf in {place}", patch)
    if found.cause == "ignored-labels" and shadow.loss is not None:
        patch = guards.labels_patch(found.module)
        yield _patched(bench, "mask", "return a loss of 0 where no label counts", patch)
    if rows:
        text = f"skip the bad samples: {', '.join(map(str, rows[:8]))} of the micro-batch"
        yield _Remedy(name="skip-sample", text=text, run=lambda: _without(bench, rows))


_WITHOUT_TRIAL = {
    "exploded-weights": "lower the learning rate, warm up or clip: the weights of {place} grew out of all proportion",
    "optimizer-born": "check the gradients before the step and clip them; the step made {place} non-finite",
    "reduction-overflow": "reduce the gradients in fp32",
    "corrupted-weights": "load or initialise the weights of {place} anew; look for missing keys of the checkpoint",
}


def _islands(bench: Bench, found: FirstBad, shadow: Result) -> Iterator[_Remedy]:
    """fp32 for the smallest set of modules; clamping what does not fit comes last, as it changes the numbers."""
    dtype = found.dtype
    limit = limit_of(dtype)
    if limit is None:
        return
    for calls in islands.candidates(shadow.peaks, limit / _MARGIN, found.module, dtype):
        places = ", ".join(_place(path) for path, _ in calls)
        back = [_place(path) for path, to in calls if to is not None]
        end = f", cast back behind {back[-1]}" if back else " and leave the output in fp32"
        text = f"keep {places} in fp32{end}: the patch of the forward is in the report"
        comment = f"Keeps {places} in float32{end.replace('leave', 'leaves')}: {dtype} ends at {limit:g}."
        yield _patched(bench, "fp32-island", text, island(calls, dtype, comment))
    place = _place(found.module)
    comment = f"Keeps {place} in float32 and clamps what it makes to the largest {dtype} value ({limit:g})."
    text = f"keep {place} in fp32 and clamp its output: the patch of the forward is in the report"
    yield _patched(bench, "fp32-island", text, island([(found.module, dtype)], dtype, comment))


def _patched(bench: Bench, name: str, text: str, patch: str) -> _Remedy:
    def apply(model: nn.Module) -> None:
        exec(compile(patch, "<the patch>", "exec"), {"model": model})  # our own text, as it will be printed

    return _Remedy(name=name, text=text, patch=patch, run=lambda: bench.run(change=apply))


def _without(bench: Bench, rows: tuple[int, ...]) -> Result:
    """The batch without some samples: dropped from every tensor whose first dimension is the batch's."""
    sizes = [t.shape[0] for t in _tensors(bench) if t.dim()]
    size = max(set(sizes), key=sizes.count)
    kept = torch.tensor([row for row in range(size) if row not in rows])

    def drop(value: Any) -> Any:
        fits = isinstance(value, Tensor) and value.dim() and value.shape[0] == size
        return value[kept.to(value.device)] if fits else value

    batch = bench.batch
    return bench.run(batch=replace(batch, args=tree_map(drop, batch.args), kwargs=tree_map(drop, dict(batch.kwargs))))


def _tensors(bench: Bench) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda v: found.append(v) if isinstance(v, Tensor) else None, (bench.batch.args, dict(bench.batch.kwargs)))
    return found


def _place(module: str) -> str:
    return module or "the model"
