"""`--from CHECKPOINT`: the engine of either leg goes on from a checkpoint that DeepSpeed wrote.

A checkpoint is a pickle, which can run any code: it is read because the user names it, and never otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsdoctor.runs.session import RankSession

STATES = "*model_states.pt"


def place_of(checkpoint: Path) -> tuple[str, str] | None:
    """Folder and tag for `load_checkpoint`: of a folder with `latest`, or of one that holds the states itself."""
    latest = checkpoint / "latest"
    if latest.is_file():
        return str(checkpoint), latest.read_text(encoding="utf-8").strip()
    return (str(checkpoint.parent), checkpoint.name) if any(checkpoint.glob(STATES)) else None


def load(session: RankSession, engine: Any) -> None:
    """Load the checkpoint of the order into an engine that was just built.

    Raises:
        FileNotFoundError: there is no checkpoint of DeepSpeed at that place.
    """
    if session.spec.checkpoint is None:
        return
    place = place_of(Path(session.spec.checkpoint))
    if place is None:
        raise FileNotFoundError(f"no checkpoint of DeepSpeed in {session.spec.checkpoint}")
    folder, tag = place
    engine.load_checkpoint(folder, tag=tag)
    session.note(f"the run goes on from the checkpoint {session.spec.checkpoint} (--from)")
