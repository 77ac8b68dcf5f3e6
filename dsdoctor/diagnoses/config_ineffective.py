"""Options of the ds_config that do nothing where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import config_idle_sections, config_idle_zero
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_list, at_key
from dsdoctor.diagnoses.config_idle import Idle
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Finding, Fix

_STAGE = "zero_optimization.stage"
_HIGH_POWER = 28


class Ineffective(Diagnosis):
    """An option that DeepSpeed accepts without a word and that does nothing in this config, or not what it says.

    `offload_param` below stage 3 is ignored. NVMe offload without `nvme_path` is accepted when the config is parsed and
    fails when the swapper starts (stage 3); below stage 3 NVMe for the optimizer means the CPU. ZeRO options
    at stage 0 do nothing, though `offload_optimizer` still picks the CPU's Adam. A section without its `enabled` is
    off. `fp16.hysteresis: 0` keeps the dynamic loss scale from ever falling.

    What proves it: the config alone, or with the script that would have to call what the section is for; each case was
    seen on DeepSpeed itself or read in its code.

    When it could be wrong: tuning options that are left over from another stage are harmless, so they are a note only.
    What a script calls in other files is not seen.

    What to do: change the stage if the option is wanted, else drop the option.
    """

    id = "config/ineffective"
    severity = "warning"
    title = "an option that does nothing here"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        if config is None or not config.data:
            return
        effective = Effective.of(config)
        sections = config_idle_sections.idle(config, effective, case.script)
        for idle in (*config_idle_zero.idle(config, effective), *_scale(config, effective), *sections):
            yield self.finding(
                severity=idle.severity,
                cause=idle.why,
                evidence=tuple(at_key(config, key) for key in _shown(config, idle)),
                confidence=0.98,
                fixes=idle.fixes,
                keys=idle.keys,
            )


def _shown(config: ConfigFacts, idle: Idle) -> tuple[str, ...]:
    """The keys to point at: those that do nothing, and for ZeRO's the stage that makes it so."""
    with_stage = config.has(_STAGE) and any(key.startswith(("zero_optimization.", "fp16.")) for key in idle.keys)
    return tuple(dict.fromkeys((*idle.keys[:6], *((_STAGE,) if with_stage else ()))))


def _scale(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    if effective.precision != "fp16":
        return
    scale = effective.get("fp16.loss_scale")
    names = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    given = tuple(key for key in (f"fp16.{name}" for name in names) if config.has(key))
    if isinstance(scale, (int, float)) and scale > 0 and given:
        yield Idle(
            keys=given, why=f"the loss scale is static ({scale:g}), so {as_list(given)} do nothing", severity="info"
        )
    power = effective.get("fp16.initial_scale_power")
    if scale == 0 and isinstance(power, int) and power >= _HIGH_POWER:
        yield Idle(
            keys=("fp16.initial_scale_power",),
            why=f"a loss scale from 2^{power} skips a step for each power above the one that holds, usually 10 to 20",
            severity="info",
            fixes=(Fix(text="leave it out (16)", patch=keys.as_patch("fp16.initial_scale_power", None)),),
        )
    dynamic = effective.get("fp16.loss_scale") == 0
    if effective.precision == "fp16" and dynamic and effective.stage > 0 and effective.get("fp16.hysteresis") == 0:
        yield Idle(
            keys=("fp16.hysteresis",),
            why="hysteresis 0 counts down below zero, so that the dynamic loss scale never falls",
            fixes=(Fix(text="write 1 or 2", patch=keys.as_patch("fp16.hysteresis", 2)),),
        )


DIAGNOSES: tuple[Diagnosis, ...] = (Ineffective(),)
