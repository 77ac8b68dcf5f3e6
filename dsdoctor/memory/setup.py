"""The numbers that the memory formulas take: one job's sizes, precisions and switches, read from config and model.

Symbols as in DeepSpeed's own texts: P trainable parameters, F frozen ones, N ranks that share a shard, g ranks on a
host, B the reduce bucket; all counts are elements, the others bytes for one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.memory.activations import NOTHING, Activations, Workload, of_transformer
from dsdoctor.memory.facts import Offload
from dsdoctor.memory.inventory import Inventory

_NAMED_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "bf16": 2, "float16": 2, "bfloat16": 2}
_PINNED_BY_DEFAULT_SINCE = "0.19.5"
_ZERO = "zero_optimization"
_SINGLE_TENSOR_TEMPORARIES = 2
"""torch's Adam on a CPU: the root of the second moment, and the quotient by the bias correction."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the formulas need to know of one row."""

    stage: int
    offload_optimizer: Offload
    offload_param: Offload
    device: Literal["cpu", "cuda"]
    model: Inventory
    work: Workload
    measured: Activations | None
    """Activations that are known from elsewhere; None to work them out from the model's shape."""
    ranks: int
    ranks_per_host: int
    expert_ranks: int
    """Ranks that share the shards of an expert's parameters; `ranks` without expert parallelism."""
    weight: int
    """w: bytes of a parameter as it is used, 2 for fp16 and bf16."""
    computed: int
    """Bytes of an element that the forward pass computes with; autocast makes that 16 bit on fp32 weights."""
    precision: Literal["fp32", "fp16", "bf16"]
    accumulated: int
    """a: bytes of an accumulated gradient."""
    low_master: bool
    """fp16 or bf16 master weights and gradients."""
    states: int
    """s: bytes of optimizer state for a parameter, 8 for Adam."""
    temporaries: int
    """Tensors of a state's size that one optimizer kernel needs for itself: none for DeepSpeed's fused ones."""
    fused: bool
    reduce_bucket: int
    overlap: bool
    overlap_by_stage: bool
    """The config leaves overlap_comm to the stage, which has it on at 3 and off below."""
    prefetch: int
    persistence: int
    model_persistence: int
    max_live: int
    max_reuse: int
    sub_group: int
    hpz: int
    accumulation_steps: int
    micro_batch: int | None
    pinned: bool
    buffer_count_optimizer: int
    buffer_count_param: int
    param_buffer: int
    max_in_cpu: int
    zero_init: bool
    """The script builds the model under zero.Init where the stage lets it."""
    gather_on_save: bool
    untouched: bool
    """Count the pages of a buffer that nobody writes: a GPU has to provide them, a CPU does not."""

    @property
    def low_precision(self) -> bool:
        return self.weight == 2

    @property
    def master(self) -> int:
        """m: bytes of a master parameter. ZeRO keeps a copy in any precision, without it only 16-bit does."""
        if self.stage == 0:
            return 4 if self.low_precision else 0
        return 2 if self.low_master and self.low_precision else 4

    @cached_property
    def activations(self) -> Activations:
        """Stage 3's own linear function saves its input for frozen weights too (`zero/linear.py`)."""
        if self.measured is not None or self.model.shape is None:
            return self.measured or NOTHING
        work = replace(self.work, frozen_inputs=self.stage == 3)
        return of_transformer(self.model.shape, work, weight=self.computed)

    @property
    def built_in_shards(self) -> bool:
        """No rank ever holds the whole model."""
        return self.zero_init and self.stage == 3

    @property
    def full_accumulation(self) -> bool:
        """DeepSpeed's BF16_Optimizer is in charge: bf16 at stage 1 with gradients accumulated in fp32."""
        bf16 = self.precision == "bf16" and self.low_precision
        return bf16 and self.stage == 1 and self.accumulated == 4 and self.offload_optimizer == "none"

    @property
    def trained_shard(self) -> int:
        """Trainable elements of which one rank keeps the optimizer's part."""
        dense = self.model.count(trainable=True, expert=False)
        experts = self.model.count(trainable=True, expert=True)
        if self.stage == 0:
            return dense + experts
        if self.stage == 3:
            return self.model.shard(self.ranks, trainable=True, expert=False) + self.model.shard(
                self.expert_ranks, trainable=True, expert=True
            )
        return -(-dense // self.ranks) + -(-experts // self.expert_ranks)

    @property
    def stepped_at_a_time(self) -> int:
        """Elements of one rank that the optimizer works on at a time: all, but for stage 3's sub-groups."""
        if self.stage < 3:
            return self.trained_shard
        return min(self.trained_shard, self.model.largest_group(self.sub_group, self.ranks))

    @property
    def weight_shard(self) -> int:
        """Elements of which one rank keeps the parameters at stage 3, frozen ones too."""
        return self.model.shard(self.ranks, expert=False) + self.model.shard(self.expert_ranks, expert=True)

    def row(self, stage: int, offload_optimizer: Offload, offload_param: Offload) -> Setup:
        """The same job at another stage, and with other offloads."""
        return replace(
            self,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            overlap=stage == 3 if self.overlap_by_stage else self.overlap,
        )


_NUMBERS: Mapping[str, tuple[str, int, int]] = {
    "reduce_bucket": ("reduce_bucket_size", 500_000_000, 1),
    "prefetch": ("stage3_prefetch_bucket_size", 50_000_000, 1),
    "persistence": ("stage3_param_persistence_threshold", 100_000, 0),
    "model_persistence": ("stage3_model_persistence_threshold", 2**63 - 1, 1),
    "max_live": ("stage3_max_live_parameters", 1_000_000_000, 1),
    "max_reuse": ("stage3_max_reuse_distance", 1_000_000_000, 0),
    "sub_group": ("sub_group_size", 1_000_000_000, 1),
    "hpz": ("zero_hpz_partition_size", 1, 1),
    "buffer_count_optimizer": ("offload_optimizer.buffer_count", 4, 1),
    "buffer_count_param": ("offload_param.buffer_count", 5, 1),
    "param_buffer": ("offload_param.buffer_size", 100_000_000, 1),
    "max_in_cpu": ("offload_param.max_in_cpu", 1_000_000_000, 0),
}
"""Numbers of the ZeRO section: the field of `Setup`, the key, DeepSpeed's default, the least that means something."""


def setup_of(
    config: Mapping[str, Any],
    model: Inventory,
    *,
    release: str,
    device: Literal["cpu", "cuda"],
    ranks: int,
    ranks_per_host: int,
    work: Workload | None = None,
    measured: Activations | None = None,
    zero_init: bool = False,
    untouched: bool | None = None,
) -> Setup:
    """The given config's own row. `release` is the DeepSpeed version whose defaults count."""
    effective = Effective(data=config, schema=schema_for(release))
    autocast = effective.get("torch_autocast.enabled") is True
    weight = 4 if effective.precision == "fp32" or autocast else 2
    stage = effective.stage
    offload_optimizer = _optimizer_offload(effective, stage)
    fused = _fused(effective)

    pin = effective.get(f"{_ZERO}.offload_optimizer.pin_memory")
    overlap = keys.get(config, f"{_ZERO}.overlap_comm")
    return Setup(
        stage=stage,
        offload_optimizer=offload_optimizer,
        offload_param=effective.offload("param") if stage == 3 else "none",
        device=device,
        model=model,
        work=work or Workload(),
        measured=measured,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        expert_ranks=max(1, ranks // model.expert_parallel),
        weight=weight,
        computed=2 if autocast else weight,
        precision=effective.precision,
        accumulated=_NAMED_BYTES.get(str(effective.get("data_types.grad_accum_dtype")), weight),
        low_master=effective.get(f"{effective.precision}.{effective.precision}_master_weights_and_grads") is True,
        states=_states(effective),
        temporaries=0 if fused else (_SINGLE_TENSOR_TEMPORARIES if device == "cpu" else 1),
        fused=fused,
        overlap=stage == 3 if overlap in (None, "auto") else effective.get(f"{_ZERO}.overlap_comm") is True,
        overlap_by_stage=overlap in (None, "auto"),
        accumulation_steps=accumulation_steps(config, effective, ranks),
        micro_batch=micro_batch(config, effective, ranks),
        pinned=device == "cuda" and (at_least(release, _PINNED_BY_DEFAULT_SINCE) if pin is None else pin is True),
        zero_init=zero_init,
        untouched=device == "cuda" if untouched is None else untouched,
        **{
            field: _count(effective.get(f"{_ZERO}.{key}"), default, least=least)
            for field, (key, default, least) in _NUMBERS.items()
        },
        gather_on_save=effective.get(f"{_ZERO}.stage3_gather_16bit_weights_on_model_save") is True,
    )


def knows_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether the config itself names the optimizer."""
    optimizer = config.get("optimizer")
    return isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str)


def accumulation_steps(config: Mapping[str, Any], effective: Effective, ranks: int) -> int:
    """Micro-steps of an optimizer step, worked out from the batch sizes where the config leaves them out."""
    given = effective.get("gradient_accumulation_steps")
    total = _count(effective.get("train_batch_size"), 0)
    micro = _count(effective.get("train_micro_batch_size_per_gpu"), 0)
    if "gradient_accumulation_steps" not in config and total and micro:
        return max(1, total // micro // ranks)
    return _count(given, 1)


def micro_batch(config: Mapping[str, Any], effective: Effective, ranks: int) -> int | None:
    """Samples of one micro-step, None where the config does not say ("auto")."""
    micro = _count(effective.get("train_micro_batch_size_per_gpu"), 0)
    total = _count(effective.get("train_batch_size"), 0)
    if micro or not total:
        return micro or None
    return max(1, total // ranks // _count(config.get("gradient_accumulation_steps"), 1))


def _optimizer_offload(effective: Effective, stage: int) -> Offload:
    """Stage 0 offloads nothing; stages 1 and 2 take "nvme" for the CPU."""
    asked = effective.offload("optimizer") if stage > 0 else "none"
    return "cpu" if asked == "nvme" and stage < 3 else asked


def _fused(effective: Effective) -> bool:
    """DeepSpeed's own kernels work in place; an Adam of torch's, or one that the script brings, does not."""
    name = effective.optimizer
    if name in ("adam", "adamw"):
        return effective.get("optimizer.params.torch_adam") is not True
    return name in ("lion", "lamb", "cpuadam", "deepspeedcpuadam")


def _states(effective: Effective) -> int:
    """Bytes of optimizer state for a parameter. An optimizer that is not known counts as Adam."""
    name = effective.optimizer or "adam"
    if name == "sgd":
        return 4 if effective.get("optimizer.params.momentum") else 0
    if name in ("lion", "adagrad", "rmsprop", "muon"):
        return 4
    low = effective.get("bf16.bf16_optimizer_states") is True
    low = low or effective.get("optimizer.params.fp32_optimizer_states") is False
    return 4 if low else 8


def _count(value: object, default: int, *, least: int = 1) -> int:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    return int(value) if usable and least <= value < 2**63 else default  # type: ignore[call-overload, operator]
