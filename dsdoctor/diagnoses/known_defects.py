"""Defects of DeepSpeed releases that the config at hand meets, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.blame.health import Health, judge
from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import at_key
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.release import in_range
from dsdoctor.finding import Evidence, Finding, Fix, Severity
from dsdoctor.logs.facts import LogFacts, Point

_ZERO = "zero_optimization"
_STAGE = f"{_ZERO}.stage"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One defect. `since` and `until` are the releases it was seen in, both included; `until` None: no release without
    it is known. `meets` says whether a config meets it. `avoid` is the patch that gets around it, where one does;
    `fixed_in` the release that ends it. A `latent` defect hurts only once something else goes wrong, so it is a note
    until the job shows a value that is not finite.
    """

    name: str
    since: str
    until: str | None
    meets: Callable[[Effective], bool]
    what: str
    advice: str
    keys: tuple[str, ...]
    severity: Severity = "error"
    avoid: dict[str, Any] | None = None
    fixed_in: str | None = None
    latent: bool = False
    caveat: str | None = None


def _autocast_fp16(config: Effective) -> bool:
    dtype = str(config.get("torch_autocast.dtype") or "")
    on = config.get("torch_autocast.enabled") is True and dtype in ("fp16", "float16", "half", "torch.float16")
    return on and config.stage > 0 and config.precision == "fp32"


def _unchecked_bf16(config: Effective) -> bool:
    """bf16 at stages 1 to 3 without the check; stage 1 with fp32 accumulation asserts on the norm instead."""
    if config.precision != "bf16" or config.stage == 0:
        return False
    if config.stage == 1 and config.get("data_types.grad_accum_dtype") == "fp32":
        return False
    return config.stage == 3 or config.get("bf16.check_grad_overflow") is not True


def _implicit_scale(config: Effective) -> bool:
    """Dynamic fp16 under ZeRO with none of the keys that make the documented defaults hold."""
    names = ("initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis", "consecutive_hysteresis")
    given = any(config.given(f"fp16.{name}") for name in names)
    return config.precision == "fp16" and config.stage > 0 and config.get("fp16.loss_scale") == 0 and not given


DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="fp16 without ZeRO never scales the loss",
        since="0.18.3",
        until=None,
        meets=lambda c: c.precision == "fp16" and c.stage == 0,
        what=(
            "fp16 at ZeRO stage 0: engine.backward does not multiply the loss by the scale, but step() divides the "
            "gradients by it, so every update is smaller by the loss scale and gradients underflow"
        ),
        advice="use ZeRO stage 1, or bf16",
        keys=(_STAGE, "fp16.enabled"),
        avoid={_ZERO: {"stage": 1}},
        caveat="Seen on 0.18.3 to 0.19.8; a later release may have mended it.",
    ),
    Defect(
        name="torch_autocast in fp16 never leaves an overflow",
        since="0.19.8",
        until=None,
        meets=_autocast_fp16,
        what=(
            "torch_autocast in fp16 under ZeRO: an overflow returns before the scaler is updated, so that after the "
            "first one the scale stays and every further step is skipped"
        ),
        advice="use dtype bfloat16 in torch_autocast",
        keys=("torch_autocast.dtype",),
        avoid={"torch_autocast": {"dtype": "bfloat16"}},
        caveat="It needs one overflow, which fp16 with a start scale of 65536 nearly always has.",
    ),
    Defect(
        name="torch_autocast in fp16 hides skipped steps",
        since="0.17.2",
        until="0.19.7",
        meets=_autocast_fp16,
        what=(
            "torch_autocast in fp16 under ZeRO: skipped steps are not counted (skipped_steps 0, was_step_applied() "
            "true), and gradient norm and clipping work on scaled gradients"
        ),
        advice="use dtype bfloat16 in torch_autocast",
        keys=("torch_autocast.dtype",),
        severity="warning",
        avoid={"torch_autocast": {"dtype": "bfloat16"}},
        caveat="Seen on 0.18.2 and 0.19.6; 0.19.7 was not run.",
    ),
    Defect(
        name="Lion moves weights that have no gradient",
        since="0.19.8",
        until=None,
        meets=lambda c: c.optimizer == "lion",
        what=(
            "DeepSpeed's Lion has no sign for 0: a weight whose gradient and momentum are 0 (rows of an embedding that "
            "no batch has used yet, experts without a token) moves by the learning rate in each step"
        ),
        advice="use AdamW, or pass another Lion from the script",
        keys=("optimizer.type",),
        severity="warning",
        caveat="Seen with the CPU's; the GPU's does the same by its code. A later release may have mended it.",
    ),
    Defect(
        name="bf16 gradients are not checked",
        since="0.11.2",
        until="0.17.0",
        meets=lambda c: c.precision == "bf16" and _unchecked_bf16(c),
        what="bf16 under ZeRO: gradients are not checked, so that one NaN gradient destroys the weights silently",
        advice="upgrade to DeepSpeed 0.19.8, which checks them at every stage",
        keys=("bf16.enabled", _STAGE),
        severity="warning",
        latent=True,
        fixed_in="0.19.8",
    ),
    Defect(
        name="bf16 gradients are not checked by default",
        since="0.17.1",
        until="0.19.2",
        meets=_unchecked_bf16,
        what="bf16 under ZeRO: gradients are not checked, so that one NaN gradient destroys the weights silently",
        advice="set bf16.check_grad_overflow at stages 1 and 2; at stage 3 upgrade to DeepSpeed 0.19.8",
        keys=("bf16.check_grad_overflow", "bf16.enabled", _STAGE),
        severity="warning",
        latent=True,
        avoid={"bf16": {"check_grad_overflow": True}},
        fixed_in="0.19.8",
        caveat="Stage 3 ignores the key before 0.19.8.",
    ),
    Defect(
        name="bf16 gradients are not checked at stage 3",
        since="0.19.3",
        until="0.19.6",
        meets=lambda c: c.precision == "bf16" and c.stage == 3,
        what="bf16 at ZeRO stage 3: check_grad_overflow is ignored, and one NaN gradient destroys the weights silently",
        advice="upgrade to DeepSpeed 0.19.8",
        keys=("bf16.enabled", _STAGE),
        severity="warning",
        latent=True,
        fixed_in="0.19.8",
    ),
    Defect(
        name="the dynamic loss scale starts at 2^32",
        since="0.8.0",
        until="0.17.0",
        meets=_implicit_scale,
        what=(
            "dynamic fp16 under ZeRO without any of the scale keys starts at 2^32 with hysteresis 1 instead of the "
            "documented 2^16 and 2: about 16 more skipped steps at the start"
        ),
        advice="give initial_scale_power, for instance 16",
        keys=("fp16.initial_scale_power",),
        severity="info",
        avoid={"fp16": {"initial_scale_power": 16}},
        fixed_in="0.17.1",
    ),
)

