"""The Hugging Face hub: whatever would change something there is blocked while a script is being examined."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.session import RankSession

_CHANGES = ("upload_", "preupload_", "create_", "delete_", "move_", "update_", "super_squash")


def install(session: RankSession, hooks: ImportHooks) -> None:
    hooks.after_import("huggingface_hub.hf_api", lambda module: _block(session, module))


def _block(session: RankSession, module: ModuleType) -> None:
    """Replace the methods of HfApi, and the functions of the module that are bound methods of one HfApi."""
    for name in [name for name in vars(module.HfApi) if name.startswith(_CHANGES)]:
        session.patch(module.HfApi, name, _blocked(session, module, name, method=True))
        if name in vars(module):
            session.patch(module, name, _blocked(session, module, name, method=False))


def _blocked(session: RankSession, module: ModuleType, name: str, *, method: bool) -> Callable[..., Any]:
    original = getattr(module.HfApi, name)

    @functools.wraps(original)
    def blocked(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if method else args
        repository = str(kwargs.get("repo_id") or (given[0] if given and isinstance(given[0], str) else ""))
        session.trace.contained(f"huggingface_hub.{name}", repository)
        return module.RepoUrl(f"https://huggingface.co/{repository}") if name == "create_repo" else None

    return blocked
