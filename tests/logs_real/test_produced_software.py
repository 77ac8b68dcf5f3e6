"""What is said of builds, checkpoints, disks, memory and settings that went wrong under real DeepSpeed."""

import pytest

from dsdoctor.analysis import analyze_log
from tests.logs_real.produce_software import FOLDER, RECIPES

ROOTS = {
    "periodic-long": None,
    "t5": "numerics/bf16-model-in-fp16",
    "stage-zero": "version/known-defect",
    "autocast": "version/known-defect",
    "host-limit": "memory/host-oom-kill",
    "no-headers": "build/compiler",
    "no-ninja": "build/compiler",
    "no-toolkit": "build/cuda-home",
    "stale-lock": "build/jit-lock",
    "cut-shard": "checkpoint/missing-shards",
    "incomplete": "checkpoint/missing-shards",
    "mixed": "checkpoint/zero-to-fp32",
    "mixed-large": "checkpoint/zero-to-fp32",
    "file-limit": "disk/full",
    "no-nvme-path": "nvme/swap",
    "key-twice": "config/duplicate-key",
    "removed-section": "config/removed",
    "refused-value": "config/refused-value",
    "asks": "script/reads-input",
    "two-optimizers": "config/refused-by-framework",
}
"""The one root of severity error or warning of each log; None where there is none."""
DECISIVE = {
    "t5": "already at minimum",
    "stage-zero": "zero_optimization.stage: 0",
    "autocast": 'torch_autocast.dtype: "float16"',
    "host-limit": "can't allocate memory",
    "no-headers": "fatal error: Python.h",
    "no-ninja": "ninja not being installed",
    "no-toolkit": "CUDA_HOME",
    "cut-shard": "PytorchStreamReader",
    "incomplete": "found 1 files",
    "mixed": "zero_to_fp32.py",
    "mixed-large": "something is wrong",
    "file-limit": "unexpected pos",
    "no-nvme-path": "nvme_path",
    "key-twice": "Duplicate keys",
    "removed-section": "AMP integration has been removed",
    "refused-value": "beta",
    "asks": "EOF",
    "two-optimizers": "You cannot specify an optimizer in the config file",
}
"""A piece of the line that decides, as the program printed it."""


@pytest.mark.parametrize("name", ROOTS)
def test_produced_log(name):
    analysis = analyze_log(FOLDER / f"{name}.log")
    assert not analysis.broken
    roots = [f.id for f in analysis.findings if f.role == "root" and f.severity != "info"]
    assert roots == ([ROOTS[name]] if ROOTS[name] else [])
    shown = " ".join(evidence.text for finding in analysis.findings[:1] for evidence in finding.evidence)
    assert DECISIVE.get(name, "") in shown


def test_two_thousand_steps_probe_once_a_window():
    """DeepSpeed's own counter, in its last line about progress, and the settings that the job gave."""
    path = FOLDER / "periodic-long.log"
    counted = [line for line in path.read_text(encoding="utf-8").splitlines() if "skipped=" in line][-1]
    scale = analyze_log(path).to_dict()["loss_scale"]
    assert scale["skipped"] == int(counted.partition("skipped=")[2].partition(",")[0])
    assert scale["steps_seen"] == 2400


def test_every_recipe_has_its_log_and_its_expectation():
    names = {recipe.name for recipe in RECIPES}
    assert names == set(ROOTS)
    assert names == {path.stem for path in FOLDER.glob("*.log")}
