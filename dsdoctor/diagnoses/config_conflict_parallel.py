"""Options of the ds_config that a pipeline, a mixture of experts, a number of ranks or a model excludes."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.facts import ScriptFacts

_ZERO = "zero_optimization"
_HPZ = f"{_ZERO}.zero_hpz_partition_size"
_SEQUENCE = "sequence_parallel_size"


def _pipeline(script: ScriptFacts) -> bool:
    return script.calls_any("PipelineModule")


def _deepspeed_experts(script: ScriptFacts) -> bool:
    """DeepSpeed's own layer; classes of that name in other packages are not told apart from a bare `MoE`."""
    return any(call.owner.startswith("deepspeed") for call in script.named("MoE"))


def _experts_need_buckets(config: Effective) -> bool:
    off = any(config.get(f"{_ZERO}.{name}") is False for name in ("contiguous_gradients", "reduce_scatter"))
    return config.stage == 2 and off


def _splits_unevenly(config: Effective, ranks: int) -> bool:
    size = config.get(_HPZ)
    return isinstance(size, int) and size > 1 and ranks % min(size, ranks) != 0


def _heads_do_not_split(config: Effective, model: ModelConfig) -> bool:
    """Ulysses deals the heads out to the ranks of a sequence, and key-value heads in whole or by copies."""
    size = config.get(_SEQUENCE)
    if not isinstance(size, int) or size <= 1 or model.heads is None:
        return False
    shared = model.kv_heads or model.heads
    return model.heads % size != 0 or (shared % size != 0 and size % shared != 0)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        keys=(f"{_ZERO}.stage",),
        holds=lambda c: c.stage >= 2,
        script=_pipeline,
        cause="pipeline parallelism goes with ZeRO stage 0 and 1 only",
        fix="use stage 1",
        patch={_ZERO: {"stage": 1}},
        message="ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    ),
    Conflict(
        keys=("managed_gradient_accumulation",),
        holds=lambda c: c.get("managed_gradient_accumulation") is False,
        script=_pipeline,
        cause="a pipeline works its own accumulation boundary out, so managed_gradient_accumulation has to be on",
        fix="drop managed_gradient_accumulation",
        patch={"managed_gradient_accumulation": None},
        message="managed_gradient_accumulation=False is not supported with pipeline parallelism",
        since="0.19.4",
    ),
    Conflict(
        keys=("steps_per_print", "wall_clock_breakdown"),
        holds=lambda c: c.get("steps_per_print") is None and c.get("wall_clock_breakdown") is True,
        script=_pipeline,
        cause="with wall_clock_breakdown a pipeline prints every steps_per_print steps, which is null by default, and "
        "calculates with it",
        fix="give steps_per_print",
        patch={"steps_per_print": 10},
        message=r"unsupported operand type\(s\) for %: 'int' and 'NoneType'",
        since="0.15.2",
    ),
    Conflict(
        keys=(f"{_ZERO}.overlap_comm",),
        holds=lambda c: c.stage == 1 and c.get(f"{_ZERO}.overlap_comm") is True,
        script=_pipeline,
        cause="a pipeline does not overlap communication; DeepSpeed switches overlap_comm off with a warning",
        fix="drop overlap_comm",
        severity="info",
    ),
    Conflict(
        keys=(f"{_ZERO}.contiguous_gradients", f"{_ZERO}.reduce_scatter"),
        holds=_experts_need_buckets,
        script=_deepspeed_experts,
        cause="DeepSpeed's experts need contiguous_gradients and reduce_scatter at stage 2",
        fix="leave both out: they are on by default",
        patch={_ZERO: {"contiguous_gradients": None, "reduce_scatter": None}},
        message=r"(?:Contiguous Gradients|Reduce Scatter) in ZeRO Stage 2 must be set to True for MoE",
    ),
    Conflict(
        keys=(f"{_ZERO}.stage",),
        holds=lambda c: c.stage == 3,
        script=_deepspeed_experts,
        cause="DeepSpeed's own MoE layer does not work at stage 3",
        fix="use stage 2",
        patch={_ZERO: {"stage": 2}},
        message="MoE (?:is )?not supported with (?:ZeRO )?Stage 3",
    ),
    Conflict(
        keys=(_HPZ,),
        holds=lambda c: c.stage == 3,
        ranks=_splits_unevenly,
        cause="zero_hpz_partition_size does not divide the number of ranks",
        fix="write the GPUs of one host",
        message=r"AssertionError: \d+ is not divisible by \d+",
    ),
    Conflict(
        keys=(_SEQUENCE,),
        holds=lambda _config: True,
        model=_heads_do_not_split,
        cause="sequence_parallel_size does not divide the attention heads of the model (or its key-value heads)",
        fix="choose a size that divides both",
        message=r"Attention head count \d+ is not divisible by SP size",
    ),
)
