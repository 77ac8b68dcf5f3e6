"""Ranks agree who was first, over their store and within a deadline: two real ranks, and what the keys mean."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.finding import FirstBad
from dsdoctor.numerics.agreement import Agreement, Sighting


def sighting(rank: int, step: int, phase: str, *, micro_step: int = 0, order: int = 0, module: str = "a") -> Sighting:
    found = FirstBad(
        rank=rank, step=step, micro_step=micro_step, phase=phase, module=module, tensor="output", kind="nan"  # type: ignore[arg-type]
    )  # fmt: skip
    return Sighting(found=found, order=order)


def test_the_key_orders_by_time_and_then_by_rank() -> None:
    inorder = [
        sighting(7, 0, "step"),
        sighting(3, 1, "input"),
        sighting(2, 1, "forward", order=4),
        sighting(0, 1, "forward", order=5),
        sighting(1, 1, "forward", order=5),
        sighting(0, 1, "backward"),
        sighting(0, 1, "input", micro_step=1),
        sighting(0, 2, "input"),
    ]
    keys = [one.key for one in inorder]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)


def test_the_key_fits_eight_bytes_whatever_the_numbers() -> None:
    assert 0 <= sighting(2**20, 2**40, "step", micro_step=2**20, order=2**30).key < 2**63


@pytest.mark.parametrize(
    ("sightings", "said"),
    [
        ([sighting(0, 3, "reduction"), sighting(1, 3, "forward")], "the data, or the device, of rank 1 is the cause"),
        ([sighting(0, 3, "parameter"), sighting(1, 3, "parameter")], "what they share is the cause"),
        ([sighting(0, 3, "reduction"), sighting(1, 3, "reduction")], "the reduction over the ranks made it"),
    ],
)
def test_what_the_sightings_of_all_ranks_mean(sightings: list[Sighting], said: str) -> None:
    assert said in Agreement(sightings=tuple(sightings), world_size=2).text()


def test_nothing_is_concluded_while_ranks_are_missing() -> None:
    text = Agreement(sightings=(sighting(2, 3, "forward"),), world_size=4).text()
    assert text == (
        "Of 4 ranks, 1 saw a non-finite value; rank 2 was first.\n"
        "Nothing was heard of rank 0, 1, 3: no such value there, or no longer alive."
    )


def run(folder: Path, *scenarios: str) -> list[dict[str, str]]:
    """By rank and scenario what was written to stderr. Both ranks must end by themselves, without a failure."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.numerics.agreeing", str(folder), *scenarios]
        ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    return [dict(zip(*[iter(re.split(r"^=== (\w+)\n", text, flags=re.M)[1:])] * 2, strict=True)) for text in texts]


def test_two_ranks(tmp_path: Path) -> None:
    """One rank prints, the other writes a file; nobody waits longer than the deadline."""
    zero, one = run(tmp_path, "one_bad_batch", "shared_weight", "reduction", "uneven", "dies")

    def file(scenario: str, rank: int) -> str:
        found = list((tmp_path / scenario).glob(f"rank{rank}-*.txt"))
        return found[0].read_text() if found else ""

    assert "phase input" in one["one_bad_batch"]
    assert "the data, or the device, of rank 1 is the cause" in one["one_bad_batch"]
    assert "phase reduction" not in zero["one_bad_batch"]
    assert "phase reduction" in file("one_bad_batch", 0)
    assert "rank 1 was first" in file("one_bad_batch", 0)

    assert "what they share is the cause" in zero["shared_weight"]
    assert "phase parameter" in file("shared_weight", 1)
    assert "the reduction over the ranks made it" in zero["reduction"]

    assert "Of 2 ranks, 1 saw a non-finite value; rank 0 was first." in zero["uneven"]
    assert "First" not in one["uneven"]

    assert "phase input" in one["dies"]
    assert "Nothing was heard of rank 0: the store of the ranks cannot be reached" in one["dies"]
    for texts in (zero, one):
        for scenario, text in texts.items():
            if scenario != "dies" or texts is one:
                assert text.endswith("--- True []\n"), (scenario, text)
