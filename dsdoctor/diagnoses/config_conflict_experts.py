"""Options of the ds_config that AutoEP, which spreads the experts of a model over the ranks, excludes."""

from __future__ import annotations

from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.dsconfig.effective import Effective

_EXPERTS = "expert_parallel"
_SIZE = f"{_EXPERTS}.autoep_size"
_TENSOR_SIZE = f"{_EXPERTS}.expert_tensor_parallel_size"
_ZERO = "zero_optimization"
_SINCE = "0.19.8"
"""Earlier releases check other things, in other words."""


def _spreads(config: Effective) -> bool:
    return config.get(f"{_EXPERTS}.enabled") is True


def _more_than_one(config: Effective, key: str) -> bool:
    size = config.get(key)
    return isinstance(size, int) and size > 1


def _stage_3(config: Effective) -> bool:
    groups = any(_more_than_one(config, key) for key in ("sequence_parallel_size", f"{_ZERO}.zero_hpz_partition_size"))
    quantized = config.get(f"{_ZERO}.zero_quantized_gradients") is True
    return _spreads(config) and config.stage == 3 and (groups or quantized)


def _does_not_divide(config: Effective, ranks: int) -> bool:
    size = config.get(_SIZE)
    return isinstance(size, int) and size > 0 and ranks % size != 0


def _folds(config: Effective) -> bool:
    """AutoEP together with AutoTP."""
    return _spreads(config) and _more_than_one(config, "tensor_parallel.autotp_size")


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        keys=("sequence_parallel_size", f"{_ZERO}.zero_hpz_partition_size", f"{_ZERO}.zero_quantized_gradients"),
        holds=_stage_3,
        cause="AutoEP at ZeRO stage 3 goes with no sequence parallelism, hpZ or quantized gradients",
        fix="drop them, or use stage 1 or 2",
        message=r"AutoEP with ZeRO Stage 3 does not support",
        since=_SINCE,
    ),
    Conflict(
        keys=(_SIZE,),
        holds=_spreads,
        ranks=_does_not_divide,
        cause="autoep_size does not divide the number of ranks",
        fix="give a size that does, or start another number of ranks",
        message=r"expert_parallel\.autoep_size \* expert_parallel\.expert_tensor_parallel_size",
        since=_SINCE,
    ),
    Conflict(
        keys=(_TENSOR_SIZE,),
        holds=lambda c: _spreads(c) and _more_than_one(c, _TENSOR_SIZE),
        cause="expert_tensor_parallel_size has to be 1; DeepSpeed does not split single experts yet",
        fix="drop expert_tensor_parallel_size",
        patch={_EXPERTS: {"expert_tensor_parallel_size": None}},
        message=r"expert_parallel\.expert_tensor_parallel_size=\d+ is reserved",
        since=_SINCE,
    ),
    Conflict(
        keys=("tensor_parallel.autotp_size", _SIZE),
        holds=lambda c: _folds(c) and not _more_than_one(c, _SIZE),
        cause="AutoEP together with AutoTP needs an autoep_size above 1",
        fix="give autoep_size, or drop expert_parallel",
        message=r"AutoEP\+AutoTP folding requires",
        since=_SINCE,
    ),
    Conflict(
        keys=("tensor_parallel.autotp_size", f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"),
        holds=lambda c: _folds(c) and (c.offload("optimizer") != "none" or c.offload("param") != "none"),
        cause="AutoEP together with AutoTP does not go with offloading",
        fix="drop the offload sections, or autotp_size",
        patch={_ZERO: {"offload_optimizer": None, "offload_param": None}},
        message=r"ZeRO optimizer/parameter offload with AutoEP\+AutoTP",
        since=_SINCE,
    ),
)
