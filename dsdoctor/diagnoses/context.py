"""What several rules ask of a case: the job's own run and exceptions, its stage and precision, what its devices can do.

The other legs (without DeepSpeed, in fp32, ...) are experiments of dsdoctor: an exception of theirs is no fault of the
job, so the rules on exceptions look at the job's own run only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor import loss_scale, skip_counts
from dsdoctor.case import Case
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogEvent
from dsdoctor.loss_scale import LossScaleHistory, LossScaleReading
from dsdoctor.runs.facts import Failure, Run

NATIVE = "C++ exception"
"""The type of an exception of C++ that nothing caught: Python never saw it, and the process aborts."""
BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability with bf16 arithmetic (Ampere)."""
BEFORE_AMPERE = re.compile(
    r"\b(?:V100|P100|P40|P4|T4|K80|M40|M60|GTX 1\d\d\d|RTX 20\d\d|TITAN (?:X|V|RTX)|Quadro RTX)\b", re.IGNORECASE
)


def own_run(case: Case) -> Run | None:
    """The run of the job as it was given; the short first run where it did not get further."""
    return case.run("with-deepspeed") or case.run("probe")


def failures(case: Case) -> Iterator[Failure]:
    """The exceptions of the job itself, from its run and from its logs, oldest first within each."""
    run = own_run(case)
    if run is not None:
        ended = {rank.rank for rank in run.ranks if rank.ended_by_us}
        yield from (f for f in run.failures if not (f.rank in ended and f.type == "KeyboardInterrupt"))
    if case.logs is not None:
        yield from case.logs.failures
        yield from map(_uncaught, case.logs.of_kind("native-error"))


def _uncaught(event: LogEvent) -> Failure:
    return Failure(
        rank=event.rank,
        type=NATIVE,
        message=event.fields.get("error", ""),
        source=event.source,
        line=event.line,
        step=event.step,
    )


def histories(case: Case) -> Iterator[LossScaleHistory]:
    """What the job's loss scale did, from its run and from its logs."""
    run = own_run(case)
    if run is not None and run.loss_scale is not None:
        yield run.loss_scale
    if case.logs is not None and case.logs.loss_scale is not None:
        yield case.logs.loss_scale


def read(case: Case, history: LossScaleHistory) -> LossScaleReading:
    """The reading of a history, with advice that fits the job's devices."""
    if history.counts and not history.attempts:
        return skip_counts.read(history, bf16_supported=bf16_supported(case))
    return loss_scale.read(history, bf16_supported=bf16_supported(case))


def evidence(failure: Failure) -> Evidence:
    """The exception as a piece of evidence: its type and the first line of its message."""
    first = failure.message.strip().splitlines()[0] if failure.message.strip() else ""
    text = f"{failure.type}: {first}" if first else failure.type
    return Evidence(source=failure.source, line=failure.line, rank=failure.rank, step=failure.step, text=text)


def stage(case: Case) -> int | None:
    """The ZeRO stage of the job, None if unknown."""
    run = own_run(case)
    if run is not None and run.facts is not None:
        return run.facts.zero_stage
    value = config_value(case, "zero_optimization.stage")
    if value is None and case.logs is not None and any(case.logs.of_kind("trace-invalidated")):
        return 3  # nothing else prints that line
    return value if isinstance(value, int) else None


def precision(case: Case) -> str | None:
    """fp16, bf16 or fp32 as the engine (or else the config) has it, None if unknown."""
    run = own_run(case)
    if run is not None and run.facts is not None:
        return run.facts.precision
    enabled = {name: config_value(case, f"{name}.enabled") for name in ("fp16", "bf16")}
    for name, value in enabled.items():
        if value is True:
            return name
    if "auto" in enabled.values() or (case.logs is not None and case.logs.config is None):
        return None
    return "fp32" if case.logs is not None or case.config is not None else None


def config_value(case: Case, key: str) -> object:
    """What the config in force says for a dotted key, None where it says nothing or is unknown."""
    run = own_run(case)
    if run is not None and run.facts is not None:
        return _lookup(run.facts.config, key)
    if case.logs is not None:
        value = _lookup(case.logs.config or {}, key)
        if value not in (None, "auto") or key not in case.logs.settings:
            return value
        return case.logs.settings[key]
    return case.config.value(key) if case.config is not None else None


def _lookup(node: object, key: str) -> object:
    for part in key.split("."):
        if not hasattr(node, "get"):
            return None
        node = node.get(part)
    return node


def bf16_supported(case: Case) -> bool | None:
    """Whether the job's GPUs calculate in bf16; None if that is unknown or there is no GPU."""
    if case.logs is not None:
        names = [event.fields.get("gpu", "") for event in case.logs.of_kind("gpu-name")]
        return not any(BEFORE_AMPERE.search(name) for name in names) if names else None
    if case.machine is None:
        return None
    known = [device.capability for device in case.machine.devices if device.capability is not None]
    return all(capability >= BF16_CAPABILITY for capability in known) if known else None


def deepspeed_version(case: Case) -> tuple[int, ...] | None:
    """The release as numbers, None if unknown."""
    text = ""
    if case.logs is not None:
        text = case.logs.versions.get("deepspeed", "")
    elif case.machine is not None:
        text = case.machine.versions.get("deepspeed", "")
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers.group().split("."))) if numbers else None
