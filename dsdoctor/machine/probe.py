"""What torch and DeepSpeed say of this machine. Runs in a process of its own: it imports torch and DeepSpeed.

`python -m dsdoctor.machine.probe` reads a ds_config as JSON from stdin (`null` for none) and writes one JSON object to
stdout: fields of `MachineFacts` as plain values, and `errors` as pairs of probe and reason. What the libraries print
goes to stderr.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from dsdoctor.machine.ops import NeededOp, needed

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Collect, with the real stdout kept for the answer alone."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    config = json.load(sys.stdin)
    json.dump(collect(config), answer)
    answer.close()


def collect(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """All probes one after the other; one that fails leaves its reason in `errors` and the rest goes on."""
    facts: dict[str, Any] = {"versions": {}, "errors": []}
    for probe in (_torch, _devices, _accelerator):
        _attempt(facts, probe.__name__.strip("_"), probe)
    accelerator = facts.get("accelerator")
    if config is not None and accelerator is not None:
        _attempt(facts, "op builds", lambda: {"ops": [_op(op) for op in needed(config, accelerator)]})
    return facts


def _attempt(facts: dict[str, Any], name: str, probe: Callable[[], dict[str, Any]]) -> None:
    try:
        found = probe()
    except Exception as error:
        facts["errors"].append([name, f"{type(error).__name__}: {error}"[:500]])
        return
    facts["versions"].update(found.pop("versions", {}))
    facts.update(found)


def _torch() -> dict[str, Any]:
    import torch

    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = str(torch.version.cuda)
    if getattr(torch.version, "hip", None):
        versions["hip"] = str(torch.version.hip)
    if torch.version.cuda and torch.distributed.is_nccl_available():
        version: Any = torch.cuda.nccl.version
        versions["nccl"] = ".".join(map(str, version()))
    return {"versions": versions}


def _devices() -> dict[str, Any]:
    """Devices that torch can use. Counting them opens no context; asking for free memory does."""
    import torch

    if not torch.cuda.is_available():
        return {"devices": []}
    return {"devices": [_device(index) for index in range(torch.cuda.device_count())]}


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "index": index,
        "uuid": str(getattr(properties, "uuid", "")),
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "total_bytes": total,
        "free_bytes": free,
    }


def _accelerator() -> dict[str, Any]:
    """The accelerator that DeepSpeed picks here, and the precisions that it takes."""
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()
    return {
        "accelerator": chosen.device_name(),
        "backend": chosen.communication_backend_name(),
        "bf16": bool(chosen.is_bf16_supported()),
        "fp16": bool(chosen.is_fp16_supported()),
    }


def _op(op: NeededOp) -> dict[str, Any]:
    """What the builder of one op says. `installed` is read from the record that DeepSpeed's own build left."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops

    builder_class = get_accelerator().get_op_builder(op.builder)
    if builder_class is None or builder_class.__name__ == "NotImplementedBuilder":
        name = op.builder.removesuffix("Builder")
        return {"name": name, "needed_by": op.needed_by, "compatible": False, "implemented": False, "missing": []}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        builder = builder_class()
        try:
            compatible, raised = bool(builder.is_compatible(verbose=True)), ""
        except Exception as error:
            compatible, raised = False, f"{type(error).__name__}: {error}"
    return {
        "name": builder.NAME,
        "needed_by": op.needed_by,
        "compatible": compatible,
        "installed": bool(installed_ops.get(builder.NAME, False)),
        "missing": _missing_tools(builder),
        "problem": "\n".join(part for part in (raised, _ANSI.sub("", printed.getvalue()).strip()) if part)[:2000],
    }


def _missing_tools(builder: Any) -> list[str]:
    """What a build on first use needs and does not find: ninja and the host compiler; for CUDA sources the toolkit."""
    from torch.utils.cpp_extension import CUDA_HOME

    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in ("ninja", compiler) if shutil.which(tool.split()[0]) is None]
    is_cuda = any(base.__name__ == "CUDAOpBuilder" for base in type(builder).__mro__)
    if is_cuda and CUDA_HOME is None and _cuda_sources(builder):
        missing.append("CUDA_HOME")
    return missing


def _cuda_sources(builder: Any) -> bool:
    """Whether the op has device code: without it the builder falls back to a build for the host."""
    return any(str(source).endswith(".cu") for source in builder.sources())


if __name__ == "__main__":
    main()
