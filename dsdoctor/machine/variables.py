"""The environment variables that change how a training job runs, with values only where those are harmless."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SHOWN = re.compile(
    r"(CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|LAUNCH_BLOCKING|HOME|PATH|MODULE_LOADING)|NVIDIA_VISIBLE_DEVICES"
    r"|(TORCH_)?NCCL_\w+|GLOO_\w+|TORCH_(EXTENSIONS_DIR|CUDA_ARCH_LIST|DISTRIBUTED_DEBUG)|PYTORCH_(CUDA_)?ALLOC_CONF"
    r"|MASTER_(ADDR|PORT)|RANK|WORLD_SIZE|LOCAL_(RANK|SIZE|WORLD_SIZE)|NODE_RANK"
    r"|(OMP|MKL|OPENBLAS)_NUM_THREADS|MAX_JOBS|CXX|CC|LD_LIBRARY_PATH"
    r"|DS_\w+|DEEPSPEED_\w+|ACCELERATE_\w+|(HF_HUB|TRANSFORMERS|HF_DATASETS)_OFFLINE|HF_HOME"
    r"|SLURM_(JOB_ID|NTASKS|NNODES|PROCID|LOCALID|MEM_PER_NODE|CPUS_PER_TASK))"
)
_HIDDEN = re.compile(r"HF_TOKEN|WANDB_\w+|https?_proxy|HTTPS?_PROXY|LD_PRELOAD|PYTHONPATH|KUBERNETES_SERVICE_HOST")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL")


def select(environment: Mapping[str, str]) -> dict[str, str]:
    """What matters of an environment, sorted by name; a value that might be private reads `(set)`.

    >>> select({"MASTER_PORT": "29500", "HF_TOKEN": "hf_x", "DS_API_KEY": "y", "EDITOR": "ed"})
    {'DS_API_KEY': '(set)', 'HF_TOKEN': '(set)', 'MASTER_PORT': '29500'}
    """
    chosen = {}
    for name in sorted(environment):
        if _SHOWN.fullmatch(name):
            chosen[name] = "(set)" if _SECRET.search(name) else environment[name]
        elif _HIDDEN.fullmatch(name):
            chosen[name] = "(set)"
    return chosen
