"""A frozen base with low-rank adapters, as PEFT builds them, on real DeepSpeed with two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsdoctor.finding import PHASES
from tests.numerics.cases import STAGES
from tests.numerics.launching import launched

pytest.importorskip("deepspeed")

MIDDLE = "base_model.layers.1"
EXPECTED: dict[str, dict[str, Any]] = {
    "adapter-weight": {"phase": "parameter", "module": f"{MIDDLE}.lora_b", "cause": "corrupted-weights"},
    "base-weight": {"phase": "parameter", "module": f"{MIDDLE}.base", "cause": "corrupted-weights"},
    "adapter-forward": {"phase": "forward", "module": f"{MIDDLE}.act", "op": "aten.log", "cause": "domain"},
    "adapter-backward": {"phase": "backward", "module": f"{MIDDLE}.act", "cause": "backward-singularity"},
}
BY_BLOCK = ("module", "op", "cause")
"""What the always-on watch leaves open of a forward that one rank cannot run again, and of a backward."""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_adapters_on_a_frozen_base(tmp_path: Path) -> None:
    keys = [
        f"{stage}:{types}:{fault}:{mode}"
        for stage in STAGES
        for types in ("bf16", "mixed")
        for fault in ("none", *EXPECTED)
        for mode in ("frames", "auto")
    ]
    ranks = launched("tests.numerics.adapters", tmp_path, keys, 500)
    for key in keys:
        stage, _, fault, mode = key.split(":")
        seen = [rank[key] for rank in ranks]
        assert [(one["problems"], one["warnings"]) for one in seen] == [([], [])] * 2, key
        if fault == "none":
            assert [(one["hits"], one["error"]) for one in seen] == [([], None)] * 2, key
            continue
        assert [len(one["hits"]) for one in seen] == [1, 1], (key, seen)
        # a bad shard of ZeRO-3 is the weight on the rank that holds it, and on the other what comes of it
        found = min((one["hits"][0] for one in seen), key=lambda bad: (bad["step"], PHASES.index(bad["phase"])))
        expected = dict(EXPECTED[fault])
        if mode == "auto" and (expected["phase"] == "backward" or (stage == "3" and fault == "adapter-forward")):
            assert found["module"].startswith(MIDDLE), (key, found)
            expected = {name: value for name, value in expected.items() if name not in BY_BLOCK}
        assert {name: found[name] for name in expected} == expected, (key, found)
