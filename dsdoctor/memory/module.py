"""The inventory of a live `torch.nn.Module`: sizes as they are, tied parameters once, partitioned ones in full."""

from __future__ import annotations

from typing import Any

from dsdoctor.memory import hf_config
from dsdoctor.memory.inventory import DTYPE_BYTES, Inventory
from dsdoctor.memory.parameter import Parameter
from dsdoctor.memory.shape import Shape


def of_module(module: Any) -> Inventory:
    """The parameters of a module. Works for meta tensors and for models built under `zero.Init` too.

    DeepSpeed's own estimators count nothing for those: they go by addresses and by `numel()`, which are 0 there.
    """
    parameters = tuple(
        Parameter(
            name=name,
            elements=_elements(one),
            trainable=bool(one.requires_grad),
            loaded=DTYPE_BYTES.get(str(one.dtype).removeprefix("torch."), 4.0),
            expert=getattr(one, "allreduce", True) is False,
        )
        for name, one in module.named_parameters()
    )
    return Inventory(
        parameters=parameters,
        name=type(module).__name__,
        source="the live model",
        tied=_tied(module),
        partitioned=any(hasattr(one, "ds_numel") for one in module.parameters()),
        shape=_shape(module),
        expert_parallel=max((int(getattr(one, "ep_size", 1) or 1) for one in module.modules()), default=1),
    )


def _shape(module: Any) -> Shape | None:
    """Of a Transformers model whose type the arithmetic knows."""
    config: Any = getattr(module, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(described, dict) or not hf_config.known(described):
        return None
    try:
        return hf_config.shape_of(described)
    except hf_config.NoShape:
        return None


def _tied(module: Any) -> int:
    """Elements of the largest parameter that has two names."""
    seen: set[int] = set()
    twice = [0]
    for _, one in module.named_parameters(remove_duplicate=False):
        if id(one) in seen and one.requires_grad:
            twice.append(_elements(one))
        seen.add(id(one))
    return max(twice)


def _elements(parameter: Any) -> int:
    """`zero.Init` leaves an empty tensor with the number in `ds_numel`."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())