_REPEATS = 5
_SENTINEL_RANGES = (("0.5.9", "0.13.1"), ("0.16.6", "0.19.6"))
"""Releases whose stages 1 and 2 report -1 for a NaN norm of a group (stage 3 to 0.12.6 only in the first range)."""
_COMPLEX = "complex parameters fail"
_COMPLEX_SEEN = "0.19.8"


class KnownDefect(Diagnosis):
    """A defect of the installed DeepSpeed release that this config, or this model, meets.

    What proves it: the release and the keys that the defect needs. Each defect in the table was seen by running that
    release, or read in its code; the range is what was seen, no more. Where every run with such a config is hurt it is
    an error, where it needs a bad step as well a warning. A defect that only hides or worsens another fault is a note
    until the job shows a value that is not finite. A gradient norm of exactly 1, 1.414, 1.732, ... in step after step
    is the sign for NaN that some releases report. A defect of the numbers does not explain a run that was refused,
    raised, hung or was killed: there it is a warning, for the time after that is mended.

    When it could be wrong: a vendor's build with the same version number and a mended code; a range whose end is open
    because no release without the defect was known when this was written.

    What to do: the key that avoids it, or the release that ends it; both are named.
    """

    id = "version/known-defect"
    severity = "error"
    title = "a known defect of this DeepSpeed release"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = _config(case)
        if config is not None and config.data:
            effective = Effective.of(config)
            for defect in DEFECTS:
                if in_range(config.release, defect.since, defect.until) and defect.meets(effective):
                    yield self._met(config, defect, _severity(case, defect))
        yield from self._complex_parameters(case)
        yield from self._sentinel_norm(case)

    def _met(self, config: ConfigFacts, defect: Defect, severity: Severity) -> Finding:
        ends = f"; ended in {defect.fixed_in}" if defect.fixed_in else ""
        seen = f"DeepSpeed {config.release}; the defect is known from {defect.since} to {defect.until or 'now'}{ends}"
        return self.finding(
            severity=severity,
            title=defect.name,
            cause=defect.what,
            evidence=(
                Evidence(source="environment", text=seen),
                *(at_key(config, key) for key in [k for k in defect.keys if config.has(k)] or defect.keys[:1]),
            ),
            confidence=0.9 if severity == "error" else 0.6,
            caveat=defect.caveat,
            fixes=(Fix(text=defect.advice, patch=defect.avoid),),
            keys=defect.keys,
        )

    def _sentinel_norm(self, case: Case) -> Iterator[Finding]:
        """A gradient norm of 1, 1.414, 1.732, ... over and over: -1 for each group of parameters, combined."""
        release = _release(case)
        if not any(in_range(release, since, until) for since, until in _SENTINEL_RANGES):
            return
        for source, norms in _norms(case):
            last = norms[-_REPEATS:]
            groups = round(last[-1] ** 2) if len(last) == _REPEATS and math.isfinite(last[-1]) else 0
            if groups and all(abs(norm - math.sqrt(groups)) < 1e-5 for norm in last):
                yield self._sentinel(source, release, last[-1])

    def _sentinel(self, source: str, release: str, norm: float) -> Finding:
        return self.finding(
            severity="warning",
            title="the gradient norm stands for NaN",
            cause=(
                f"a gradient norm of {norm:.6g} in step after step is DeepSpeed {release}'s sign for NaN gradients "
                "(-1 for each group of parameters), not a norm"
            ),
            evidence=(Evidence(source=source, text=f"the last {_REPEATS} gradient norms are {norm:.7g}"),),
            confidence=0.75,
            caveat="Clipping code that reports the norm after clipping to 1.0 prints 1 too.",
            fixes=(Fix(text="look for the first NaN; DeepSpeed 0.19.8 reports inf and skips the step"),),
        )

    def _complex_parameters(self, case: Case) -> Iterator[Finding]:
        """Complex parameters: DeepSpeed's engines fail on them at every stage, with several messages."""
        run = context.own_run(case)
        release = _release(case)
        if run is None or run.model is None or not in_range(release, _COMPLEX_SEEN, None):
            return
        complex_types = [(name, count) for name, count in run.model.dtypes if "complex" in name]
        if not complex_types or not run.failures:
            return
        counts = ", ".join(f"{count} of {name}" for name, count in complex_types)
        yield self.finding(
            title=_COMPLEX,
            cause="DeepSpeed cannot train complex parameters at any ZeRO stage; plain PyTorch can",
            evidence=(
                Evidence(source=run.leg, text=f"the model holds {counts} among {run.model.parameters} parameters"),
                context.evidence(run.failures[0]),
            ),
            confidence=0.85,
            caveat=f"Seen on {_COMPLEX_SEEN}; a later release may have mended it.",
            fixes=(Fix(text="keep such a parameter as a real tensor with a last axis of 2 (torch.view_as_complex)"),),
        )


