"""What the callbacks of all trainers share: attach when training begins, detach when it ends."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsdoctor.finding import FirstBad
    from dsdoctor.numerics import Detector


class Watching:
    """A detector between `begin` and `end`; `options` are those of `dsdoctor.attach`.

    `first_bad` outlives the detector. `stop` asks the trainer to end the run after the step of a hit.
    """

    def __init__(self, *, stop: bool, options: dict[str, Any]) -> None:
        self.detector: Detector | None = None
        self._stop = stop
        self._options = options

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value of this rank."""
        return self.detector.first_bad if self.detector is not None else None

    @property
    def wants_to_stop(self) -> bool:
        """Whether the trainer should end the run."""
        return self._stop and self.first_bad is not None

    def begin(self, model: Any) -> None:
        """Attach to the engine that trains the model, or to the model where none does."""
        from dsdoctor.numerics import attach

        self.end()
        self.detector = attach(engine_of(model) or model, **self._options)

    def end(self) -> None:
        """Detach. A second call does nothing."""
        if self.detector is not None:
            self.detector.detach()


def engine_of(model: Any) -> Any:
    """DeepSpeed's engine around a model, or None. Trainers hand their callbacks the model alone."""
    deepspeed = sys.modules.get("deepspeed")
    kind = getattr(deepspeed, "DeepSpeedEngine", None)
    if kind is None or isinstance(model, kind):
        return model if kind is not None else None
    engines = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind))
    return next((engine for engine in engines if getattr(engine, "module", None) is model), None)
