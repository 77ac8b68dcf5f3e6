"""Every cause class on real DeepSpeed with two ranks: many cases in one pair of processes.

The whole matrix is run by hand, `pytest -m full tests/numerics/test_first_bad.py`, and leaves its result in
tests/results/first_bad.md.
"""

from __future__ import annotations

import platform
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.finding import PHASES
from tests.numerics.cases import CASES, STAGES, Case
from tests.numerics.launching import launched

pytest.importorskip("deepspeed")

RESULTS = Path(__file__).parents[1] / "results" / "first_bad.md"
MODES = ("frames", "auto")


def faults(case: Case, name: str, key: str, ranks: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the hits of one case, in words."""
    stage, _, mode = key.split(":")
    wrong = [f"rank {rank}: {text}" for rank, one in enumerate(ranks) for text in one[key]["problems"]]
    hits = [one[key]["hits"] for one in ranks]
    if not all(len(hit) == 1 for hit in hits):
        return [
            *wrong,
            f"hits on the ranks: {[len(hit) for hit in hits]}, errors {[one[key]['error'] for one in ranks]}",
        ]
    seen = [hit[0][0] for hit in hits]
    found = min(seen, key=lambda bad: (bad["step"], bad["micro_step"], PHASES.index(bad["phase"]), bad["rank"]))
    if case.first_rank is not None and found["rank"] != case.first_rank:
        wrong.append(f"rank {found['rank']} was first, not {case.first_rank}")
    expected = {"cause": name, **case.expected}
    if mode == "auto":
        expected = {key: value for key, value in expected.items() if key not in case.open_in_auto(int(stage))}
    wrong += [f"{key} is {found[key]!r}, not {value!r}" for key, value in expected.items() if found[key] != value]
    return wrong


def test_some_cases(tmp_path: Path) -> None:
    keys = ["2:bad-input:frames", "3:bad-input:frames", "0:domain:auto", "3:overflow:frames", "2:overflow:auto"]
    keys += ["3:domain:auto", "0:reduction-overflow:frames"]
    ranks = launched("tests.numerics.ranks", tmp_path, keys, 200)
    wrong = {key: faults(CASES[name], name, key, ranks) for key in keys for name in [key.split(":")[1]]}
    assert wrong == {key: [] for key in keys}
    # the other rank sees the bad batch of rank 1 only after the reduction, later in the same step
    assert ranks[0]["2:bad-input:frames"]["hits"][0][0]["phase"] == "reduction"


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_cause_class_at_every_stage(tmp_path: Path) -> None:
    keys = [
        f"{stage}:{name}:{mode}"
        for mode in MODES
        for name, case in CASES.items()
        for stage in STAGES
        if stage not in case.impossible
    ]
    ranks = launched("tests.numerics.ranks", tmp_path, keys, 800)
    wrong = {key: faults(CASES[name], name, key, ranks) for key in keys for name in [key.split(":")[1]]}
    RESULTS.write_text(_page(wrong, ranks[0]))
    assert {key: text for key, text in wrong.items() if text} == {}


def _page(wrong: dict[str, list[str]], rank: dict[str, Any]) -> str:
    import deepspeed
    import torch

    lines = [
        "# Cause classes on real DeepSpeed",
        "",
        f"Written by `pytest -m full tests/numerics/test_first_bad.py` on {date.today()}:",
        f"Python {platform.python_version()}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, "
        "2 ranks over gloo on the CPU.",
        "`frames` is a frame for every module in every batch, `auto` the always-on watch and a second run after a hit.",
        "",
        "| cause | " + " | ".join(f"ZeRO {stage} {mode}" for mode in MODES for stage in STAGES) + " |",
        "|---|" + "---|" * (len(MODES) * len(STAGES)),
    ]
    reasons = []
    for name, case in CASES.items():
        cells = []
        for mode in MODES:
            for stage in STAGES:
                found = wrong.get(f"{stage}:{name}:{mode}")
                cells.append("—" if found is None else "; ".join(found) or "right")
        reasons += [f"- {name} at ZeRO {stage}: {why}" for stage, why in case.impossible.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(["Where a class cannot occur:", "", *reasons] if reasons else [])]).rstrip() + "\n"
