"""The detector of the first non-finite value. Imports torch only when one of its names is used.

attaching    `attach`; `drop_in` the class of Transformers by the same name
detector     the life of one detector: what it hears, in which order
watches      which hooks are on the model
  batches    one batch from the next        sentinel   blocks and gradients, recorded without waiting (ring, points,
  forward    a frame for every module                  compiled, readings)
  gradients  hooks on tensors               optimizers steps of a script without an engine
judging      micro-steps, by loss and gradients; `steps` optimizer steps, by what the engine says; `ledger` keeps order
replay       one module again, operation by operation; `again` a batch again, with frames; `causes` why;
             `outside` what the script computes after its model
publishing   from a certain suspicion to report and patch; `announcing` and `agreement`: which rank tells it
watchdog     steps that change nothing
examiner     keeps the step's batches; a bad one runs again on copies (`bench`): as it was, in fp32, and with remedies
             (`trying`: texts of `patch`, `guards`, `islands`); `anomaly` names a derivative; `examined` holds it all
repeating    a batch that is finite when it runs again, several times and ways; `repeats` says what that means
bundle       the batch on disk, for `replaying`; `selftest` plants faults
recording    the `numbers` of every tensor (`fingerprint`) on disk, for `comparing` two runs
headroom     values that come near a limit, and `underflow`: gradients that are `flushed` to zero
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsdoctor.numerics.attaching import attach
    from dsdoctor.numerics.detector import Detector
    from dsdoctor.numerics.drop_in import DebugUnderflowOverflow
    from dsdoctor.numerics.stats import detect_overflow

__all__ = ["DebugUnderflowOverflow", "Detector", "attach", "detect_overflow"]
_HOMES = {
    "DebugUnderflowOverflow": "drop_in",
    "Detector": "detector",
    "attach": "attaching",
    "detect_overflow": "stats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
