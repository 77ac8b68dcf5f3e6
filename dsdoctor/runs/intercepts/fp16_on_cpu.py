"""fp16 on a CPU that DeepSpeed refuses it on: lifted inside this process, so that a run can be rehearsed."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dsdoctor.runs import run_config
from dsdoctor.runs.session import RankSession


def allow(session: RankSession, deepspeed: ModuleType, config: Mapping[str, Any]) -> None:
    """Let the CPU accelerator accept fp16 where the config asks for it; GPUs and other configs are left alone."""
    accelerator = deepspeed.accelerator.get_accelerator()
    if not run_config.asks_fp16(config) or accelerator.device_name() != "cpu" or accelerator.is_fp16_supported():
        return
    import torch

    kind = type(accelerator)
    supported = [*accelerator.supported_dtypes(), torch.float16]
    session.patch(kind, "is_fp16_supported", lambda _: True)
    session.patch(kind, "supported_dtypes", lambda _: supported)
    session.note(
        "DeepSpeed's refusal of fp16 on this CPU is lifted for this run: a rehearsal, "
        "which says nothing of the fp16 numerics of a GPU"
    )