def _config(case: Case) -> ConfigFacts | None:
    """The config that was given, else the one that the log shows."""
    if case.config is not None or case.logs is None or case.logs.config is None:
        return case.config
    source = case.logs.sources[0] if case.logs.sources else "log"
    return ConfigFacts(path=source, data=case.logs.config, release=_release(case))


def _release(case: Case) -> str:
    """The job's DeepSpeed release, "" where nothing names it. What a log says of its own job counts first."""
    logged = case.logs.versions.get("deepspeed", "") if case.logs is not None else ""
    return logged or (case.config.release if case.config is not None else "")


def _severity(case: Case, defect: Defect) -> Severity:
    """What the defect is to this job: each in the table spoils numbers, so it ends no job whose numbers are sound."""
    if defect.latent:
        return defect.severity if _went_bad(case) else "info"
    run = context.own_run(case)
    health = judge(run) if run is not None else Health()
    ended_otherwise = health.failed and not health.numeric
    return "warning" if ended_otherwise and defect.severity == "error" else defect.severity


def _went_bad(case: Case) -> bool:
    """Whether the job showed a loss or gradient norm that is not finite, or a first bad value."""
    run = context.own_run(case)
    ranks = run.ranks if run is not None else ()
    values = [value for rank in ranks for step in rank.steps for value in (*step.losses, step.grad_norm or 0.0)]
    if case.logs is not None:
        values += [point.value for name in ("loss", "grad_norm") for point in _points(case.logs, name)]
    return any(not math.isfinite(value) for value in values) or any(rank.first_bad is not None for rank in ranks)


def _points(logs: LogFacts, name: str) -> tuple[Point, ...]:
    series = logs.series_of(name)
    return series.points if series is not None else ()


def _norms(case: Case) -> Iterator[tuple[str, list[float]]]:
    """The gradient norms of the job, step by step: of its log, and of the first rank of its run."""
    if case.logs is not None and case.logs.sources:
        yield case.logs.sources[0], [point.value for point in _points(case.logs, "grad_norm")]
    run = context.own_run(case)
    if run is not None and run.ranks:
        yield run.leg, [step.grad_norm for step in run.ranks[0].steps if step.grad_norm is not None]


DIAGNOSES: tuple[Diagnosis, ...] = (KnownDefect(),)
