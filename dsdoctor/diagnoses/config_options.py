"""Options of the ds_config that do nothing where they stand, and optimizers that ZeRO does not take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_list, at_key, matching, raised
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, Fix, Severity

_ZERO = "zero_optimization"
_PARAM = f"{_ZERO}.offload_param"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_STAGE = f"{_ZERO}.stage"
_SUPPORTED = ("adam", "adamw", "adagrad", "lion", "muon")
"""Names whose class stands in DeepSpeed's ZERO_SUPPORTED_OPTIMIZERS."""
_STAGE_3_KEYS = ("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights")
_HIGH_POWER = 28
_CHECKPOINT_ONLY = ("load_from_fp32_weights", "elastic_checkpoint")


@dataclass(frozen=True, kw_only=True)
class _Idle:
    """Keys that do nothing here, why, and what makes them work or takes them away."""

    keys: tuple[str, ...]
    why: str
    severity: Severity = "warning"
    fixes: tuple[Fix, ...] = ()


class Ineffective(Diagnosis):
    """An option that DeepSpeed accepts without a word and that does nothing in this config, or not what it says.

    `offload_param` below stage 3 is ignored. NVMe offload without `nvme_path` is accepted when the config is parsed and
    fails when the swapper starts (stage 3); below stage 3 NVMe for the optimizer means the CPU. ZeRO options
    at stage 0 do nothing, though `offload_optimizer` still picks the CPU's Adam. `fp16.hysteresis: 0` keeps the dynamic
    loss scale from ever falling.

    What proves it: the config alone; each case was seen on DeepSpeed itself.

    When it could be wrong: tuning options that are left over from another stage are harmless, so they are a note only.

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
        offloads = (*_offload_param(effective), *_nvme(effective), *_super_offload(effective))
        by_stage = (*_stage_0(config, effective), *_stage_3_only(config, effective))
        for idle in (*offloads, *by_stage, *_scale(config, effective), *_leftovers(config, effective)):
            yield self.finding(
                severity=idle.severity,
                cause=idle.why,
                evidence=tuple(at_key(config, key) for key in (*idle.keys[:6], _STAGE) if config.has(key)),
                confidence=0.98,
                fixes=idle.fixes,
                keys=idle.keys,
            )


def _offload_param(effective: Effective) -> Iterator[_Idle]:
    if effective.offload("param") == "none" or effective.stage == 3:
        return
    yield _Idle(
        keys=(_PARAM,),
        why=f"offload_param works at ZeRO stage 3 only; at stage {effective.stage} the parameters stay on the GPU",
        fixes=(
            Fix(text="drop offload_param", patch=_without_offload_param(effective), safe=True),
            Fix(text="or use stage 3 if the parameters have to leave the GPU", patch=keys.as_patch(_STAGE, 3)),
        ),
    )


def _without_offload_param(effective: Effective) -> dict[str, Any]:
    old = f"{_ZERO}.cpu_offload_param"
    return keys.as_patch(old if keys.get(effective.data, old) else _PARAM, None)


def _nvme(effective: Effective) -> Iterator[_Idle]:
    for what, key in (("optimizer", _OPTIMIZER), ("param", _PARAM)):
        if effective.offload("optimizer" if what == "optimizer" else "param") != "nvme":
            continue
        if effective.stage == 3 and not effective.get(f"{key}.nvme_path"):
            yield _Idle(
                keys=(f"{key}.nvme_path",),
                why=f"{key} asks for NVMe without nvme_path; DeepSpeed raises when it opens the swap folder",
                severity="error",
                fixes=(Fix(text=f"give {key}.nvme_path, a folder on a local NVMe disk"),),
            )
        elif effective.stage in (1, 2) and what == "optimizer":
            yield _Idle(
                keys=(f"{key}.device", f"{key}.nvme_path"),
                why=f"below stage 3 NVMe is not used; at stage {effective.stage} the optimizer states go to the CPU",
                fixes=(
                    Fix(text="write cpu", patch=keys.as_patch(key, {"device": "cpu", "nvme_path": None}), safe=True),
                    Fix(text="or use stage 3", patch=keys.as_patch(_STAGE, 3)),
                ),
            )


def _super_offload(effective: Effective) -> Iterator[_Idle]:
    key = f"{_OPTIMIZER}.super_offload"
    if effective.get(key) is True and effective.stage in (1, 2):
        yield _Idle(
            keys=(key,),
            why=f"super_offload works at ZeRO stage 3 only; at stage {effective.stage} the usual offload is used",
            fixes=(Fix(text="drop super_offload, or use stage 3", patch=keys.as_patch(key, None), safe=True),),
        )


def _stage_3_only(config: ConfigFacts, effective: Effective) -> Iterator[_Idle]:
    """Tuning keys of stage 3 at stage 1 or 2; harmless leftovers."""
    zero = config.value(_ZERO)
    if effective.stage not in (1, 2) or not isinstance(zero, dict):
        return
    idle = tuple(f"{_ZERO}.{name}" for name in zero if name.startswith("stage3_") or name in _STAGE_3_KEYS)
    if idle:
        yield _Idle(
            keys=idle,
            why=f"{as_list(idle[:4])} {'does' if len(idle) == 1 else 'do'} nothing at stage {effective.stage}",
            severity="info",
            fixes=(Fix(text="drop them, or use stage 3"),),
        )


def _stage_0(config: ConfigFacts, effective: Effective) -> Iterator[_Idle]:
    """ZeRO options where ZeRO is off."""
    zero = config.value(_ZERO)
    if effective.stage != 0 or not isinstance(zero, dict) or effective.get(_STAGE) != 0 or zero.get("stage") == "auto":
        return
    if effective.offload("optimizer") != "none":
        yield _Idle(
            keys=(_OPTIMIZER,),
            why="offload_optimizer does not offload at stage 0; DeepSpeed still picks DeepSpeedCPUAdam for Adam",
            fixes=(
                Fix(text="use stage 1 or 2", patch=keys.as_patch(_STAGE, 2)),
                Fix(text="or drop offload_optimizer", patch=keys.as_patch(_OPTIMIZER, None)),
            ),
        )
    offloads = (_OPTIMIZER, _PARAM, f"{_ZERO}.cpu_offload", f"{_ZERO}.cpu_offload_param")
    rest = tuple(f"{_ZERO}.{name}" for name in zero if name != "stage" and name not in _CHECKPOINT_ONLY)
    rest = tuple(key for key in rest if key not in offloads and effective.schema.key(key) is not None)
    if rest:
        given = "stage" in zero
        yield _Idle(
            keys=rest,
            why=f"ZeRO is off ({'stage 0' if given else 'no stage is given'}), so {as_list(rest[:4])} do nothing",
            severity="info" if given else "warning",
            fixes=(Fix(text="give the stage that is meant, 1 to 3"),),
        )


def _leftovers(config: ConfigFacts, effective: Effective) -> Iterator[_Idle]:
    """Sections that nothing in this config uses; notes."""
    nvme = "nvme" in (effective.offload("optimizer"), effective.offload("param"))
    if config.value("aio") and not (nvme and effective.stage == 3):
        yield _Idle(keys=("aio",), why="aio is for swapping to NVMe, which this config does not do", severity="info")
    if config.value("activation_checkpointing"):
        yield _Idle(
            keys=("activation_checkpointing",),
            why="activation_checkpointing switches nothing on: it is read by deepspeed.checkpointing only",
            severity="info",
        )
    if effective.get("torch_autocast.enabled") is True and effective.precision != "fp32":
        yield _Idle(
            keys=("torch_autocast.enabled",),
            why=f"{effective.precision} casts the whole model, so that torch_autocast finds nothing left to cast",
            severity="info",
        )


def _scale(config: ConfigFacts, effective: Effective) -> Iterator[_Idle]:
    if effective.precision != "fp16":
        return
    scale = effective.get("fp16.loss_scale")
    names = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    given = tuple(key for key in (f"fp16.{name}" for name in names) if config.has(key))
    if isinstance(scale, (int, float)) and scale > 0 and given:
        yield _Idle(
            keys=given, why=f"the loss scale is static ({scale:g}), so {as_list(given)} do nothing", severity="info"
        )
    power = effective.get("fp16.initial_scale_power")
    if scale == 0 and isinstance(power, int) and power >= _HIGH_POWER:
        yield _Idle(
            keys=("fp16.initial_scale_power",),
            why=f"a loss scale from 2^{power} skips a step for each power above the one that holds, usually 10 to 20",
            severity="info",
            fixes=(Fix(text="leave it out (16)", patch=keys.as_patch("fp16.initial_scale_power", None)),),
        )
    dynamic = effective.get("fp16.loss_scale") == 0
    if effective.precision == "fp16" and dynamic and effective.stage > 0 and effective.get("fp16.hysteresis") == 0:
        yield _Idle(
            keys=("fp16.hysteresis",),
            why="hysteresis 0 counts down below zero, so that the dynamic loss scale never falls",
            fixes=(Fix(text="write 1 or 2", patch=keys.as_patch("fp16.hysteresis", 2)),),
        )


class UntestedOptimizer(Diagnosis):
    """An optimizer that is not on ZeRO's list.

    ZeRO takes torch's Adam, AdamW and Adagrad, DeepSpeed's own fused and CPU optimizers, and Muon, by their exact
    class; a subclass counts as another class. Anything else raises, unless `zero_allow_untested_optimizer` is true.

    What proves it: the optimizer's name in the config with a stage above 0, or DeepSpeed's assertion.

    When it could be wrong: a script that passes its own optimizer to `deepspeed.initialize` does not use the config's.
    Optimizers that work element by element are safe with ZeRO; ones that look at whole tensors (LAMB, Adafactor,
    Shampoo) see only their slice, and their results are wrong.

    What to do: a supported optimizer; or set the key, for an optimizer that works element by element.
    """

    id = "config/untested-optimizer"
    severity = "error"
    title = "an optimizer that ZeRO does not know"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = tuple(raised(f) for f, _ in matching(case, r"You are using an untested ZeRO Optimizer"))
        name = _untested(config) if config is not None else None
        if not exceptions and name is None:
            return
        evidence: list[Evidence] = list(exceptions)
        if config is not None:
            evidence += [at_key(config, key) for key in ("optimizer.type", _STAGE) if config.has(key)]
        allow = "zero_allow_untested_optimizer"
        yield self.finding(
            cause=f"{name or 'the optimizer that the script passes'} is not on ZeRO's list of supported optimizers",
            evidence=tuple(evidence),
            confidence=0.98 if exceptions else 0.9,
            caveat=None if exceptions else "Not if the script passes its own optimizer to deepspeed.initialize.",
            fixes=(
                Fix(text=f"set {allow}, if the optimizer works element by element", patch={allow: True}),
                Fix(text="or use AdamW"),
            ),
            keys=(allow, "optimizer.type") if name else (allow,),
        )


def _untested(config: ConfigFacts) -> str | None:
    """The name of the config's optimizer if ZeRO refuses it, else None."""
    effective = Effective.of(config)
    name = config.value("optimizer.type")
    if effective.stage == 0 or not isinstance(name, str) or effective.get("zero_allow_untested_optimizer"):
        return None
    built_by_deepspeed = name.lower() in effective.schema.optimizer_names
    if name.lower() in _SUPPORTED or not (built_by_deepspeed or name in effective.schema.torch_optimizers):
        return None
    return name


DIAGNOSES: tuple[Diagnosis, ...] = (Ineffective(), UntestedOptimizer())
