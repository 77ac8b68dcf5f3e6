"""What a command says when it cannot do its work, or a part of dsdoctor itself did not do its own."""

from __future__ import annotations

import sys
from collections.abc import Iterable


class CannotWork(Exception):
    """Usage or unreadable input: the message is one line for the user, the exit code 2."""


def tell_broken(rules: Iterable[str]) -> None:
    """Rules that crashed, with their tracebacks: on stderr, where a document on stdout is not disturbed."""
    for rule in rules:
        print(f"dsdoctor: a rule of dsdoctor itself failed, please report it: {rule}", file=sys.stderr)
