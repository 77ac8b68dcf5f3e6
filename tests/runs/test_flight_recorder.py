"""The variable by which torch's flight recorder is switched on, over the releases of torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from dsdoctor.runs import flight_recorder
from dsdoctor.runs.flight_recorder import recording

RECORDS = """
import json, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]))
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    flight_recorder._variables.cache_clear()
    yield
    flight_recorder._variables.cache_clear()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('max_entries_ = getCvarInt({"TORCH_NCCL_TRACE_BUFFER_SIZE"}, 0);', "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        (
            'max_entries_ = getCvarInt(\n        {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}, 2000);',
            "TORCH_FR_BUFFER_SIZE",
        ),
        (None, "TORCH_NCCL_TRACE_BUFFER_SIZE"),
    ],
)
def test_the_header_of_torch_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, line: str | None, name: str
) -> None:
    """Lines of torch 2.5 and 2.13; releases before 2.5 have no such header."""
    header = tmp_path / flight_recorder._HEADER
    header.parent.mkdir(parents=True)
    if line is not None:
        header.write_text(f"  FlightRecorder() {{\n    {line}\n")
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert recording({}) == {name: "2000"}
    assert recording({"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}) == {}


def test_the_installed_torch_records_and_does_not_complain() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RECORDS], env=recording({}), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "1\n"
    assert "deprecated" not in done.stderr
