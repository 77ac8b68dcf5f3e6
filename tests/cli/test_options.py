"""Options and the report folder."""

import argparse

import pytest

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import count, duration, numbered_folder, positive


def test_each_call_gets_a_new_numbered_folder(tmp_path):
    first, second = numbered_folder(tmp_path / "r"), numbered_folder(tmp_path / "r")
    assert (first.name, second.name) == ("0001", "0002")


def test_numbers_go_on_after_the_highest(tmp_path):
    (tmp_path / "0041").mkdir()
    (tmp_path / "notes").mkdir()
    assert numbered_folder(tmp_path).name == "0042"


def test_a_folder_that_cannot_be_made_is_one_line_for_the_user(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWork, match="cannot write reports"):
        numbered_folder(tmp_path / "file")


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x"])
def test_ranks_and_steps_are_whole_and_above_zero(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        positive(text)


@pytest.mark.parametrize("text", ["0", "-3", "inf", "nan", "x"])
def test_durations_are_finite_and_above_zero(text):
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        duration(text)


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7 * 10**9), ("350m", 350 * 10**6), ("1.5e9", 1_500_000_000), ("12", 12)]
)
def test_numbers_with_a_letter(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["", "B", "7Q", "7GB", "0", "-7B", "1e30", "1.2.3M", "nan"])
def test_what_is_no_number(text):
    with pytest.raises(argparse.ArgumentTypeError):
        count(text)
