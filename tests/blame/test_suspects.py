"""Which findings of lint are worth a run of their own."""

from dsdoctor.blame.suspects import suspects
from dsdoctor.case import Case
from dsdoctor.dsconfig.load import load_config
from dsdoctor.finding import Finding, Fix


def finding(identifier, patch, *, severity="warning", keys=("key",)):
    return Finding(
        id=identifier,
        severity=severity,
        role="root",
        confidence=0.9,
        title="t",
        cause="c",
        evidence=(),
        fixes=(Fix(text="f", patch=patch),),
        keys=keys,
    )


def keys_of(tmp_path, *findings):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    case = Case(config=load_config(path, release="0.19.8", world_size=2))
    return [suspect.keys for suspect in suspects(case, findings)]


REFUSED = finding("config/conflict", None, severity="error")


def test_a_misspelled_section_may_be_the_reason_of_an_error_of_the_config(tmp_path):
    renamed = finding("config/unknown-key", {"optimzer": None, "optimizer": {"type": "Adam"}}, keys=("optimzer",))
    assert keys_of(tmp_path, REFUSED, renamed) == [("optimzer",)]


def test_an_unknown_key_that_can_only_be_dropped_explains_nothing(tmp_path):
    assert keys_of(tmp_path, finding("config/unknown-key", {"zero_optimization": {"foo": None}})) == []


def test_other_risks_need_no_run_where_lint_has_the_reason(tmp_path):
    risk = finding("config/suspicious-value", {"optimizer": {"params": {"lr": 1e-4}}})
    assert keys_of(tmp_path, risk) == [("key",)]
    assert keys_of(tmp_path, risk, REFUSED) == []


def test_switching_the_precision_off_proves_nothing(tmp_path):
    off = finding("config/conflict", {"fp16": {"enabled": False}}, keys=("fp16.enabled",))
    assert keys_of(tmp_path, off) == []


def test_a_race_is_tested_though_it_is_no_finding_of_lint(tmp_path):
    off = {"zero_optimization": {"overlap_comm": False}}
    race = finding("numerics/overlap-comm-race", off, keys=("zero_optimization.overlap_comm",))
    assert keys_of(tmp_path, race, REFUSED) == [("zero_optimization.overlap_comm",)]
    assert keys_of(tmp_path, finding("numerics/silent-skip", off)) == []
