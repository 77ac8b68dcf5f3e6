"""What a bisection of the ds_config found. Plain data; times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TrialKind = Literal["passes", "fails", "differs"]
"""`fails` is the failure of the given config again (the same signature), `differs` another failure."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a changed config. `changed` are the dotted keys that it sets otherwise, none for the given config."""

    changed: tuple[str, ...]
    kind: TrialKind
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Rate:
    """How often runs of one config failed: `failed` of `runs`."""

    failed: int
    runs: int

    def __str__(self) -> str:
        return f"{self.failed} of {self.runs}"


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The smallest change found that turns fail into pass.

    `keys` are its dotted keys and `patch` is its merge patch; both are empty where nothing that was tried passes.
    `verified` says that the change passed each time it was run (twice at least) and that the given config does not pass
    as often; `minimal` that no part of the change can be left out; `searched` that all that may be changed was tried
    together, not single suspicions only. `given` and `changed` are the rates, where the
    failure may be a matter of chance. `masked` are keys whose change makes the failure give way to another one.
    `untried` is what was not tried, in words; `stopped` why the search ended early, empty where it did not.
    """

    keys: tuple[str, ...] = ()
    patch: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False
    minimal: bool = False
    searched: bool = False
    trials: tuple[Trial, ...] = ()
    given: Rate | None = None
    changed: Rate | None = None
    masked: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    stopped: str = ""

    @property
    def comes_and_goes(self) -> bool:
        """True where the given config failed in some runs only, and no change was proved to explain it."""
        return not self.verified and self.given is not None and self.given.failed < self.given.runs

    @property
    def nothing_passes(self) -> bool:
        """True where the search came to its end and no config that was tried passes."""
        return self.searched and not self.keys and not self.stopped
