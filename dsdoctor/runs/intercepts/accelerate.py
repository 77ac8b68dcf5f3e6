"""Accelerate, and through it Transformers: their DeepSpeed config object gets our config in place of its file.

On a machine without an accelerator Accelerate takes each rank for the only one, with all the data for itself, unless it
is told `cpu=True`, with which it leaves DeepSpeed out. Where DeepSpeed is asked for, it is told of the ranks.
"""

from __future__ import annotations

import functools
import inspect
import os
from types import ModuleType
from typing import Any

from dsdoctor.runs.engine_facts import Framework
from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.intercepts import config_notes
from dsdoctor.runs.session import RankSession


def install(session: RankSession, hooks: ImportHooks) -> None:
    hooks.after_import("accelerate.utils.deepspeed", lambda module: _replace_config(session, module))
    hooks.after_import("accelerate.state", lambda module: _know_ranks_on_cpu(session, module))
    if session.spec.precision == "fp32":
        hooks.after_import("accelerate.state", lambda module: _no_mixed_precision(session, module))


def _replace_config(session: RankSession, module: ModuleType) -> None:
    """The config classes of Transformers derive from this one and pass through its `__init__`."""
    kind = module.HfDeepSpeedConfig
    original = kind.__init__

    @functools.wraps(original)
    def init(this: Any, config_file_or_dict: Any) -> None:
        with session.guard("compare the script's config with the given one"):
            if not session.is_frameworks_copy(config_file_or_dict):
                config_notes.say_differences(session, config_file_or_dict)
        original(this, _config(session))
        session.hand_out(this.config, _framework(type(this)))

    session.patch(kind, "__init__", init)


def _config(session: RankSession) -> dict[str, Any]:
    """Ours; Accelerate wants a ZeRO section in it even where ZeRO has no part in the run."""
    config = session.config()
    if session.spec.engine == "plain" and "zero_optimization" in config:
        config["zero_optimization"] = {"stage": 0}
    return config


def _framework(kind: type) -> Framework:
    return "transformers" if kind.__module__.startswith("transformers") else "accelerate"


def _know_ranks_on_cpu(session: RankSession, module: ModuleType) -> None:
    """Give the answer of `cpu=True` where Accelerate found no backend for the ranks of a DeepSpeed run."""
    kind = module.PartialState
    original = kind._prepare_backend

    @functools.wraps(original)
    def prepare(this: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(this, *args, **kwargs)
        asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if not asked or found != (None, module.DistributedType.NO):
            return found
        session.note("Accelerate, which counts ranks on accelerators only, is told of those on the CPU: a rehearsal")
        return "gloo", module.DistributedType.MULTI_CPU

    session.patch(kind, "_prepare_backend", prepare)


def _no_mixed_precision(session: RankSession, module: ModuleType) -> None:
    kind = module.AcceleratorState
    original = kind.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(this: Any, *args: Any, **kwargs: Any) -> None:
        call = signature.bind(this, *args, **kwargs)
        if call.arguments.get("mixed_precision") not in (None, "no"):
            session.note("control in fp32: Accelerate's mixed precision is switched off")
        call.arguments["mixed_precision"] = "no"
        original(*call.args, **call.kwargs)

    session.patch(kind, "__init__", init)
