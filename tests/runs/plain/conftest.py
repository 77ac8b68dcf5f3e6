"""A process group of this process alone, for tests that need an engine but no other rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from dsdoctor.runs.plain import process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rank 0 of 1, without a port; `deepspeed.comm` is left out, as nothing here calls it."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(process, "_open_deepspeed_comm", lambda backend: ())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
