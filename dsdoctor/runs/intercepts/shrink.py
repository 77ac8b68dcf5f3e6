"""`--shrink`: Hugging Face models with fewer layers, for a run where the whole model does not fit without ZeRO.

The config that a model is built from says how many layers it has; it is changed right before the model reads it.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from dsdoctor.runs.imports import ImportHooks
from dsdoctor.runs.session import RankSession

LAYERS = 2
_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
"""What the configs of model families call a number of layers."""


def install(session: RankSession, hooks: ImportHooks) -> None:
    if session.spec.shrink:
        hooks.after_import("transformers.modeling_utils", lambda module: _shrink_models(session, module))


def _shrink_models(session: RankSession, module: ModuleType) -> None:
    """Every model hands its config to this constructor before it makes its layers."""
    kind = module.PreTrainedModel
    original = kind.__init__

    @functools.wraps(original)
    def init(this: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with session.guard("shrink the model"):
            shrink(config, session.note)
        original(this, config, *args, **kwargs)

    session.patch(kind, "__init__", init)


def shrink(config: Any, note: Any) -> None:
    """Lower the numbers of layers in a Hugging Face config, and in the configs inside it, to `LAYERS`.

    Lists with one entry a layer (the kind of attention of each, say) are cut to fit. `note` is told what changed.
    """
    values = vars(config)
    for name in [name for name in _COUNTS if isinstance(values.get(name), int) and values[name] > LAYERS]:
        before = values[name]
        setattr(config, name, LAYERS)
        for key, value in values.items():
            if isinstance(value, list) and len(value) == before:
                setattr(config, key, value[:LAYERS])
        note(f"--shrink: {type(config).__name__}.{name} is {LAYERS} in place of {before}")
    for inner in [value for value in values.values() if hasattr(value, "to_dict") and hasattr(value, "model_type")]:
        shrink(inner, note)
