"""What a bisection may change in a ds_config: each key toward the value at which it does nothing special.

The parts that decide whether the script runs at all stay: batch sizes, the precision, what a script relies on
(`auto_cast`, who drives accumulation). Pure functions of the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig import batch, keys
from dsdoctor.dsconfig.effective import Effective

ZERO = "zero_optimization"
STAGE = f"{ZERO}.stage"
RACES = (
    f"{ZERO}.overlap_comm",
    f"{ZERO}.contiguous_gradients",
    f"{ZERO}.reduce_scatter",
    f"{ZERO}.round_robin_gradients",
    f"{ZERO}.use_multi_rank_bucket_allreduce",
)
"""Switches of code that runs beside the backward pass: what they break, they break by chance."""
KEPT = (
    *(batch.TRAIN, batch.MICRO, "fp16.enabled", "bf16.enabled", "bfloat16.enabled", "amp.enabled"),
    *("torch_autocast.enabled", "torch_autocast.dtype", "fp16.auto_cast", "managed_gradient_accumulation"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "sequence_parallel_size", "data_parallel_size"),
    *("tensor_parallel.autotp_size", "pipeline", "steps_per_print", "log_level"),
    *(f"{ZERO}.stage3_param_persistence_threshold", f"{ZERO}.stage3_model_persistence_threshold"),
    *(f"{ZERO}.param_persistence_threshold", f"{ZERO}.model_persistence_threshold"),
)
"""Keys that are never changed: what the script counts on, the precision (its control is a leg of its own), and what
only prints."""
_COMMUNICATION = ("bucket", "reduce", "allgather", "overlap", "contiguous", "round_robin")
"""Words in the keys of the ZeRO section that decide how and when gradients and weights travel."""
_COMMUNICATION_KEYS = (
    *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather"),
)
"""The same at the top level."""
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger", "dump_state", "timers")
_OFFLOADS = (f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer")
_REQUIRED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr", "torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of optimizers and schedules that have no default, or choose an implementation."""
_RATES = ("lr", "warmup_max_lr", "cycle_max_lr")
_ADAPTIVE = ("adam", "lamb", "lion", "adagrad", "rmsprop", "muon")
SANE_RATE = 1e-4
_RATE_LIMIT = {True: 1e-2, False: 1.0}
"""Learning rates above which an optimizer's value is no longer a usual one; True for the family that divides by the
size of the gradient."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One way to make a part of the config harmless.

    `patch` is a merge patch; `nearer` are weaker forms of it, the nearest to the given config first. `covers` are
    dotted keys (of other changes, with everything below them) that it changes as well. `value` says that it changes a
    number of the training itself, which the run without DeepSpeed shares; `insane` that the number is outside the usual
    range, so that it can be guilty even of what the script does without DeepSpeed too.
    """

    keys: tuple[str, ...]
    patch: Mapping[str, Any]
    group: str
    nearer: tuple[Mapping[str, Any], ...] = ()
    covers: tuple[str, ...] = ()
    value: bool = False
    insane: bool = False


def changes(config: Effective, *, accumulation: int = 1) -> tuple[Change, ...]:
    """All changes of the config, those most often guilty first; single keys before the sections that hold them."""
    found = [*_communication(config), *_offloads(config), *_zero(config), *_stage(config)]
    found += [*_optimizer(config), *_scheduler(config), *_batch(config, accumulation), *_rest(config)]
    return tuple(change for change in found if not set(change.keys) & set(KEPT))


def _drop(key: str, group: str, **more: Any) -> Change:
    return Change(keys=(key,), patch=keys.as_patch(key, None), group=group, **more)


def _at_default(config: Effective, key: str) -> bool:
    value = config.get(key)
    return value == config.schema.default(key) and isinstance(value, bool) == isinstance(
        config.schema.default(key), bool
    )


def _leaves(config: Effective, section: str) -> Iterator[tuple[str, Any]]:
    """Keys and values of a section that are not at their default."""
    values = keys.get(config.data, section)
    for name in values if isinstance(values, Mapping) else ():
        key = f"{section}.{name}"
        if values[name] != "auto" and not _at_default(config, key):
            yield key, values[name]


