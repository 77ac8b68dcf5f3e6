"""Which attributes DeepSpeed's engine has, so that a missing one can be told from a slip of the script.

Runs in rank processes only (imports DeepSpeed). The class is taken at import, before anything stands in for it.
"""

from __future__ import annotations

import dis
from functools import cache
from inspect import isfunction

from deepspeed.runtime.engine import DeepSpeedEngine


@cache
def deepspeed_members() -> frozenset[str]:
    """Methods and class attributes of the engine, and whatever its methods store on an object."""
    stored = {
        step.argval
        for function in vars(DeepSpeedEngine).values()
        if isfunction(function)
        for step in dis.get_instructions(function)
        if step.opname == "STORE_ATTR"
    }
    return frozenset(dir(DeepSpeedEngine)) | stored
