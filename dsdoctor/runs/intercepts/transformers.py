"""Transformers' Trainer: where its output goes, no push to the hub, and no half precision in the fp32 control.

Its DeepSpeed config comes through Accelerate's class, see `intercepts.accelerate`.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from dsdoctor.runs.containment import Containment
from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.session import RankSession

_HALF = ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval")


def install(session: RankSession, hooks: ImportHooks, containment: Containment) -> None:
    hooks.after_import("transformers.training_args", lambda module: _adjust_arguments(session, containment, module))
    hooks.after_import("transformers.trainer_utils", lambda module: _find_checkpoints(session, containment, module))


def _adjust_arguments(session: RankSession, containment: Containment, module: ModuleType) -> None:
    """Change the fields between their assignment and `__post_init__`, which derives everything else from them."""
    kind = module.TrainingArguments
    original = kind.__post_init__

    @functools.wraps(original)
    def post_init(this: Any) -> None:
        with session.guard("adjust the TrainingArguments"):
            if this.output_dir is not None:
                this.output_dir = containment.target(os.path.expanduser(this.output_dir), "Trainer output_dir")
            if this.push_to_hub:
                this.push_to_hub = False
                session.trace.contained("TrainingArguments.push_to_hub", str(this.hub_model_id or ""))
            if session.spec.precision == "fp32":
                _no_half_precision(session, this)
        original(this)

    session.patch(kind, "__post_init__", post_init)


def _no_half_precision(session: RankSession, arguments: Any) -> None:
    """Transformers refuses a ds_config that disagrees with its own flags."""
    asked = [name for name in _HALF if getattr(arguments, name, False)]
    for name in asked:
        setattr(arguments, name, False)
    if asked:
        session.note(f"control in fp32: TrainingArguments {', '.join(asked)} switched off")


def _find_checkpoints(session: RankSession, containment: Containment, module: ModuleType) -> None:
    """Look for a checkpoint to resume from also where the script has its own, outside the run's folder."""
    original = module.get_last_checkpoint

    @functools.wraps(original)
    def get_last_checkpoint(folder: Any) -> Any:
        theirs = containment.original(folder)
        written = original(folder) if os.path.isdir(folder) else None
        return written if written is not None or theirs == folder else original(theirs)

    session.patch(module, "get_last_checkpoint", get_last_checkpoint)
