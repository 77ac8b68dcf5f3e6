"""The page for a browser: complete by itself, everything escaped, and never over a file that is not ours."""

from html.parser import HTMLParser

import pytest

from dsdoctor.cli.main import main
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.logs.facts import LogFacts
from dsdoctor.report import html
from tests.diagnoses.making import fall, scales, series

HOSTILE = "</script><img src=x onerror=alert(1)>\x1b[2J\ud800 \"&'"
FINDING = Finding(
    id="loss-scale/collapse",
    severity="error",
    role="root",
    confidence=0.9,
    title=f"title {HOSTILE}",
    cause=f"cause {HOSTILE}",
    evidence=(Evidence(source=f"a {HOSTILE}.log", line=12, rank=3, step=4, text=f"line {HOSTILE}"),),
    caveat=f"caveat {HOSTILE}",
    fixes=(Fix(text=f"fix {HOSTILE}", patch={"bf16": {"enabled": True}, HOSTILE: None}),),
)
LOGS = LogFacts(
    sources=("a.log",),
    lines=40,
    series=(series("loss", *[2.0 - i / 10 for i in range(9)]),),
    loss_scale=scales(*fall(16, 12), steps_seen=50),
    unreadable=(f"b {HOSTILE}",),
)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.opened = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.opened.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "polyline"):
            assert self.open.pop() == tag


PAGE = html.page(f"report {HOSTILE}", [FINDING], LOGS)


def test_every_tag_is_closed():
    assert Tags(PAGE).open == []


def test_nothing_of_a_log_becomes_markup_or_a_control_character():
    tags = Tags(PAGE).opened
    assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe", "object"}
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert "\x1b" not in PAGE
    PAGE.encode("utf-8")


def test_nothing_is_loaded():
    tags = Tags(PAGE).opened
    assert not any({"src", "href", "data"} & attributes.keys() for _, attributes in tags)
    assert "http" not in PAGE
    assert "url(" not in PAGE
    assert "@import" not in PAGE


def test_findings_curves_and_what_was_read_are_there():
    for text in ("loss-scale/collapse", ":12, rank 3, step 4", "90% sure", "4 skipped", "gradient", "40 lines"):
        assert (text in PAGE) == (text != "gradient"), text
    assert [tag for tag, _ in Tags(PAGE).opened].count("svg") == 2


def test_a_page_without_findings_says_so():
    assert "nothing wrong was found" in html.page("t", [])


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {i} loss {3 - i / 50:.3f}\n" for i in range(1, 30)) + "training finished\n")
    return path


def test_the_command_writes_it_and_writes_over_its_own(log, tmp_path, capsys):
    report = tmp_path / "report.html"
    assert main(["log", str(log), "--html", str(report)]) == 0
    assert main(["log", str(log), "--html", str(report)]) == 0
    assert "<svg" in report.read_text(encoding="utf-8")
    assert "loss (2.42 to 2.98" in capsys.readouterr().out


def test_a_file_that_is_not_ours_is_left_alone(log, capsys):
    before = log.read_text()
    assert main(["log", str(log), "--html", str(log)]) == 2
    assert log.read_text() == before
    assert capsys.readouterr().err.strip().count("\n") == 0


def test_a_place_that_cannot_be_written_is_2(log, tmp_path):
    assert main(["log", str(log), "--html", str(tmp_path / "no" / "such" / "r.html")]) == 2
