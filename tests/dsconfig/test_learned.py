"""Releases that the shipped table lacks: read from an install once, then kept."""

import json
import sys
from pathlib import Path

import pytest

from dsdoctor.dsconfig import learned, schema


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    schema.forget()
    yield tmp_path / "dsdoctor"
    monkeypatch.undo()
    schema.forget()


def stand_in(monkeypatch, code):
    monkeypatch.setattr(learned, "_PROCESS", (sys.executable, "-c", code))


def future_table():
    table = json.loads(json.dumps(schema._table("0.19.8")))
    table["sections"][""]["keys"]["brand_new"] = {"kind": "bool"}
    return table


def test_an_unknown_release_is_judged_by_itself(monkeypatch, cache):
    (cache.parent / "table.json").write_text(json.dumps(future_table()))
    code = f"print('RELEASE 0.20.0'); print('TABLE ' + open({str(cache.parent / 'table.json')!r}).read())"
    stand_in(monkeypatch, code)
    assert schema.table_release("0.20.0") != "0.20.0"
    assert schema.learn() is None
    assert schema.table_release("0.20.0") == "0.20.0"
    assert schema.schema_for("0.20.0").key("brand_new").kind == "bool"
    assert schema.releases()[-1] == "0.20.0"
    assert schema.schema_for("0.19.8").key("brand_new") is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('no deepspeed here')", "no deepspeed here"),
        ("print('RELEASE 1.0'); print('TABLE {')", "Expecting"),
        ("import time; time.sleep(60)", "took more than"),
    ],
)
def test_what_fails_says_why_and_changes_nothing(monkeypatch, cache, code, words):
    stand_in(monkeypatch, code)
    assert words in learned.learn(timeout=10 if "sleep" not in code else 0.5)
    assert learned.tables() == {}


def test_the_cache_of_another_user_is_no_cache(monkeypatch):
    """In a container under any user id the home is often root's; what glob does then root cannot show."""

    def denied(path, pattern):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", denied)
    assert learned.tables() == {}


def test_a_spoilt_file_is_passed_over(cache):
    cache.mkdir()
    (cache / "deepspeed-schema-2-0.21.0.json").write_text('{"release": "0.21.0"}')
    (cache / "deepspeed-schema-2-0.22.0.json").write_text("nonsense")
    assert learned.tables() == {}
