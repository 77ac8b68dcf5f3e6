"""Whose code a line of a traceback is: the user's, DeepSpeed's, or another library's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from dsdoctor.runs.facts import Frame

Owner = Literal["user", "deepspeed", "torch", "launcher", "library"]

_DEEPSPEED = re.compile(
    r"(?:^|[/\\])deepspeed[/\\](?:__init__\.py|(?:runtime|ops|comm|moe|pipe|utils|checkpoint|module_inject|accelerator"
    r"|launcher|inference|profiling|linear|sequence|compile|autotuning|elasticity|monitor|nvme|compression)[/\\])"
)
_LAUNCHER = re.compile(
    r"(?:^|[/\\])(?:torch[/\\]distributed[/\\](?:run|launch|launcher|elastic)|deepspeed[/\\]launcher"
    r"|accelerate[/\\]commands|bin[/\\](?:torchrun|deepspeed|accelerate)\b)"
)
_STAND_IN = re.compile(r"[/\\]deepspeed[/\\]runtime[/\\]zero[/\\]linear\.py$")
_TORCH = re.compile(r"(?:^|[/\\])(?:site|dist)-packages[/\\](?:torch|functorch)[/\\]")
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|[/\\]dsdoctor[/\\]|[/\\]Lib[/\\]")


def owner(frame: Frame) -> Owner:
    """Who wrote the line, by its path."""
    if _LAUNCHER.search(frame.file):
        return "launcher"
    if _DEEPSPEED.search(frame.file):
        return "deepspeed"
    if _TORCH.search(frame.file):
        return "torch"
    return "library" if _LIBRARY.search(frame.file) or frame.file.startswith("<") else "user"


def users_line(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line of the user's own code."""
    return next((frame for frame in reversed(frames) if owner(frame) == "user"), None)


def innermost(frames: Sequence[Frame]) -> Owner | None:
    """Whose line raised; None without a traceback."""
    return owner(frames[-1]) if frames else None


def caller_of_torch(frames: Sequence[Frame]) -> Frame | None:
    """The innermost line that is not torch's own: the one that raised, or that called the torch function that did.

    The linear layer that DeepSpeed puts in place of torch's under ZeRO-3 counts as torch's.
    """
    return next((f for f in reversed(frames) if owner(f) != "torch" and _STAND_IN.search(f.file) is None), None)


def passes_through(frames: Sequence[Frame], pattern: str) -> bool:
    """True if a line's `file:function:text` matches the regular expression."""
    return any(re.search(pattern, f"{frame.file}:{frame.function}:{frame.text}") for frame in frames)
