"""Islands to try: the smallest first, cast back where the values fit."""

from __future__ import annotations

from dataclasses import dataclass

from dsdoctor.numerics.islands import candidates

LIMIT = 65504.0


@dataclass(frozen=True)
class Peak:
    name: str
    taken: float
    made: float


def test_the_flagged_module_alone_comes_first_and_leaves_its_output_wide() -> None:
    peaks = [Peak("block.wo", 3e4, 1e5), Peak("block", 10.0, 1e5), Peak("norm", 1e5, 5.0), Peak("", 1.0, 2.0)]
    found = candidates(peaks, LIMIT, "block.wo", "float16")
    assert found[0] == [("block.wo", None)]
    # the norm takes the large values and makes small ones of them: cast back there
    assert found[1] == [("block.wo", None), ("norm", "float16")]
    # the only module that holds both is the model
    assert found[2] == [("", "float16")]


def test_a_value_that_stays_inside_a_module_is_cast_back_at_once() -> None:
    peaks = [Peak("mlp", 1.0, 2.0), Peak("mlp.up", 2.0, 9e4), Peak("mlp.down", 9e4, 2.0)]
    found = candidates(peaks, LIMIT, "mlp.up", "float16")
    assert [("mlp.up", None), ("mlp.down", "float16")] in found
    assert found[-1] == [("mlp", "float16")]


def test_a_list_of_modules_is_no_island_as_nobody_calls_it() -> None:
    peaks = [Peak("layers.0.a", 1.0, 9e4), Peak("layers.1.b", 9e4, 1.0), Peak("", 1.0, 1.0)]
    assert candidates(peaks, LIMIT, "layers.0.a", "float16")[-1] == [("", "float16")]
