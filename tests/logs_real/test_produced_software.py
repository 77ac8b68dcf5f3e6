"""What is said of builds and memory that went wrong under real DeepSpeed (`produce_software.py`)."""

import re

import pytest

from dsdoctor.analysis import analyze_log
from dsdoctor.diagnoses import (
    build,
    checkpoint,
    environment,
    known_defects,
    loss_scale,
    loss_scale_hidden,
    loss_scale_trouble,
    memory,
    memory_host,
    memory_request,
    numerics,
    numerics_precision,
    numerics_unseen,
    speed,
    storage,
    version,
)
from tests.logs_real import test_produced
from tests.logs_real.produce_software import FOLDER, RECIPES

ROOTS = {
    "host-limit": "memory/host-oom-kill",
    "no-headers": "build/compiler",
    "no-ninja": "build/compiler",
    "no-toolkit": "build/cuda-home",
    "stale-lock": "build/jit-lock",
    "no-nvme-path": "nvme/swap",
}
"""The one root of severity error or warning of each log."""
DECISIVE = {
    "host-limit": "can't allocate memory",
    "no-headers": "fatal error: Python.h",
    "no-ninja": "ninja not being installed",
    "no-toolkit": "CUDA_HOME",
    "no-nvme-path": "nvme_path",
}
"""A piece of the line that decides, as the program printed it."""


FAMILIES = (
    build,
    checkpoint,
    environment,
    known_defects,
    loss_scale,
    loss_scale_hidden,
    loss_scale_trouble,
    memory,
    memory_host,
    memory_request,
    numerics,
    numerics_precision,
    numerics_unseen,
    speed,
    storage,
    version,
)
NOT_PRODUCED = {
    "build/cuda-mismatch": "needs a torch that is built for CUDA, whose version is compared",
    "build/op-attribute": "the destructor of the tested release has that fault no more",
    "build/op-unavailable": "only the machine's facts say it, no log",
    "build/stale-extension": "needs two releases of DeepSpeed or torch that share a cache",
    "checkpoint/zero-to-fp32": "a CPU can show it; the log is still to be made",
    "environment/cannot-import": "only the machine's facts say it, no log",
    "environment/cpu-only": "only the machine's facts say it, no log",
    "environment/low-memlock": "only the machine's facts say it, no log",
    "environment/small-shm": "only the machine's facts say it, no log",
    "memory/allocator-pressure": "only the allocator of a GPU warns so",
    "memory/gpu-oom-init": "needs a GPU",
    "memory/gpu-oom-step": "needs a GPU",
    "numerics/bad-input": "only the detector says it, no log",
    "numerics/bf16-model-in-fp16": "a CPU can show it; the log is still to be made",
    "numerics/overlap-comm-race": "a race between two streams of a GPU",
    "numerics/reduction-overflow": "only the detector says it, no log",
    "numerics/zero-gradients": "the tested release skips such a step; 0.19.6 and older assert",
    "speed/offload-bound": "forward and backward have to run on a GPU while Adam runs on the CPU",
    "version/incompatible": "needs two libraries that do not go together",
    "version/known-defect": "a CPU can show it; the log is still to be made",
}


@pytest.mark.parametrize("name", ROOTS)
def test_produced_log(name):
    analysis = analyze_log(FOLDER / f"{name}.log")
    assert not analysis.broken
    roots = [f.id for f in analysis.findings if f.role == "root" and f.severity != "info"]
    assert roots == [ROOTS[name]]
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
    produced = {*ROOTS.values(), *test_produced.ROOTS.values(), *test_produced.NOTED.values()}
    assert not known - produced - set(NOT_PRODUCED)
    assert not set(NOT_PRODUCED) & produced
    assert set(NOT_PRODUCED) <= known
