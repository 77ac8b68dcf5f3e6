"""What a person reads: no control characters from elsewhere, no colour outside a terminal."""

import io
import os
from pathlib import Path

import pytest

from dsdoctor.case import Case
from dsdoctor.finding import Evidence, Finding, Fix, Verdict
from dsdoctor.job import Job
from dsdoctor.report.terminal import Terminal, clean
from dsdoctor.triage import StageResult, Triage

ESC = "\x1b"


def shown(show):
    stream = io.StringIO()
    show(Terminal(stream))
    return stream.getvalue()


def test_a_stage_is_one_line_with_its_mark():
    result = StageResult(name="comm", status="passed", why="2 ranks over gloo\nfine", seconds=4.1)
    text = shown(lambda t: t.stage(result))
    assert text.count("\n") == 1
    assert text.startswith("[✓] comm")
    assert "4.1 s" in text


def test_a_pipe_that_nobody_reads_is_left_to_the_command():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream, pytest.raises(BrokenPipeError):
        Terminal(stream).line("x" * 100_000)


def test_every_status_has_its_mark():
    marks = {"passed": "✓", "warned": "!", "failed": "✗", "timeout": "✗", "crashed": "✗", "skipped": "–"}
    for status, mark in marks.items():
        assert shown(lambda t, s=status: t.stage(StageResult(name="x", status=s))).startswith(f"[{mark}]")


def test_text_of_the_users_programs_cannot_drive_the_terminal():
    finding = Finding(
        id="a/b",
        severity="error",
        role="root",
        confidence=0.5,
        title="t",
        cause=f"{ESC}]0;owned\x07 {ESC}[2J",
        evidence=(Evidence(source="log", line=3, rank=1, text=f"{ESC}[31mred"),),
        fixes=(Fix(text="do it", patch={"a": 1}),),
    )
    text = shown(lambda t: t.finding(finding))
    assert ESC not in text
    assert "log:3, rank 1: [31mred" in text
    assert '{"a": 1}' in text


def test_rich_markup_in_text_is_shown_as_it_is():
    text = shown(lambda t: t.line("[bold]x[/bold] [rank0]: y"))
    assert text == "[bold]x[/bold] [rank0]: y\n"


def test_the_verdict_names_the_keys_to_change():
    verdict = Verdict(blame="config", summary="Wrong.", confidence=0.9, culprit=("train_batch_size",))
    text = shown(lambda t: t.verdict(verdict))
    assert "config (90% sure): Wrong." in text
    assert "train_batch_size" in text


def test_lone_surrogates_can_be_written():
    assert clean("a\udcffb").encode("utf-8")


def test_progress_is_for_terminals_only():
    assert shown(lambda t: t.progress("step 3 of 20")) == ""


def test_what_is_only_good_to_know_takes_one_line():
    note = Finding(id="a/note", severity="info", role="root", confidence=1, title="t", cause="small", evidence=())
    text = shown(lambda t: t.findings([note]))
    assert text.splitlines()[-1] == "  a/note: small"


def test_a_patch_says_whether_it_was_tried_and_planted_faults_have_a_line_each():
    trials = [{"patch": "keep(model)", "outcome": "finite"}]
    rows = [
        {"fault": "log of zero", "planted": "a.b", "found": "inf in forward of a.b", "right": True, "why": ""},
        {"fault": "NaN in the batch", "planted": "", "found": "", "right": None, "why": "no float among the inputs"},
    ]
    details = {"patch": "keep(model)", "examined": {"trials": trials, "bundle": "out/bundle-rank0"}, "selftest": rows}

    def text(**changes):
        result = Triage(
            job=Job(config=Path("c"), script="s", folder=Path("out")),
            case=Case(),
            stages=(StageResult(name="numerics", status="failed", details={**details, **changes}),),
            findings=(),
            verdict=Verdict(blame="precision", summary="s", confidence=0.9),
        )
        return shown(lambda t: t.triage(result))

    assert "ready to paste (tried on the same micro-batch):\nkeep(model)" in text()
    assert "ready to paste (not tried):\nother(model)" in text(patch="other(model)")
    assert "dsdoctor nan replay out/bundle-rank0" in text()
    assert "✓ log of zero in a.b → inf in forward of a.b" in text()
    assert "– NaN in the batch → no float among the inputs" in text()
