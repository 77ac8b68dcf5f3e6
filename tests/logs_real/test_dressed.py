"""The written logs as collectors, terminals and people pass them on: the same is said of them.

Each way is tried with every tenth log or so, each with others.
"""

import textwrap

import pytest

from dsdoctor.analysis import analyze_log
from tests.logs_real.test_written import LOGS
from tests.logs_real.written.parts import behind

WAYS = {
    "times": lambda text: numbered("2025-03-10T13:52:10.{:03d}456Z ", text),
    "the journal": lambda text: numbered("Mar 10 13:52:10 gpu07 train.sh[4{:03d}]: ", text),
    "a pod": lambda text: behind("[pod/train-worker-1/pytorch] ", text),
    "colours": lambda text: "".join(f"\x1b[36m{line}\x1b[0m\n" for line in text.splitlines()),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "a code block": lambda text: textwrap.indent(text, "    "),
    "fences": lambda text: f"I get this error, please help:\n```\n{text}```\nThanks!\n",
    "a quotation": lambda text: behind("> ", text),
}


def numbered(prefix, text):
    return "".join(f"{prefix.format(at % 1000)}{line}\n" for at, line in enumerate(text.splitlines()))


@pytest.mark.parametrize(
    ("way", "written"),
    [(way, written) for at, way in enumerate(WAYS) for written in LOGS[at :: len(WAYS) + 1]],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_dressed_log(way, written, tmp_path):
    path = tmp_path / "train.log"
    dressed = WAYS[way](written.text)
    path.write_bytes(dressed if isinstance(dressed, bytes) else dressed.encode())
    alarming = [finding.id for finding in analyze_log(path).findings if finding.severity != "info"]
    if written.primary is None:
        assert alarming == []
    else:
        assert alarming[0] in (written.primary, *written.accept)
