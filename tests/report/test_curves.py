"""What is drawn of a log, as text and as SVG."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from dsdoctor.logs.facts import LogFacts, Series
from dsdoctor.report import plots
from dsdoctor.report.charts import chart
from dsdoctor.report.curves import Curve, curves
from tests.diagnoses.making import fall, scales, series

RISING = Curve(title="loss", steps=tuple(range(60)), values=tuple(float(i) for i in range(60)))
BROKEN = Curve(title="loss", steps=(0, 1, 2, 3), values=(1.0, 2.0, math.nan, 4.0))
SCALE = Curve(title="loss scale", steps=(0, 1, 2), values=(65536.0, 256.0, 1.0), skipped=(0, 1), powers=True)


def drawn(curve):
    return ET.fromstring(chart(curve))


def test_few_points_are_no_curve():
    assert curves(LogFacts(series=(series("loss", 1.0, 2.0, 3.0),))) == ()


def test_a_series_with_enough_points_is_one():
    (curve,) = curves(LogFacts(series=(series("loss", *[1.0 + i for i in range(9)]),)))
    assert (curve.title, curve.steps[0], curve.steps[-1], curve.values[-1]) == ("loss", 1, 9, 9.0)


def test_the_loss_scale_is_drawn_from_its_overflows_on_to_the_last_step():
    history = scales(*fall(16, 12), steps_seen=100)
    (curve,) = curves(LogFacts(loss_scale=history))
    assert curve.title == "loss scale"
    assert curve.skipped == (0, 1, 2, 3)
    assert (curve.values[0], curve.values[-1], curve.steps[-1]) == (2**16, 2**12, 100)


def test_steps_that_start_anew_are_counted_by_their_place():
    names = series("loss", *[float(i) for i in range(10)])
    points = (*names.points, *names.points)
    (curve,) = curves(LogFacts(series=(type(names)(name="loss", points=points),)))
    assert curve.steps == tuple(range(20))


def test_what_comes_before_the_first_number_stands_where_the_numbers_begin():
    points = series("loss", *[float(i) for i in range(10)]).points
    points = (replace(points[0], step=None), *points[1:])
    (curve,) = curves(LogFacts(series=(Series(name="loss", points=points),)))
    assert curve.steps == (2, *range(2, 11))


def test_text_rises_from_the_lowest_block_to_the_highest():
    title, row = plots.lines(RISING, width=60)
    assert title == "loss (0 to 59, steps 0 to 59)"
    assert row.strip()[0] == "▁"
    assert row.strip()[-1] == "█"
    assert len(row.strip()) == 60


def test_text_shows_what_is_not_finite_and_what_was_skipped():
    assert "×" in list(plots.lines(BROKEN, width=4))[1]
    title, row, marks = plots.lines(SCALE, width=3)
    assert "2^0 to 2^16" in title
    assert "! skipped" in title
    assert row == "  █▅▁"  # by powers of two: 8 is half of 16
    assert marks == "  !!"


def test_text_holds_a_value_until_the_next_is_told():
    few = Curve(title="loss scale", steps=(0, 50, 100), values=(4.0, 2.0, 1.0), powers=True)
    row = list(plots.lines(few, width=10))[1]
    assert row == "  █████▅▅▅▅▁"


def test_blocks_need_an_encoding_that_has_them():
    assert plots.drawable("utf-8")
    assert not plots.drawable("latin-1")
    assert not plots.drawable(None)


def test_svg_breaks_its_line_where_a_value_is_not_finite():
    lines = [element for element in drawn(BROKEN).iter() if element.get("class") == "line"]
    assert [len(line.get("points").split()) for line in lines] == [2, 1]
    assert [element.get("d").count("M") for element in drawn(BROKEN).iter() if element.get("class") == "bad"] == [1]


def test_svg_marks_the_skipped_steps():
    assert [element.get("d").count("M") for element in drawn(SCALE).iter() if element.get("class") == "skipped"] == [2]


def test_svg_of_one_value_or_one_step_divides_by_nothing():
    flat = Curve(title="loss", steps=(5, 5), values=(1.0, 1.0))
    assert "nan" not in chart(flat)
    assert list(plots.lines(flat))


def test_a_curve_needs_as_many_steps_as_values():
    with pytest.raises(ValueError, match="one value a step"):
        Curve(title="loss", steps=(1,), values=())
