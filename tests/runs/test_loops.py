"""Which loops hold a line, read from source."""

from pathlib import Path

import pytest

from dsdoctor.runs.loops import loops_around

SOURCE = """\
def main():
    for epoch in range(3):
        for x in loader():
            step(x)
            if rank == 0:
                save()
        validate()
    else:
        after()
    while True:
        def late():
            wait()
        late()
    barrier()
"""


@pytest.mark.parametrize(
    ("line", "loops"),
    [
        (4, (3, 2)),
        (6, (3, 2)),
        (7, (2,)),
        (9, ()),  # the else of a loop runs once, after it
        (12, ()),  # a function on the way begins anew
        (13, (10,)),
        (14, ()),
        (0, ()),
    ],
)
def test_loops_are_those_of_the_function_innermost_first(tmp_path: Path, line: int, loops: tuple[int, ...]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    assert loops_around(str(file), line) == loops


def test_source_that_is_not_there_or_no_python_has_no_loops(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("for x in\n")
    assert loops_around(str(broken), 1) == ()
    assert loops_around(str(tmp_path / "absent.py"), 1) == ()
