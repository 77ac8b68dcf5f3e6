"""Largest magnitudes by module and step, read back as they were, and what is forecast from them while a run goes on."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.numerics import attach
from dsdoctor.numerics.frames import Frame, Row
from dsdoctor.numerics.headroom import Recorder, from_list
from dsdoctor.numerics.stats import Range
from dsdoctor.report.heatmap import heatmap
from tests.numerics.engine import TinyEngine
from tests.numerics.launching import launched


def frame(name: str, *rows: tuple[str, float, str]) -> Frame:
    return Frame(name, "Linear", tuple(Row(label, Range(0.0, high), note) for label, high, note in rows))


def test_largest_of_inputs_and_outputs_by_step() -> None:
    recorder = Recorder()
    recorder.hear(frame("a", ("weight", 9.0, "float16"), ("input[0]", 2.0, "float32"), ("output", 3.0, "float16")), 0)
    recorder.hear(frame("a", ("output", 1.0, "float16")), 0)
    recorder.hear(frame("a", ("output", 5.0, "float16"), ("input[mask]", 1.0, "int64")), 4)
    (one,) = from_list(json.loads(json.dumps(recorder.to_list())))
    assert (one.module, one.dtype, one.peaks) == ("a", "float16", ((0, 3.0), (4, 5.0)))


def test_the_map_has_a_row_a_module_and_a_column_a_step() -> None:
    recorder = Recorder()
    for step in range(3):
        recorder.hear(frame("<b>", ("output", 4.0 * 8**step, "float16")), step)
        recorder.hear(frame("", ("output", 1.0, "float16")), step)
    page = heatmap(from_list(recorder.to_list()))
    assert page.count("<tr>") == 3
    assert "&lt;b&gt;" in page
    assert page.index("&lt;b&gt;") < page.index("(the model)"), "in the order of the forward"
    assert page.count("<td style") == 6


def told(*values: float, dtype: str = "float16") -> list[str]:
    """What is forecast after each step in which a module reaches that value."""
    recorder, said = Recorder(), []
    for step, value in enumerate(values):
        recorder.note("block", dtype, value, step)
        said.append(recorder.forecast())
    return [text for text in said if text is not None]


def test_a_crossing_is_told_once_and_again_when_it_is_much_nearer() -> None:
    said = told(*(1200.0 * 1.05**step for step in range(80)))
    steps = [int(re.search(r"in about (\d+) steps", text)[1]) for text in said]  # type: ignore[index]
    assert steps[0] == round(math.log(65504 / (1200 * 1.05**5)) / math.log(1.05)), "after six steps"
    assert all(later <= earlier / 4 for earlier, later in itertools.pairwise(steps))
    assert 2 <= len(steps) <= 4


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([3e4] * 20, "float16"),
        ([3e4 * 0.9**step for step in range(20)], "float16"),
        ([1e-3 * 1.3**step for step in range(20)], "float16"),
        ([2000.0 * 1.3**step for step in range(12)], "bfloat16"),
        ([65504.0] * 20, "float16"),
        ([100.0, 2000.0, 90.0, 3000.0, 80.0, 2500.0, 120.0, 1900.0], "float16"),
    ],
    ids=["level", "falling", "far away", "bf16", "a mask of the lowest number", "a cloud"],
)
def test_nothing_is_forecast(values: list[float], dtype: str) -> None:
    assert told(*values, dtype=dtype) == []


def test_a_mask_does_not_hide_what_stands_beside_it() -> None:
    recorder = Recorder()
    for step in range(8):
        rows = ("input[mask]", 65504.0, "float16"), ("output", 2000.0 * 1.3**step, "float16")
        recorder.hear(frame("attention", *rows), step)
    said = recorder.forecast()
    assert said is not None
    assert said.startswith("attention crosses the limit of float16")


def test_memory_is_bounded() -> None:
    recorder = Recorder()
    for step in range(10_000):
        recorder.note("a", "float16", 1.0 + step, step)
    (one,) = from_list(recorder.to_list())
    assert len(one.peaks) == 128
    assert one.peaks[-1] == (9999, 10_000.0)


class Drifts(nn.Module):
    """A block whose output grows by a third every call."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.last(self.block(x * (1000 * 1.3**self.calls)) / 1e4)
        return out


@pytest.mark.parametrize("mode", ["frames", "sentinel", "auto"])
def test_an_attached_detector_warns_of_fp16_alone(mode: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for dtype, warned in ((torch.float16, 1), (torch.bfloat16, 0)):
        engine = TinyEngine(Drifts().to(dtype), lr=1e-6)
        with attach(engine, mode=mode) as detector:
            for _ in range(8):
                engine.backward(engine(torch.ones(4, 8, dtype=dtype)).float().mean())
                engine.step()
        assert (detector.problems, detector.first_bad) == ([], None)
        assert len(detector.warnings) == warned
        assert ("dsdoctor: block crosses the limit of float16 in about" in capfd.readouterr().err) == bool(warned)


@pytest.mark.full
def test_on_real_deepspeed(tmp_path: Path) -> None:
    """Two ranks: fp16 is warned of in time, by the block that grows; bf16, which reaches as far as fp32, is not."""
    keys = [f"fp16:{stage}:{mode}" for stage in (0, 2, 3) for mode in ("sentinel", "frames")]
    keys += ["bf16:2:sentinel", "bf16:3:frames"]
    for rank in launched("tests.numerics.growing", tmp_path, keys, 200):
        for key, seen in rank.items():
            assert (seen["problems"], seen["bad"]) == ([], None), key
            if key.startswith("bf16"):
                assert seen["warnings"] == [], key
            else:
                assert seen["warnings"], key
                assert re.match(r"blocks\.0 crosses the limit of float16 in about \d+ steps", seen["warnings"][0]), seen
