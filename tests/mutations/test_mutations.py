"""Plants a fault into a healthy script or its config and asks dsdoctor: it has to give the planted blame and key.

Marker `full`. In parts: `pytest -m full tests/mutations -k "loop and zero2"`. What ran is kept in
`tests/results/mutations.jsonl` (a case that is recorded as right is not run again unless its fault, its script or
dsdoctor's own version of the case changed, or DSDOCTOR_AGAIN is set), the score in `tests/results/mutations.md`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.dsconfig.patch import apply
from tests.end_to_end.command import call, ids
from tests.mutations import score
from tests.mutations.faults import FAULTS, PLACES, STYLES, Fault, arguments_of, config_of

SCRIPTS = Path(__file__).parent / "scripts"
CASES = [
    pytest.param(style, fault, stage, id=f"{style}-{fault.name}-zero{stage}")
    for fault in FAULTS
    for style in STYLES
    if style in fault.styles
    for stage in fault.stages
]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("style", "fault", "stage"), CASES)
def test_the_planted_fault_is_named(style: str, fault: Fault, stage: int, tmp_path: Path) -> None:
    config = apply(config_of(style, stage), fault.config)
    source = planted(style, fault)
    name = f"{style}-{fault.name}-zero{stage}"
    key = hashlib.sha256(json.dumps([source, config, fault.__dict__], default=str).encode()).hexdigest()[:16]
    if score.known(name, key) and "DSDOCTOR_AGAIN" not in os.environ:
        pytest.skip("recorded as right")
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "ds_config.json").write_text(json.dumps(config, indent=1))
    began = time.monotonic()
    with port(fault.busy_port) as env:
        options = ["--nproc", "2", "--steps", "8", *fault.options]
        code, document = call(
            ["triage", "ds_config.json", "train.py", *options],
            tmp_path,
            *arguments_of(style, config),
            limit=850,
            env=env,
        )
    wrong = list(mistakes(fault, code, document))
    score.record(name, key, wrong, document["verdict"], seconds=time.monotonic() - began)
    assert not wrong, json.dumps({k: document[k] for k in ("verdict",)}, indent=1) + str(ids(document))


def planted(style: str, fault: Fault) -> str:
    """The script with the fault's lines in place of the marks, indented like them."""
    lines = []
    for line in (SCRIPTS / f"{style}.py").read_text(encoding="utf-8").splitlines():
        mark = line.strip().removeprefix("# PLANT ")
        if line.strip().startswith("# PLANT ") and mark in fault.plant:
            text = fault.plant[mark]
            for word, place in PLACES[style].items():
                text = text.replace(word, place)
            line = line[: len(line) - len(line.lstrip())] + text
        lines.append(line)
    return "\n".join(lines) + "\n"


@contextmanager
def port(busy: bool) -> Iterator[dict[str, str]]:
    """An environment whose MASTER_PORT another program holds, or an unchanged one."""
    if not busy:
        yield {}
        return
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(16)
        yield {"MASTER_PORT": str(other.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}


def mistakes(fault: Fault, code: int, document: dict[str, Any]) -> Iterator[str]:
    """What of the answer is not what was planted."""
    verdict = document["verdict"]
    if verdict["blame"] not in fault.blame:
        yield f"blame {verdict['blame']}, planted {' or '.join(fault.blame)}: {verdict['summary']}"
    if fault.culprit and not set(fault.culprit) & set(verdict["culprit"]):
        yield f"culprit {verdict['culprit']}, planted {fault.culprit}"
    found = ids(document)
    if fault.ids and not any(fnmatch.filter(found, pattern) for pattern in fault.ids):
        yield f"found {found}, planted {fault.ids}"
    if fault.blame == ("healthy",):
        if loud := [*ids(document, "error"), *ids(document, "warning")]:
            yield f"a healthy job has {loud}"
        if code != 0:
            yield f"exit code {code}"
    bad = verdict["first_bad"] or {}
    for field, value in fault.bad.items():
        if bad.get(field) != value:
            yield f"first_bad.{field} {bad.get(field)!r}, planted {value!r}"
