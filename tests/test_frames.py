"""Whose code a line of a traceback is."""

import pytest

from dsdoctor.frames import caller_of_torch, innermost, owner, users_line
from dsdoctor.runs.facts import Frame


def frame(path):
    return Frame(file=path, line=1, function="f")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/u/train.py", "user"),
        ("train.py", "user"),
        ("/home/u/deepspeed_job/train.py", "user"),
        ("/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", "deepspeed"),
        ("/home/u/src/DeepSpeed/deepspeed/runtime/zero/stage3.py", "deepspeed"),
        ("/env/lib/python3.11/site-packages/torch/nn/functional.py", "torch"),
        ("/env/lib/python3.11/site-packages/torch/distributed/run.py", "launcher"),
        ("/env/lib/python3.11/site-packages/deepspeed/launcher/runner.py", "launcher"),
        ("/env/bin/torchrun", "launcher"),
        ("/env/lib/python3.11/site-packages/transformers/trainer.py", "library"),
        ("/usr/lib/python3.10/contextlib.py", "library"),
        ("<frozen runpy>", "library"),
    ],
)
def test_owner(path, expected):
    assert owner(frame(path)) == expected


def test_the_lines_that_count():
    user, deepspeed = frame("/home/u/train.py"), frame("/env/site-packages/deepspeed/runtime/engine.py")
    torch = frame("/env/site-packages/torch/_tensor.py")
    assert users_line((user, deepspeed, torch)) is user
    assert caller_of_torch((user, deepspeed, torch)) is deepspeed
    assert innermost((user, deepspeed, torch)) == "torch"
    assert users_line((torch,)) is None
    assert innermost(()) is None
