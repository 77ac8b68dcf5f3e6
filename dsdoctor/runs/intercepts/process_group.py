"""torch.distributed: what the default process group became, and a MASTER_PORT that the script itself chooses."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from dsdoctor.runs.flight_recorder import FlightRecorder
from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.trace import ProcessGroup

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def install(session: RankSession, hooks: ImportHooks) -> None:
    """Wrap `init_process_group` where it is defined, before torch.distributed hands the name on."""
    recorder = FlightRecorder(Path(session.spec.folder), session.rank)
    session.at_undo(recorder.stop)
    given = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))

    def attach(module: ModuleType) -> None:
        original = module.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            with session.guard("look at MASTER_PORT"):
                _listen_where_the_script_says(session, given)
            result = original(*args, **kwargs)
            recorder.start()
            with session.guard("describe the process group"):
                session.trace.process_group(_describe(module, args, kwargs))
            return result

        session.patch(module, "init_process_group", init_process_group)

    hooks.after_import("torch.distributed.distributed_c10d", attach)


def _listen_where_the_script_says(session: RankSession, given: tuple[str | None, str | None]) -> None:
    """Let rank 0 open the store itself where the script moved it.

    Under torchrun all ranks are clients of the agent's store, which knows nothing of an address that the script
    sets; under other launchers rank 0 listens there, and meets a port that is taken.
    """
    chosen = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if chosen != given and os.environ.get(_AGENT_STORE) == "True":
        os.environ[_AGENT_STORE] = "False"
        session.note(f"the script moves the rendezvous to {chosen[0]}:{chosen[1]}: rank 0 listens there itself")


def _describe(module: ModuleType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProcessGroup:
    backend = str(module.get_backend())
    default = module.default_pg_timeout
    if backend == "nccl":
        default = getattr(module, "default_pg_nccl_timeout", None) or default
    timeout = kwargs.get("timeout") or (args[2] if len(args) > 2 else None) or default
    return ProcessGroup(
        backend=backend,
        timeout=timeout.total_seconds(),
        world_size=module.get_world_size(),
        address=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
    )
