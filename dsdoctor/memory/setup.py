"""The numbers that the memory formulas take: one job's sizes, precisions and switches, read from config and model.

Symbols as in DeepSpeed's own texts: P trainable parameters, F frozen ones, N ranks that share a shard, g ranks on a
host, B the reduce bucket; all counts are elements, the others bytes for one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.memory.facts import Offload
from dsdoctor.runs.facts import ModelFacts

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
_NAMED_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "bf16": 2, "float16": 2, "bfloat16": 2}
_PINNED_BY_DEFAULT_SINCE = "0.19.5"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the formulas need to know of one row. `loaded` are the bytes of the model as the script builds it."""

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    device: Literal["cpu", "cuda"]
    trainable: int
    frozen: int
    largest_layer: int
    ranks: int
    ranks_per_host: int
    weight: int
    """w: bytes of a parameter as it is used, 2 for fp16 and bf16."""
    bf16: bool
    accumulated: int
    """a: bytes of an accumulated gradient."""
    master: int
    """m: bytes of a master parameter; 0 where there is no second copy."""
    states: int
    """s: bytes of optimizer state for a parameter, 8 for Adam."""
    reduce_bucket: int
    overlap: bool
    prefetch: int
    sub_group: int
    accumulation_steps: int
    pinned: bool
    loaded: int

    @property
    def all_parameters(self) -> int:
        return self.trainable + self.frozen

    @property
    def full_accumulation(self) -> bool:
        """DeepSpeed's BF16_Optimizer is in charge: bf16 at stage 1 with gradients accumulated in fp32."""
        return self.bf16 and self.stage == 1 and self.accumulated == 4 and self.offload_optimizer == "none"

    @property
    def low_precision(self) -> bool:
        return self.weight == 2

    def row(self, stage: int, offload_optimizer: Offload, offload_param: Offload) -> Setup:
        """The same job at another stage, and with other offloads."""
        master = _master(stage, self.weight, self.master)
        return replace(
            self, stage=stage, offload_optimizer=offload_optimizer, offload_param=offload_param, master=master
        )


def setup_of(
    config: Mapping[str, Any],
    model: ModelFacts,
    *,
    release: str,
    device: Literal["cpu", "cuda"],
    ranks: int,
    ranks_per_host: int,
) -> Setup:
    """The given config's own row. `release` is the DeepSpeed version whose defaults count."""
    effective = Effective(data=config, schema=schema_for(release))
    zero = "zero_optimization"
    weight = 4 if effective.precision == "fp32" or effective.get("torch_autocast.enabled") is True else 2
    stage = effective.stage
    offload_param = effective.offload("param") if stage == 3 else "none"
    offload_optimizer = effective.offload("optimizer") if stage > 0 else "none"
    pin = effective.get(f"{zero}.offload_optimizer.pin_memory")
    low_master = effective.get(f"{effective.precision}.{effective.precision}_master_weights_and_grads") is True
    return Setup(
        stage=stage,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        device=device,
        trainable=model.trainable,
        frozen=model.parameters - model.trainable,
        largest_layer=model.largest_layer,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        weight=weight,
        bf16=effective.precision == "bf16" and weight == 2,
        accumulated=_NAMED_BYTES.get(str(effective.get("data_types.grad_accum_dtype")), weight),
        master=_master(stage, weight, 2 if low_master else 4),
        states=_states(effective),
        reduce_bucket=_count(effective.get(f"{zero}.reduce_bucket_size"), 500_000_000),
        overlap=effective.given(f"{zero}.overlap_comm") and effective.get(f"{zero}.overlap_comm") is True,
        prefetch=_count(effective.get(f"{zero}.stage3_prefetch_bucket_size"), 50_000_000),
        sub_group=_count(effective.get(f"{zero}.sub_group_size"), 1_000_000_000),
        accumulation_steps=_count(effective.get("gradient_accumulation_steps"), 1),
        pinned=device == "cuda" and (at_least(release, _PINNED_BY_DEFAULT_SINCE) if pin is None else pin is True),
        loaded=_loaded(model),
    )


def knows_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the config itself names the optimizer."""
    optimizer = config.get("optimizer")
    return isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str)


def _master(stage: int, weight: int, low: int) -> int:
    """ZeRO keeps a master copy in any precision (an fp32 one beside fp32 weights too); without it only 16-bit does."""
    if stage == 0:
        return 4 if weight == 2 else 0
    return 2 if low == 2 and weight == 2 else 4


def _states(effective: Effective) -> int:
    """Bytes of optimizer state for a parameter. An optimizer that is not known counts as Adam."""
    name = effective.optimizer or "adam"
    if name == "sgd":
        return 4 if effective.get("optimizer.params.momentum") else 0
    if name in ("lion", "adagrad", "rmsprop"):
        return 4
    return 4 if effective.get("bf16.bf16_optimizer_states") is True else 8


def _loaded(model: ModelFacts) -> int:
    """Bytes of the model before DeepSpeed casts it; fp32 where its dtypes are not known."""
    if not model.dtypes:
        return 4 * model.parameters
    return sum(_DTYPE_BYTES.get(name.removeprefix("torch."), 4) * count for name, count in model.dtypes)


def _count(value: object, default: int) -> int:
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else default
