"""The order of findings."""

from dsdoctor.diagnoses.rank import ranked
from dsdoctor.finding import Finding


def finding(name, severity="error", role="root", confidence=0.5):
    return Finding(id=name, severity=severity, role=role, confidence=confidence, title="", cause="", evidence=())


def test_roots_before_consequences_then_severity_then_confidence():
    findings = [
        finding("a/consequence", role="consequence", confidence=1.0),
        finding("a/info", severity="info"),
        finding("a/unsure", confidence=0.4),
        finding("a/sure", confidence=0.9),
        finding("a/warning", severity="warning", confidence=1.0),
    ]
    order = [f.id for f in ranked(findings)]
    assert order == ["a/sure", "a/unsure", "a/warning", "a/info", "a/consequence"]


def test_a_consequence_comes_first_only_where_there_is_no_root():
    assert ranked([finding("a/consequence", role="consequence")])[0].role == "consequence"
