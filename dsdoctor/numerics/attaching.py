"""`dsdoctor.attach`. Runs in rank processes only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.nn.parameter import UninitializedParameter

from dsdoctor.numerics import engines
from dsdoctor.numerics.detector import Detector, Mode
from dsdoctor.numerics.hooks import Hook
from dsdoctor.numerics.publishing import OnFirstBad


def attach(
    engine_or_model: Any,
    *,
    max_frames: int = 21,
    trace_batches: Collection[int] = (),
    abort_after_batch: int | None = None,
    backward: bool = True,
    mode: Mode = "auto",
    on_first_bad: OnFirstBad | None = None,
    out: str | None = None,
    record: str | None = None,
) -> Detector:
    """Watch a DeepSpeed engine (or one that behaves like it) or a module for the first non-finite value.

    `max_frames` module calls are kept for the report; the batches numbered in `trace_batches` (from 0) are printed in
    full on stderr; after batch `abort_after_batch` a `BatchLimitReached` is raised. `backward` watches gradients too.

    `mode="frames"` measures every weight, input and output of every module. `"sentinel"` records the outputs of the
    blocks and all gradients on their device and looks at them once per optimizer step: cheap enough to leave on, but
    the report names a block. `"auto"` is the sentinel until a hit; then the batch's forward is run again with frames,
    or, where that cannot be done, the next batches are framed.

    `record` names a folder into which this rank writes the numbers of every tensor, for `dsdoctor nan compare`: of a
    few batches only, as each tensor is read and waited for.

    `on_first_bad` is called once on this rank with the finding, the report and the patch ("" where none helps). Without
    it the ranks agree over their store who was first; that rank prints report and patch on stderr, the others write
    theirs into `out` (a folder in the system's temp folder by default). The run goes on either way. Without an engine a
    step is what an optimizer of the model's weights does, or each batch where none is seen.

    Raises:
        TypeError: not an engine or module, or `nn.DataParallel` is in it.
        ValueError: an unknown mode, the model is watched already, or has lazy layers that no batch went through yet.
        OSError: `record` cannot be written.
    """
    if mode not in ("auto", "sentinel", "frames"):
        raise ValueError(f"mode is auto, sentinel or frames, not {mode!r}")
    if max_frames < 1:
        raise ValueError("max_frames counts the module calls to keep and is at least 1")
    model = engines.user_model(engine_or_model)
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise ValueError("this model has lazy layers without weights yet: run one batch through it, then attach")
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(hook, Hook) and hook.live for hook in hooks):
        raise ValueError("this model has a detector already; detach that one first")
    return Detector(
        engine_or_model,
        max_frames=max_frames,
        trace_batches=trace_batches,
        abort_after_batch=abort_after_batch,
        backward=backward,
        mode=mode,
        on_first_bad=on_first_bad,
        out=out,
        record=record,
    )
