"""What an option of the ds_config that does nothing is, for the modules that find them."""

from __future__ import annotations

from dataclasses import dataclass

from dsdoctor.finding import Fix, Severity


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Keys that do nothing here (or not what they say), why, and what makes them work or takes them away."""

    keys: tuple[str, ...]
    why: str
    severity: Severity = "warning"
    fixes: tuple[Fix, ...] = ()
