"""Transformers: a callback for its Trainer, with DeepSpeed and without.

trainer = Trainer(..., callbacks=[NumericsCallback()])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from dsdoctor.finding import FirstBad
from dsdoctor.integrations.callbacks import Watching


class NumericsCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the training for the first non-finite value; the report goes to stderr, as with `dsdoctor.attach`.

    `stop` ends the training after the step of a hit; the other options are those of `dsdoctor.attach`.
    """

    def __init__(self, *, stop: bool = False, **options: Any) -> None:
        self._watching = Watching(stop=stop, options=options)

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value of this rank."""
        return self._watching.first_bad

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._watching.begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watching.wants_to_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._watching.end()
