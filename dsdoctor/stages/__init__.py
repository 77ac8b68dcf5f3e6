"""The stages of triage by name; one module holds one kind of stage."""

from __future__ import annotations

from collections.abc import Mapping

from dsdoctor.stages import bisect, checks, control, legs, numerics
from dsdoctor.triage import Stage

ALL: Mapping[str, Stage] = {
    "environment": checks.environment,
    "config": checks.config,
    "comm": checks.comm,
    "memory": checks.memory,
    "with-deepspeed": legs.with_deepspeed,
    "without-deepspeed": legs.without_deepspeed,
    "control-fp32": control.control_fp32,
    "numerics": numerics.numerics,
    "bisect": bisect.search,
}
