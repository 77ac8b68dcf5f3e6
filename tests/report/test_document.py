"""The JSON document: strict JSON whatever the numbers are, and the keys of the contract."""

import json
import math
from pathlib import Path

from dsdoctor.finding import Evidence, Finding, FirstBad, Fix, Verdict
from dsdoctor.report.document import document, dumps

FINDING = Finding(
    id="loss-scale/collapse",
    severity="error",
    role="root",
    confidence=0.9,
    title="t",
    cause="c",
    evidence=(Evidence(source="with-deepspeed", rank=0, step=3, text="x"),),
    fixes=(Fix(text="bf16", patch={"bf16": {"enabled": True}, "fp16": None}),),
)
BAD = FirstBad(rank=1, step=3, micro_step=0, phase="forward", module="a.b", tensor="output", kind="inf")


def parse(text):
    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_keys_of_the_contract():
    verdict = Verdict(blame="precision", summary="s", confidence=0.9, first_bad=BAD)
    built = document("triage", exit_code=1, findings=[FINDING], stages=[{"name": "config"}], verdict=verdict)
    read = parse(dumps(built))
    assert read["schema"] == 1
    assert read["created"].endswith("Z")
    assert read["findings"][0]["fixes"][0]["patch"] == {"bf16": {"enabled": True}, "fp16": None}
    assert read["findings"][0]["evidence"][0]["line"] is None
    assert read["verdict"]["first_bad"]["module"] == "a.b"
    assert read["verdict"]["culprit"] == []


def test_commands_without_stages_and_verdict_leave_them_out():
    built = document("config", exit_code=0, findings=[])
    assert not {"stages", "verdict"} & set(built)


def test_non_finite_numbers_become_words():
    read = parse(dumps({"a": [math.nan, math.inf, -math.inf, 1.5], "b": {"c": (math.nan,)}}))
    assert read == {"a": ["nan", "inf", "-inf", 1.5], "b": {"c": ["nan"]}}


def test_half_a_character_leaves_the_document_valid_utf_8():
    written = dumps({"file\udcff": Path("b\udcfe.json"), "text": ["\ud800"]})
    assert parse(written.encode("utf-8").decode()) == {"file?": "b?.json", "text": ["?"]}
