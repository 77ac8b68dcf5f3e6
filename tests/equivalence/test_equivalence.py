"""The plain engine trains as DeepSpeed does: ZeRO 0 to 3 in fp32, bf16 and fp16, each optimizer and each schedule.

Marker `full`: `pytest -m full tests/equivalence` runs the whole matrix in four pairs of ranks, a few minutes, and
writes `tests/results/equivalence.md`. A reduced set is in `tests/runs/plain/test_parity.py`.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.equivalence.cases import MICRO_STEPS, STAGES, configs, parts

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "results" / "equivalence.md"
TOLERANCE = {
    # Sums in another order, over 12 steps; DeepSpeed's own CPU kernels take Adam's quotient in another order too.
    "fp32": 2e-4,
    # A few units in the last place of a bf16 (2**-8) or fp16 (2**-11) weight or activation.
    "bf16": 4 * 2**-8,
    "fp16": 8 * 2**-11,
}
ACCUMULATED = 2.0
"""ZeRO 2 and 3 add up gradients that are averaged already, in the model's precision: one more rounding a micro-step."""
APART = {
    "zero0/fp16/*": "DeepSpeed's defect: fp16 without ZeRO never scales the loss (0.18.3 to 0.19.8)",
    "zero[123]/*/Adafactor": "ZeRO's flat vectors have no rows and columns, of which Adafactor keeps its statistics",
    "zero[123]/*/Lion (offloaded)": "DeepSpeed's defect: its CPU Lion moves a weight whose gradient is 0 by the rate",
}
"""Cases in which the two differ, each for a reason that is DeepSpeed's own."""
NOT_PLAYED = {"*/Muon": "the plain engine has no Muon, and the plain leg says so"}

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each of the two ranks saw, by case."""
    folder = tmp_path_factory.mktemp("equivalence")
    found: dict[str, list[dict[str, Any]]] = {}
    for stage in STAGES:
        out = folder / f"zero{stage}.json"
        printed = two_ranks(out, f"zero{stage}/")
        assert out.exists(), printed
        ranks = json.loads(out.read_text(encoding="utf-8"))
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    RESULTS.write_text(report(found), encoding="utf-8")
    return found


def two_ranks(out: Path, pattern: str) -> str:
    """Run the cases whose names begin so, and return what was printed last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Muon is compiled otherwise, which takes minutes and changes nothing that is looked at.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, str(Path(__file__).parent / "ranks.py"), str(out), pattern],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return done.stdout[-2000:] + done.stderr[-4000:]


def difference(ranks: list[dict[str, Any]]) -> float:
    """The largest relative difference of two losses, infinite where one is not finite and the other is."""
    pairs = [pair for rank in ranks for pair in zip(rank["deepspeed"]["losses"], rank["plain"]["losses"], strict=True)]
    scale = max(abs(a) for a, _b in pairs if math.isfinite(a)) / 50  # near 0 a relative difference means nothing
    return max(_apart(a, b, scale) for a, b in pairs)


def _apart(a: float, b: float, scale: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if str(a) == str(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), scale)


def reason(name: str, table: dict[str, str]) -> str:
    return next((text for pattern, text in table.items() if fnmatch.fnmatchcase(name, pattern)), "")


def outcome(name: str, ranks: list[dict[str, Any]]) -> str:
    """What became of a case, in words."""
    mine, theirs = ranks[0]["plain"].get("error"), ranks[0]["deepspeed"].get("error")
    if theirs:
        return f"DeepSpeed does not build it: {theirs}"
    if mine:
        return reason(name, NOT_PLAYED) or f"not played: {mine}"
    apart = difference(ranks)
    why = reason(name, APART)
    return f"{apart:.1e}" + (f" ({why})" if why else "")


def report(found: dict[str, list[dict[str, Any]]]) -> str:
    """The matrix in Markdown, one row for what is trained with, one column for stage and precision."""
    names = list(dict.fromkeys(parts(name)[2] for name in found))
    columns = list(dict.fromkeys(parts(name)[:2] for name in found))
    head = "| | " + " | ".join(f"{stage}/{precision}" for stage, precision in columns) + " |"
    notes: dict[str, int] = {}
    rows = []
    for name in names:
        cells = []
        for stage, precision in columns:
            case = f"zero{stage}/{precision}/{name}"
            text = outcome(case, found[case]) if case in found else ""
            figure, _, words = text.partition(" ")
            if words:
                number = notes.setdefault(text if not figure[:1].isdigit() else words[1:-1], len(notes) + 1)
                text = f"{figure} [{number}]" if figure[:1].isdigit() else f"[{number}]"
            cells.append(text)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "deepspeed"))
    legend = "\n".join(f"{number}. {text}" for text, number in notes.items())
    return f"""# The plain engine against DeepSpeed

Written by `pytest -m full tests/equivalence`. Python {platform.python_version()}, {versions}; 2 ranks on the CPU, gloo;
{MICRO_STEPS} micro-steps. Each figure is the largest relative difference of two losses, over all steps and both ranks;
allowed are {", ".join(f"{name} {value:.1e}" for name, value in TOLERANCE.items())}, twice that with accumulation.
Columns: ZeRO stage/precision.

{head}
|---|{"---|" * len(columns)}
{chr(10).join(rows)}

{legend}
"""


@pytest.mark.parametrize("name", configs())
def test_trains_as_deepspeed_does(seen: dict[str, list[dict[str, Any]]], name: str) -> None:
    ranks = seen[name]
    if error := ranks[0]["deepspeed"].get("error"):
        pytest.skip(f"DeepSpeed does not build it: {error}")
    if error := ranks[0]["plain"].get("error"):
        assert reason(name, NOT_PLAYED), error
        return
    apart, allowed = difference(ranks), TOLERANCE[parts(name)[1]] * (ACCUMULATED if "accumulation" in name else 1)
    if reason(name, APART):
        return
    assert apart <= allowed
    for rank in ranks:
        assert rank["plain"]["rates"] == pytest.approx(rank["deepspeed"]["rates"], rel=1e-9)
        assert rank["plain"]["skipped"] == rank["deepspeed"]["skipped"]


def test_what_is_said_to_differ_does(seen: dict[str, list[dict[str, Any]]]) -> None:
    """A reason that no case needs any more is to be taken out."""
    for pattern in APART:
        built = [n for n in fnmatch.filter(seen, pattern) if "error" not in seen[n][0]["deepspeed"]]
        assert any(difference(seen[n]) > TOLERANCE[parts(n)[1]] for n in built), pattern
