"""What is said of processes that ended, ranks that waited and ZeRO-3 under real DeepSpeed (`produce_ranks.py`)."""

import re

import pytest

from dsdoctor.analysis import analyze_log
from dsdoctor.diagnoses import (
    autograd,
    comm,
    disagreement,
    first_collective,
    generation,
    hang,
    hardware,
    internal,
    launch,
    network,
    raised,
    rendezvous,
    shared_memory,
    signals,
    stopped,
    watchdog,
    zero3,
    zero3_hangs,
)
from tests.logs_real import test_produced
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
    "nobody-listens": "comm/unreachable",
    "gloo-interface": "comm/wrong-interface",
    "branch": "zero3/branch-hang",
    "experts": "zero3/moe-hang",
    "replaced": "zero3/tied-or-resized",
    "device-map": "config/zero3-load-conflict",
    "goes-around": "autograd/direct-backward",
}
"""The one root of severity error or warning of each log; None where there is none."""
DECISIVE = {
    "abort": "(exitcode: -6)",
    "invalid-free": "double free or corruption",
    "illegal": "(exitcode: -4)",
    "monitored": "Rank 1 failed to pass monitoredBarrier",
    "tokenising": "Running tokenizer on dataset",
    "gloo-interface": "eth9",
    "experts": "op.preamble.length",
    "device-map": "device_map",
}
"""A piece of a line that decides, as the program printed it."""
FAMILIES = (
    autograd,
    comm,
    disagreement,
    first_collective,
    generation,
    hang,
    hardware,
    internal,
    launch,
    network,
    raised,
    rendezvous,
    shared_memory,
    signals,
    stopped,
    watchdog,
    zero3,
    zero3_hangs,
)
CONSEQUENCE = ("launch/peer-failure",)
"""It is in many of the produced logs, and never the root."""
NOT_PRODUCED = {
    "autograd/attention-dtype": "flash attention runs on GPUs only",
    "comm/failed-step": "only the communication check says it, no log",
    "comm/ib-error": "needs InfiniBand",
    "comm/nccl-error": "needs a GPU",
    "comm/p2p-hang": "needs two GPUs of one machine",
    "comm/wrong-value": "only the communication check says it, no log",
    "cuda/device-assert": "needs a GPU",
    "cuda/illegal-access": "needs a GPU",
    "hang/slow-not-hung": "its steps take more than a minute each: five lines after five minutes of waiting",
    "hang/stalled-rank": "only the stacks of a run say it, no log",
    "hardware/gpu-fault": "needs a GPU that fails",
    "launch/killed": "only the counters of a run tell it from a lack of memory",
    "version/rank-mismatch": "needs two installed releases of torch or NCCL",
}
OUTSTANDING = (
    "deepspeed/internal-error",
    "launch/world-size-mismatch",
    "zero3/generate-hang",
    "zero3/inflight-params",
)
"""A CPU can show these, and no log of them has been produced yet; written ones stand in `written/`."""


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


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.log")), ids=lambda path: path.stem)
def test_logs_are_small_and_neutral(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert not re.search(r"/tmp/|/root/", text)
    assert all(stamp == "2026-01-05" for stamp in re.findall(r"\b20\d\d-\d\d-\d\d", text))


def test_each_diagnosis_has_a_log_or_a_reason():
    known = {diagnosis.id for family in FAMILIES for diagnosis in family.DIAGNOSES}
    produced = {*ROOTS.values(), *test_produced.ROOTS.values()}
    without = {*NOT_PRODUCED, *OUTSTANDING}
    assert not known - produced - without - set(CONSEQUENCE)
    assert not without & produced
    assert without <= known
