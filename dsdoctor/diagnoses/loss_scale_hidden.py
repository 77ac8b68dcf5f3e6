"""Skipped steps that a log could not have shown."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogFacts

HIDDEN_SINCE = (0, 17, 6)
"""First release whose logger does not show overflow lines by default."""
FROZEN_RATES = 5
"""Lines with a learning rate of 0 after which it is no longer a warm-up that has just begun."""


class Hidden(Diagnosis):
    """The log could not have shown overflows, so that it shows none proves nothing.

    What it is: from DeepSpeed 0.17.6 on the logger prints warnings only, while the lines about overflows and skipped
    steps have the level INFO. A run that skipped every step may print nothing at all.

    What proves it: fp16 with a dynamic scale, such a release, and not one INFO line of DeepSpeed's engine in the log
    (the launcher still prints INFO).

    When it could be wrong: the run may well have been healthy; the finding is about the log.

    What to do: `"log_level": "info"` in the ds_config (0.19.3 and later); from 0.17.6 on
    `deepspeed.utils.set_log_level_from_string("info")` in the script; in any release `print(engine.global_steps,
    engine.skipped_steps)`. The Trainer's `--log_level info` does not bring the lines back.
    """

    id = "loss-scale/hidden"
    severity = "warning"
    title = "the log could not have shown skipped steps"

    def examine(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        if logs is None or logs.loss_scale is not None or context.precision(case) != "fp16":
            return
        version = context.deepspeed_version(case)
        if version is None or version < HIDDEN_SINCE or any(logs.of_kind("engine-info")):
            return
        if context.config_value(case, "fp16.loss_scale") or logs.steps_seen == 0 or logs.failures:
            return
        signs = [event.evidence() for event in logs.of_kind("fp16-enabled", "deepspeed-version", "fp16-flag")]
        signs[2:] = frozen_rate(logs)
        name = ".".join(map(str, version))
        yield self.finding(
            cause=f"fp16 with a dynamic scale on DeepSpeed {name}, whose logger hides overflow lines: none are shown, "
            "which proves nothing",
            evidence=tuple(dict.fromkeys(signs))[:3],
            confidence=0.8,
            fixes=(
                Fix(text="make the lines visible and run again (0.19.3 and later)", patch={"log_level": "info"}),
                Fix(text="or print engine.skipped_steps (in any release) beside engine.global_steps"),
            ),
            keys=("log_level",),
        )


def frozen_rate(logs: LogFacts) -> tuple[Evidence, ...]:
    """Where a learning rate of 0 stands that never moves: a scheduler that waits for the first applied step."""
    rates = logs.series_of("lr")
    points = rates.points if rates is not None else ()
    if len(points) < FROZEN_RATES or any(point.value != 0 for point in points):
        return ()
    return (points[-1].evidence,)


DIAGNOSES: tuple[Diagnosis, ...] = (Hidden(),)
