"""The data loader that DeepSpeed makes of `training_data`: same sampler, order, batches and workers.

Runs in rank processes only (imports torch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

WORKERS = 2
"""DeepSpeed's number of loader processes per rank. Kept, since each draws random numbers of its own."""


class PlainLoader:
    """Iterates a dataset in DeepSpeed's order: a fresh pass for each `iter()`, shuffled alike on every pass."""

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        shuffle: bool = True,
        sampler: Sampler[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = True,
        workers: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.data_sampler = sampler or DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.data_sampler,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            num_workers=WORKERS if workers is None else workers,
            drop_last=drop_last,
        )
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> PlainLoader:
        # Lazily, as in DeepSpeed: making the iterator draws a random number, and starts the workers.
        self._running = (batch for batch in self._loader)
        return self

    def __next__(self) -> Any:
        if self._running is None:
            iter(self)
        assert self._running is not None
        return next(self._running)