def _communication(config: Effective) -> Iterator[Change]:
    """What decides how and when gradients and weights travel. `overlap_comm` is on at stage 3 without a word."""
    overlap = f"{ZERO}.overlap_comm"
    if config.stage > 0 and config.get(overlap) is True:
        yield Change(keys=(overlap,), patch=keys.as_patch(overlap, False), group="communication")
    for key, _value in _leaves(config, ZERO):
        if key != overlap and any(word in key for word in _COMMUNICATION):
            yield _drop(key, "communication")
    for key in _COMMUNICATION_KEYS:
        if config.given(key) and not _at_default(config, key):
            yield _drop(key, "communication")


def _offloads(config: Effective) -> Iterator[Change]:
    for section in _OFFLOADS:
        for key, _value in _leaves(config, section):
            if not key.endswith((".device", ".nvme_path")):
                yield _drop(key, "offload")
        values = keys.get(config.data, section)
        if isinstance(values, Mapping):
            nearer = ({ZERO: {section.partition(".")[2]: {"device": "cpu", "nvme_path": None}}},)
            weaker = nearer if values.get("device") == "nvme" else ()
            yield _drop(section, "offload", covers=(section,), nearer=weaker)


def _zero(config: Effective) -> Iterator[Change]:
    """Everything else in the ZeRO section."""
    for key, _value in _leaves(config, ZERO):
        if key in (STAGE, f"{ZERO}.overlap_comm", *_OFFLOADS) or any(word in key for word in _COMMUNICATION):
            continue
        yield _drop(key, "zero")


def _stage(config: Effective) -> Iterator[Change]:
    """The stage lower, the lowest that the rest of the config allows being the change itself."""
    stage = config.stage
    # fp16 without ZeRO has a scaler of its own (and a defect in several releases); wider gradients need ZeRO.
    floor = 1 if config.precision == "fp16" or config.given("data_types.grad_accum_dtype") else 0
    if stage <= floor:
        return
    yield Change(
        keys=(STAGE,),
        patch=_at_stage(config, floor),
        group="stage",
        nearer=tuple(_at_stage(config, lower) for lower in range(stage - 1, floor, -1)),
        covers=_gone_below(floor),
    )


def _at_stage(config: Effective, stage: int) -> Mapping[str, Any]:
    """The patch that lowers the stage and drops what would need a higher one."""
    zero = config.data.get(ZERO)
    if not isinstance(zero, Mapping):
        return {ZERO: {"stage": stage}}
    names = [key.partition(".")[2] for key in _gone_below(stage)]
    return {ZERO: {"stage": stage, **{name: None for name in names if name in zero}}}


def _gone_below(stage: int) -> tuple[str, ...]:
    gone = [_OFFLOADS[0], f"{ZERO}.zero_hpz_partition_size"] if stage < 3 else []
    return (*gone, _OFFLOADS[1]) if stage < 1 else tuple(gone)


def _optimizer(config: Effective) -> Iterator[Change]:
    yield from _parameters(config, "optimizer")
    kind = config.optimizer
    if kind is None:
        return
    if kind not in ("adam", "adamw"):
        yield Change(
            keys=("optimizer.type",),
            patch={"optimizer": {"type": "AdamW", "params": _only_rate(config, "optimizer")}},
            group="optimizer",
            covers=("optimizer.params",),
        )
    elif not keys.get(config.data, "optimizer.params.torch_adam") and config.offload("optimizer") == "none":
        key = "optimizer.params.torch_adam"
        yield Change(keys=(key,), patch=keys.as_patch(key, True), group="optimizer")


def _only_rate(config: Effective, section: str) -> dict[str, Any]:
    params = keys.get(config.data, f"{section}.params")
    given = params if isinstance(params, Mapping) else {}
    return {**{name: None for name in given if name != "lr"}, "torch_adam": True}


def _scheduler(config: Effective) -> Iterator[Change]:
    yield from _parameters(config, "scheduler")
    if keys.get(config.data, "scheduler.type") is not None:
        yield Change(
            keys=("scheduler.type",),
            patch={"scheduler": None},
            group="scheduler",
            covers=("scheduler.params",),
            value=True,
        )


