"""The plain engine against real DeepSpeed on two ranks: same models, data, random numbers and configs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CASES = (
    "fp32-zero1",
    "fp32-zero2-accumulated",
    "fp32-clipped",
    "fp32-l2",
    "fp32-client-optimizer",
    "fp32-direct-backward",
    "bf16-zero2",
    "bf16-zero3",
    "bf16-fp32-accumulation",
    "fp16-overflow",
    "fp16-overflow-accumulated",
    "fp16-static-too-high",
)

TOLERANCE = {
    # Sums in another order: some units of fp32's 2**-23 per step, over 12 steps.
    "fp32": 1e-5,
    # One unit in the last place of a bf16 (2**-8) or fp16 (2**-11) weight or activation may come out otherwise.
    "bf16": 2 * 2**-8,
    "fp16": 4 * 2**-11,
}


def two_ranks(script: str, argument: Path) -> str:
    """Run a script of this folder on two ranks and return what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / script), str(argument)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks saw, by case and engine."""
    out = tmp_path_factory.mktemp("parity") / "seen.json"
    printed = two_ranks("parity_ranks.py", out)
    assert out.exists(), printed
    loaded: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
    return loaded


def assert_close(ours: list[Any], theirs: list[Any], relative: float) -> None:
    for got, expected in zip(ours, theirs, strict=True):
        if expected is None or not math.isfinite(expected):
            assert got == expected
        else:
            assert got == pytest.approx(expected, rel=relative, abs=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_trains_as_deepspeed_does(seen: list[dict[str, Any]], case: str) -> None:
    relative = TOLERANCE[case.split("-")[0]]
    for rank in seen:
        ours, theirs = rank[case]["plain"], rank[case]["deepspeed"]
        for exact in ("scales", "applied", "counters", "prefix", "rng"):
            assert ours[exact] == theirs[exact], exact
        assert_close(ours["losses"], theirs["losses"], relative)
        assert_close(ours["norms"], theirs["norms"], relative)
        assert_close(ours["rates"], theirs["rates"], 1e-12)
        for got, expected in zip(ours.get("unused", []), theirs.get("unused", []), strict=True):
            assert_close(got, expected, relative)


def test_the_cases_do_what_their_names_say(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        for case in CASES:
            applied, scales = rank[case]["deepspeed"]["applied"], rank[case]["deepspeed"]["scales"]
            skipped, steps = rank[case]["deepspeed"]["counters"][:2]
            assert any(applied) == (case != "fp16-static-too-high")
            assert (skipped > 0) == case.startswith("fp16")
            assert (steps < 12) == ("accumulat" in case or "direct" in case)
            assert (len(set(scales)) > 1) == ("overflow" in case)


def test_ranks_start_from_the_weights_of_rank_0(seen: list[dict[str, Any]]) -> None:
    # The ranks are seeded differently, so a norm over averaged gradients is alike only if the weights are.
    for case in CASES:
        assert seen[0][case]["plain"]["norms"] == seen[1][case]["plain"]["norms"]


def test_the_data_loader_gives_deepspeed_s_batches(seen: list[dict[str, Any]]) -> None:
    ours = [rank["batches"]["plain"] for rank in seen]
    assert ours == [rank["batches"]["deepspeed"] for rank in seen]
    assert ours[0] != ours[1]


@pytest.mark.parametrize("case", ["zero1-fp16", "zero2-bf16", "zero3-bf16", "zero3-fp32"])
def test_goes_on_from_deepspeed_s_checkpoint_as_deepspeed_does(seen: list[dict[str, Any]], case: str) -> None:
    for rank in seen:
        went_on = rank["resumed"][case]
        relative = TOLERANCE[case.split("-")[1]]
        assert_close(went_on["plain"], went_on["deepspeed"], relative)
        # The moments count: from fresh ones the losses would be others.
        assert_close(went_on["deepspeed"], went_on["without a break"], relative)


def test_complex_weights_train_as_by_hand(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["spectral"]["plain"] == pytest.approx(rank["spectral"]["by hand"], rel=1e-5)
    assert seen[0]["spectral"]["plain"][-1] < seen[0]["spectral"]["plain"][0]


def test_a_rank_with_fewer_batches_leaves_the_other_waiting_in_backward(tmp_path: Path) -> None:
    printed = two_ranks("short_rank.py", tmp_path)
    assert (tmp_path / "rank1").read_text(encoding="utf-8") == "end", printed
    assert (tmp_path / "rank0").read_text(encoding="utf-8") == "backward of step 2 failed"
