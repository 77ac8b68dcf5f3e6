"""Options of zero_optimization that do nothing at their stage, or not what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsdoctor.diagnoses.config_evidence import as_list
from dsdoctor.diagnoses.config_idle import Idle
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Fix

_ZERO = "zero_optimization"
_PARAM = f"{_ZERO}.offload_param"
_OPTIMIZER = f"{_ZERO}.offload_optimizer"
_STAGE = f"{_ZERO}.stage"
_FORCE = "zero_force_ds_cpu_optimizer"
_STAGE_3_KEYS = ("sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights")
_CHECKPOINT_ONLY = ("load_from_fp32_weights", "elastic_checkpoint")
_ENORMOUS_BUCKET = 4_000_000_000
"""Elements: 8 GB in 16 bit, more than any bucket is good for."""


def idle(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    """All of them."""
    yield from _offload_param(effective)
    yield from _nvme(effective)
    yield from _super_offload(effective)
    yield from _stage_0(config, effective)
    yield from _stage_3_only(config, effective)
    yield from _forced_without_offload(config, effective)
    yield from _buckets(config, effective)


def _offload_param(effective: Effective) -> Iterator[Idle]:
    if effective.offload("param") == "none" or effective.stage == 3:
        return
    yield Idle(
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


def _nvme(effective: Effective) -> Iterator[Idle]:
    for what, key in (("optimizer", _OPTIMIZER), ("param", _PARAM)):
        if effective.offload("optimizer" if what == "optimizer" else "param") != "nvme":
            continue
        if effective.stage == 3 and not effective.get(f"{key}.nvme_path"):
            yield Idle(
                keys=(f"{key}.nvme_path",),
                why=f"{key} asks for NVMe without nvme_path; DeepSpeed raises when it opens the swap folder",
                severity="error",
                fixes=(Fix(text=f"give {key}.nvme_path, a folder on a local NVMe disk"),),
            )
        elif effective.stage in (1, 2) and what == "optimizer":
            yield Idle(
                keys=(f"{key}.device", f"{key}.nvme_path"),
                why=f"below stage 3 NVMe is not used; at stage {effective.stage} the optimizer states go to the CPU",
                fixes=(
                    Fix(text="write cpu", patch=keys.as_patch(key, {"device": "cpu", "nvme_path": None}), safe=True),
                    Fix(text="or use stage 3", patch=keys.as_patch(_STAGE, 3)),
                ),
            )


def _super_offload(effective: Effective) -> Iterator[Idle]:
    key = f"{_OPTIMIZER}.super_offload"
    if effective.get(key) is True and effective.stage in (1, 2):
        yield Idle(
            keys=(key,),
            why=f"super_offload works at ZeRO stage 3 only; at stage {effective.stage} the usual offload is used",
            fixes=(Fix(text="drop super_offload, or use stage 3", patch=keys.as_patch(key, None), safe=True),),
        )


def _stage_3_only(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    """Tuning keys of stage 3 at stage 1 or 2; harmless leftovers."""
    zero = config.value(_ZERO)
    if effective.stage not in (1, 2) or not isinstance(zero, dict):
        return
    idle = tuple(f"{_ZERO}.{name}" for name in zero if name.startswith("stage3_") or name in _STAGE_3_KEYS)
    if idle:
        yield Idle(
            keys=idle,
            why=f"{as_list(idle[:4])} {'does' if len(idle) == 1 else 'do'} nothing at stage {effective.stage}",
            severity="info",
            fixes=(Fix(text="drop them, or use stage 3"),),
        )


def _stage_0(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    """ZeRO options where ZeRO is off."""
    zero = config.value(_ZERO)
    if effective.stage != 0 or not isinstance(zero, dict) or effective.get(_STAGE) != 0 or zero.get("stage") == "auto":
        return
    if effective.offload("optimizer") != "none":
        yield Idle(
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
        yield Idle(
            keys=rest,
            why=f"ZeRO is off ({'stage 0' if given else 'no stage is given'}), so {as_list(rest[:4])} do nothing",
            severity="info" if given else "warning",
            fixes=(Fix(text="give the stage that is meant, 1 to 3"),),
        )


def _forced_without_offload(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    if config.has(_FORCE) and (effective.offload("optimizer") == "none" or effective.stage == 0):
        yield Idle(
            keys=(_FORCE,),
            why=f"{_FORCE} matters only where the optimizer is offloaded to the CPU",
            severity="info",
        )


def _buckets(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    """The reduction buckets are allocated whole, however small the model is."""
    key = f"{_ZERO}.reduce_bucket_size"
    elements = effective.get(key)
    if effective.stage == 0 or not isinstance(elements, int) or elements < _ENORMOUS_BUCKET:
        return
    count = 2 if effective.stage < 3 and effective.get(f"{_ZERO}.overlap_comm") is True else 1
    width = 4 if effective.precision == "fp32" else 2
    twice = " (two, for overlap_comm)" if count == 2 else ""
    taken = f"{count * width * elements / 1e9:.0f} GB on each GPU{twice}"
    yield Idle(
        keys=(key,),
        why=f"reduce_bucket_size counts elements; this takes {taken}",
        fixes=(Fix(text="leave it out (5e8)", patch=keys.as_patch(key, None)),),
    )
