"""Hostfiles as DeepSpeed's launcher reads them."""

from pathlib import Path

import pytest
from deepspeed.launcher.runner import _parse_hostfile

from dsdoctor.runs.hostfile import Malformed, hosts


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "hosts"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        "worker-0 slots=4\nworker-1 slots=2\n",
        "# slots=99\n\n  worker-0\tslots=4 gpu=a100\r\nuser@10.0.0.2   slots=1\n",
        "worker-0 slots=4   # the big one\n",
    ],
)
def test_as_deepspeed_reads_it(written, text):
    path = written(text)
    assert hosts(path) == dict(_parse_hostfile(path.read_text().splitlines()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker-0\n", "hosts:1: 'worker-0' is not of the form HOST slots=N"),
        ("worker-0 slots=4\nworker-1: 4\n", "hosts:2: "),
        ("worker-0 slots=4\nworker-0 slots=4\n", "hosts:2: worker-0 is there twice"),
        ("worker-0 slots=-1\n", "HOST slots=N"),
        ("worker-0 slots = 4\n", "HOST slots=N"),
        ("# nobody\n\n", "no slots in it"),
        ("", "no slots in it"),
    ],
)
def test_what_deepspeed_refuses(written, text, says):
    path = written(text)
    with pytest.raises(Malformed, match=says):
        hosts(path)
    with pytest.raises(ValueError, match="Hostfile"):
        _parse_hostfile(path.read_text().splitlines())


def test_something_else_than_a_hostfile(written):
    """Half a megabyte of bytes on one line are refused in one short line."""
    with pytest.raises(Malformed) as error:
        hosts(written("\udcff\0" * 250_000))
    assert len(str(error.value)) < 800
