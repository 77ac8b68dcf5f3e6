"""Frames are folded into the largest magnitude by module and step, and read back as they were."""

from __future__ import annotations

import json

from dsdoctor.numerics.frames import Frame, Row
from dsdoctor.numerics.headroom import Recorder, from_list
from dsdoctor.numerics.stats import Range
from dsdoctor.report.heatmap import heatmap


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
