"""Accelerate: attach to what `accelerator.prepare` returned, whatever trains it.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with dsdoctor.integrations.accelerate.attach(accelerator, model): ...
"""

from __future__ import annotations

from typing import Any

from dsdoctor.integrations.callbacks import engine_of
from dsdoctor.numerics import Detector
from dsdoctor.numerics import attach as attach_to


def attach(accelerator: Any, model: Any, **options: Any) -> Detector:
    """Watch a prepared model: DeepSpeed's engine where Accelerate made one, else the module inside its wrappers.

    `options` are those of `dsdoctor.attach`.
    """
    engine = engine_of(model)
    return attach_to(engine if engine is not None else accelerator.unwrap_model(model), **options)
