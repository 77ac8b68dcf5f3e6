"""What running the flagged micro-batch again showed: is fp32 finite, which remedy helps. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsdoctor.numerics.repeats import Repeats

Outcome = Literal["finite", "not-finite", "failed", "not-tried"]
"""`failed`: the model raised with the remedy in force."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One remedy, and what the same micro-batch did with the same weights once it was in force.

    `text` says what to do, `loss` is the model's own loss where it returns one, `why` the reason of any outcome but
    `finite`. `patch` is Python text to paste, empty where the remedy is none; `config` a merge patch of the ds_config.
    """

    remedy: str
    text: str
    outcome: Outcome
    loss: float | None = None
    why: str = ""
    patch: str = ""
    config: Mapping[str, Any] | None = None

    def told(self) -> str:
        """`tried: finite, loss 2.318`."""
        if self.outcome == "not-tried":
            return f"not tried: {self.why}"
        loss = f", loss {self.loss:.4g}" if self.loss is not None else ""
        why = f"; {self.why}" if self.why else ""
        outcome = {"finite": "finite", "not-finite": "still not finite", "failed": "the model raised"}[self.outcome]
        return f"tried: {outcome}{loss}{why}"


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One rank's examination of its first bad value.

    `again` is the batch run once more as it was, `in_fp32` in float32 throughout, with `loss_in_fp32`; `why_not` says
    why no remedy was tried. `samples` are the rows of the micro-batch that the value comes from, where only some do.
    `derivative` is the operation whose derivative made the first bad value of a backward, with its line. `repeats` is
    what more runs of a batch showed that was finite when it ran again. `bundle` is the folder that `nan replay` takes.
    """

    again: Outcome = "not-tried"
    in_fp32: Outcome = "not-tried"
    loss_in_fp32: float | None = None
    why_not: str = ""
    samples: tuple[int, ...] = ()
    trials: tuple[Trial, ...] = ()
    derivative: tuple[str, str | None] | None = None
    repeats: Repeats | None = None
    bundle: str = ""

    @property
    def partitioned(self) -> bool:
        """The batch could not run again as no rank alone holds the weights."""
        return self.again == "not-tried" and "partitioned" in self.why_not

    @property
    def cure(self) -> Trial | None:
        """The first remedy for the model's own code that was tried and is finite."""
        return next((trial for trial in self.trials if trial.outcome == "finite" and trial.patch), None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "repeats": self.repeats.to_dict() if self.repeats is not None else None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Examined:
        return cls(
            **{
                **values,
                "samples": tuple(values["samples"]),
                "derivative": tuple(values["derivative"]) if values.get("derivative") else None,
                "repeats": Repeats.from_dict(values["repeats"]) if values.get("repeats") else None,
                "trials": tuple(Trial(**trial) for trial in values["trials"]),
            }
        )
