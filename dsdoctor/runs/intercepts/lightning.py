"""The DeepSpeed strategy of Lightning's Trainer and Fabric: our config in place of the script's, and a rehearsal.

The Trainer fills in accumulation, clipping and precision from its arguments, Fabric the precision; what the config says
itself stays.
The strategy refuses any device but CUDA in two checks of its own (nothing in it needs CUDA); where the CPU is chosen,
these are lifted, and that is said.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.intercepts import config_notes
from dsdoctor.runs.session import RankSession

_MODULES = (
    *("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed"),
    *("lightning.fabric.strategies.deepspeed", "lightning_fabric.strategies.deepspeed"),
)


def install(session: RankSession, hooks: ImportHooks) -> None:
    for name in _MODULES:
        hooks.after_import(name, lambda module: _attach(session, module))


def _attach(session: RankSession, module: ModuleType) -> None:
    kind = module.DeepSpeedStrategy

    def load_config(_: Any, config: Any) -> dict[str, Any]:
        if config is None:
            session.note("Lightning makes up a config from the name of its strategy: the given one is used")
        with session.guard("compare the script's config with the given one"):
            config_notes.say_differences(session, config)
        given = session.config()
        session.hand_out(given, "lightning")
        return given

    session.patch(kind, "_load_config", load_config)
    if session.spec.precision == "fp32" and hasattr(module, "_format_precision_config"):
        session.patch(module, "_format_precision_config", lambda *_, **__: None)
    _allow_cpu(session, module)


def _allow_cpu(session: RankSession, module: ModuleType) -> None:
    """Do what the strategy's base does, where the Trainer chose the CPU."""
    original = module.DeepSpeedStrategy.setup_environment
    indices = getattr(module, "_validate_device_index_selection", None)

    @functools.wraps(original)
    def setup_environment(strategy: Any) -> None:
        if strategy.root_device.type != "cpu":
            original(strategy)
            return
        session.note("Lightning's refusal to use DeepSpeed on a CPU is lifted for this run: a rehearsal")
        super(module.DeepSpeedStrategy, strategy).setup_environment()

    session.patch(module.DeepSpeedStrategy, "setup_environment", setup_environment)
    if indices is not None:

        def validate(devices: Any) -> None:
            if any(device.type != "cpu" for device in devices):
                indices(devices)

        session.patch(module, "_validate_device_index_selection", validate)
