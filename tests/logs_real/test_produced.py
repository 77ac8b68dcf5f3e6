"""What is said of logs that real DeepSpeed, torchrun and Transformers printed (`produce.py` makes them anew)."""

import re

import pytest

from dsdoctor.analysis import analyze_log
from tests.logs_real.produce import PRODUCED, RECIPES

NOTHING = None
ROOTS = {
    "warmup": NOTHING,
    "periodic": NOTHING,
    "collapse": "loss-scale/collapse",
    "thrash": "loss-scale/thrash",
    "static": "loss-scale/static",
    "no-zero-collapse": "loss-scale/collapse",
    "hidden": "loss-scale/hidden",
    "exploding": "numerics/nan-loss",
    "bf16-skips": "numerics/nan-loss",
    "bf16-silent": "numerics/silent-skip",
    "underflow": "numerics/underflow",
    "offload": NOTHING,
    "no-fp16": "numerics/dtype-unsupported",
    "healthy": NOTHING,
    "healthy-zero3": NOTHING,
    "batch-size": "config/batch-size",
    "unknown-key": "config/unknown-key",
    "wrong-type": "config/wrong-type",
    "both-precisions": "config/conflict",
    "auto-clipping": "config/auto-unresolved",
    "auto-batch": "config/auto-unresolved",
    "no-config": "config/syntax",
    "untested-optimizer": "config/untested-optimizer",
    "own-exception": "launch/user-exception",
    "bogus-size": "memory/bogus-allocation",
    "segfault": "launch/segfault",
    "kill": "memory/host-oom-kill",
    "bus": "memory/shm-exhausted",
    "stuck": "comm/timeout",
    "uneven": "hang/uneven-batches",
    "mismatch": "comm/collective-mismatch",
    "weight-outside": "zero3/empty-weights-in-model",
    "second-model": "zero3/module-outside-engine",
    "empty-file": "zero3/empty-weights-in-checkpoint",
    "no-grad": "autograd/no-grad",
    "reduced-twice": "autograd/reduced-twice",
    "recompute": "autograd/recompute-mismatch",
    "full-disk": "disk/full",
    "no-device": "environment/no-device",
    "offline": "environment/offline",
    "trainer": NOTHING,
    "trainer-nan": "numerics/loss-zero-is-nan",
    "trainer-nan-shown": "numerics/nan-loss",
    "trainer-mismatch": "config/hf-mismatch",
    "no-launcher": "launch/launcher-missing",
    "alone": "comm/missing-rank",
    "no-such-host": "comm/name-resolution",
    "port-taken": "launch/port-in-use",
    "other-world": "checkpoint/world-size",
    "no-such-tag": "checkpoint/missing-shards",
    "hangup": "launch/sighup",
    "cancelled": "launch/cancelled",
    "ds-healthy": NOTHING,
    "ds-own-exception": "launch/user-exception",
    "ds-kill": "memory/host-oom-kill",
    "ds-strict": "launch/local-rank-mismatch",
    "ds-hostfile": "launch/ssh-or-hostfile",
}
"""The one root of severity error or warning of each log; the others are then free of it."""
NOTED = {"warmup": "loss-scale/warmup", "periodic": "loss-scale/periodic"}
SKIPPED = {"collapse": 17, "thrash": 13, "static": 30, "no-zero-collapse": 60, "bf16-silent": 3}
"""Skipped steps as DeepSpeed's own counter, or the job's own plan of them, has it."""


@pytest.mark.parametrize("name", ROOTS)
def test_produced_log(name):
    analysis = analyze_log(PRODUCED / f"{name}.log")
    assert not analysis.broken
    roots = [f.id for f in analysis.findings if f.role == "root" and f.severity != "info"]
    assert roots == ([ROOTS[name]] if ROOTS[name] else [])
    if roots:
        assert analysis.findings[0].id == ROOTS[name]
    if name in NOTED:
        assert NOTED[name] in [finding.id for finding in analysis.findings]
    if name in SKIPPED:
        assert analysis.to_dict()["loss_scale"]["skipped"] == SKIPPED[name]


def test_every_recipe_has_its_log_and_its_expectation():
    names = {recipe.name for recipe in RECIPES}
    assert names == set(ROOTS)
    assert names == {path.stem for path in PRODUCED.glob("*.log")}


@pytest.mark.parametrize("path", sorted(PRODUCED.rglob("*.log")), ids=lambda path: path.stem)
def test_logs_are_small_and_neutral(path):
    text = path.read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert not re.search(r"/tmp/|/root/", text)
    assert all(stamp == "2026-01-05" for stamp in re.findall(r"\b20\d\d-\d\d-\d\d", text))
