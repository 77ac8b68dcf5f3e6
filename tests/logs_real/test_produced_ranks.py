"""What is said of processes that ended, ranks that waited and ZeRO-3 under real DeepSpeed (`produce_ranks.py`)."""

import pytest

from dsdoctor.analysis import analyze_log
from tests.logs_real.produce_ranks import FOLDER, RECIPES

ROOTS = {
    "abort": "launch/abort",
    "ds-abort": "launch/abort",
    "invalid-free": "launch/abort",
    "end-abort": None,
    "illegal": "launch/signal",
    "alarm": "launch/signal",
    "ds-terminated": "launch/cancelled",
    "monitored": "comm/stalled-rank",
    "tokenising": "comm/rank0-work-timeout",
    "privileged-port": "launch/port-in-use",
    "world-sizes": "launch/world-size-mismatch",
    "nobody-listens": "comm/unreachable",
    "gloo-interface": "comm/wrong-interface",
    "branch": "zero3/branch-hang",
    "experts": "zero3/moe-hang",
    "generates": "zero3/generate-hang",
    "gathers": "zero3/inflight-params",
    "replaced": "zero3/tied-or-resized",
    "device-map": "config/zero3-load-conflict",
    "goes-around": "autograd/direct-backward",
    "scalar-weight": "deepspeed/internal-error",
}
"""The one root of severity error or warning of each log; None where there is none."""
DECISIVE = {
    "abort": "(exitcode: -6)",
    "invalid-free": "double free or corruption",
    "illegal": "(exitcode: -4)",
    "monitored": "Rank 1 failed to pass monitoredBarrier",
    "tokenising": "Running tokenizer on dataset",
    "gloo-interface": "eth9",
    "privileged-port": "EACCES",
    "world-sizes": "dist_world_size=2",
    "generates": "Timed out waiting 6000ms",
    "gathers": "Cannot free a ZeRO-3 parameter",
    "scalar-weight": "self.dim() cannot be 0",
    "experts": "op.preamble.length",
    "device-map": "device_map",
}
"""A piece of a line that decides, as the program printed it."""


@pytest.mark.parametrize("name", ROOTS)
def test_produced_log(name):
    analysis = analyze_log(FOLDER / f"{name}.log")
    assert not analysis.broken
    roots = [f.id for f in analysis.findings if f.role == "root" and f.severity != "info"]
    assert roots == ([ROOTS[name]] if ROOTS[name] else [])
    shown = " ".join(evidence.text for finding in analysis.findings[:1] for evidence in finding.evidence)
    assert DECISIVE.get(name, "") in shown


def test_every_recipe_has_its_log_and_its_expectation():
    names = {recipe.name for recipe in RECIPES}
    assert names == set(ROOTS)
    assert names == {path.stem for path in FOLDER.glob("*.log")}