def _parameters(config: Effective, section: str) -> Iterator[Change]:
    """Rates to a usual one, other parameters to their class's default."""
    params = keys.get(config.data, f"{section}.params")
    for name, value in params.items() if isinstance(params, Mapping) else ():
        key = f"{section}.params.{name}"
        if value == "auto" or (name in _REQUIRED and name not in _RATES):
            continue
        if name not in _RATES:
            yield _drop(key, section, value=True, insane=_insane(name, value))
        elif _is_number(value) and value > SANE_RATE:
            nearer = (keys.as_patch(key, 10 * SANE_RATE),) if value > 10 * SANE_RATE else ()
            high = value > _RATE_LIMIT[_adaptive(config)]
            yield Change(
                keys=(key,),
                patch=keys.as_patch(key, SANE_RATE),
                group=section,
                nearer=nearer,
                value=True,
                insane=high,
            )


def _adaptive(config: Effective) -> bool:
    return any(name in (config.optimizer or "adamw") for name in _ADAPTIVE)


def _insane(name: str, value: Any) -> bool:
    """A value that no optimizer is usually given."""
    if name == "betas" and isinstance(value, (list, tuple)):
        return not all(_is_number(beta) and 0 <= beta < 1 for beta in value) or any(beta < 0.5 for beta in value)
    if not _is_number(value):
        return False
    limits = {"weight_decay": (0.0, 1.0), "eps": (1e-20, 1e-3), "momentum": (0.0, 0.999)}
    low, high = limits.get(name, (float("-inf"), float("inf")))
    return not low <= value <= high


def _batch(config: Effective, accumulation: int) -> Iterator[Change]:
    """Clipping at its default, and accumulation off with the batch triangle kept."""
    clipping = config.get("gradient_clipping")
    default = config.schema.default("gradient_clipping") or 1.0
    if config.given("gradient_clipping") and clipping != "auto" and clipping != default:
        patch = {"gradient_clipping": 1.0}
        yield Change(keys=("gradient_clipping",), patch=patch, group="batch", value=True)
    steps = config.get(batch.STEPS)
    if accumulation > 1 and steps != "auto":
        yield Change(keys=(batch.STEPS,), patch=_without_accumulation(config, accumulation), group="batch", value=True)


def _without_accumulation(config: Effective, steps: int) -> dict[str, Any]:
    """Micro-batches of the same size, and the total batch that follows from it."""
    total = config.get(batch.TRAIN)
    if config.given(batch.MICRO) or not isinstance(total, int):
        return {batch.STEPS: 1, batch.TRAIN: None}
    return {batch.STEPS: 1, batch.TRAIN: total // steps}


def _rest(config: Effective) -> Iterator[Change]:
    """Loss scale and the other options of the precision, activation checkpointing, monitors, and what is left."""
    for section in ("fp16", "bf16", "bfloat16"):
        for key, value in _leaves(config, section):
            yield _drop(key, "precision options", value=True, insane=_holds_the_scale(key, value))
    done = {ZERO, "optimizer", "scheduler", "fp16", "bf16", "bfloat16", *batch.KEYS, "gradient_clipping"}
    done |= set(_COMMUNICATION_KEYS)
    for name, value in config.data.items():
        if name in done or name in KEPT or value == "auto":
            continue
        group = "monitors" if name in _MONITORS or "breakdown" in name else name
        if isinstance(value, Mapping) and value.get("enabled") is not False:
            yield from (_drop(key, group) for key, _value in _leaves(config, name))
        elif not isinstance(value, Mapping) and not _at_default(config, name):
            yield _drop(name, group)


def _holds_the_scale(key: str, value: Any) -> bool:
    """A floor above 1, a fixed scale, or overflows that do not count: the scale cannot fall to where it fits."""
    if not _is_number(value):
        return False
    name = key.rpartition(".")[2]
    return bool(value < 1) if name == "hysteresis" else bool(value > 1) and name in ("min_loss_scale", "loss_scale")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
