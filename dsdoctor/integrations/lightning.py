"""Lightning: a callback for its Trainer, with the DeepSpeed strategy and without.

trainer = Trainer(..., callbacks=[NumericsCallback()])
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from dsdoctor.finding import FirstBad
from dsdoctor.integrations.callbacks import Watching


class NumericsCallback(Callback):  # type: ignore[misc]
    """Watches the training for the first non-finite value; the report goes to stderr, as with `dsdoctor.attach`.

    `stop` ends the training after the batch of a hit; the other options are those of `dsdoctor.attach`.
    """

    def __init__(self, *, stop: bool = False, **options: Any) -> None:
        self._watching = Watching(stop=stop, options=options)

    @property
    def first_bad(self) -> FirstBad | None:
        """The first non-finite value of this rank."""
        return self._watching.first_bad

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._watching.begin(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._watching.wants_to_stop:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._watching.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._watching.end()
