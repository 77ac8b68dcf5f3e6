"""Whole logs: several files, what cannot be read, and inputs that nobody meant."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.logs.read import Unreadable, read_logs
from dsdoctor.logs.series import KEEP, SeriesBuilder

PIECES = (
    "Traceback (most recent call last):\n",
    '  File "/home/u/train.py", line 7, in main\n    loss = step(x)\n',
    "KeyError: 'label'\n",
    "During handling of the above exception, another exception occurred:\n",
    "Exception ignored in: <function f>\n",
    "{'loss': 1.5, 'grad_norm': nan, 'learning_rate': 1e-5}\n",
    "\r 10%|█ | 3/30 [00:04<00:05,  8.90it/s]",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n",
    "[deepspeed] OVERFLOW! Skipping step. Gradients are non-finite, weights were not updated.\n",
    'json = {\n  "fp16": {\n    "enabled": true\n  }\n',
    "}\n",
    "  rank      : 5 (local_rank: 1)\n  exitcode  : -7 (pid: 8366)\n",
    "['python'] exits with return code = -9\n",
    "[rank3]: torch.distributed.DistBackendError: x\n",
    "[rank1]: Exception: Current loss scale already at minimum - cannot decrease\n",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=X, NumelIn=1, Timeout(ms)=9) r\n",
    "CUDA out of memory. Tried to allocate 99999999999999999999 GiB\n",
    "\x1b[31m│ x │\x1b[0m\n",
    "\0\xff\n",
)


def examined(path):
    return diagnose(Case(logs=read_logs([path])), strict=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(
        st.one_of(st.sampled_from(PIECES).map(lambda t: t.encode("latin-1", "replace")), st.binary(max_size=40))
    )
)
def test_no_mixture_of_lines_breaks_the_reader_or_a_rule(tmp_path, data):
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(data))
    with suppress(Unreadable):  # the bytes may begin like a compressed file
        examined(path)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 4000))
def test_a_log_may_end_anywhere(tmp_path, cut):
    path = tmp_path / "a.log"
    path.write_bytes("".join(PIECES * 3).encode()[:cut])
    examined(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"\0" * 5000, b"no newline", b"\xff\xfe\xfd" * 100])
def test_nothing_to_say_is_no_failure(tmp_path, content):
    path = tmp_path / "a.log"
    path.write_bytes(content)
    assert examined(path).findings == ()


def test_what_could_not_be_read_is_said_and_the_rest_is_used(tmp_path):
    (tmp_path / "rank0.log").write_text("step 1 loss 2.0\n")
    (tmp_path / "rank1.log.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    got = read_logs([tmp_path])
    assert got.steps_seen == 1
    assert len(got.unreadable) == 1
    assert "rank1.log.gz" in got.unreadable[0]


def test_nothing_readable_at_all_is_an_error(tmp_path):
    path = tmp_path / "a.log.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00garbage")
    with pytest.raises(Unreadable):
        read_logs([path])


def test_a_line_of_many_megabytes(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"tensor(" + b"0.1234, " * 700_000 + b")\nstep 3 loss 1.0\n")
    got = read_logs([path])
    assert (got.lines, got.steps_seen) == (2, 3)
    assert got.series_of("loss").points[0].evidence.line == 2


def test_ranks_come_from_the_names_of_files(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\nKeyError: 1\n'
    (tmp_path / "rank3.log").write_text(trace)
    (tmp_path / "rank0.log").write_text("step 1 loss 2.0\n")
    got = read_logs([tmp_path])
    assert [f.rank for f in got.failures] == [3]
    assert got.failures[0].source.endswith("rank3.log")


def test_the_earlier_failure_of_two_files_stands_first(tmp_path):
    trace = "[2024-01-01 10:00:{},000] [INFO] [x.py:1:f] dying\n" + (
        'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\n{}: 1\n'
    )
    (tmp_path / "rank0.log").write_text(trace.format("30", "ValueError"))
    (tmp_path / "rank1.log").write_text(trace.format("10", "KeyError"))
    assert [f.type for f in read_logs([tmp_path]).failures] == ["KeyError", "ValueError"]


def test_a_long_series_is_thinned_and_keeps_what_matters():
    builder = SeriesBuilder("loss")
    values = [2.0] * 40_000
    values[777], values[13_131], values[39_999] = 0.5, float("nan"), 1.25
    values[5] = 9.0
    for index, value in enumerate(values):
        builder.add(index, value, index, "a", None, "")
    series = builder.build()
    kept = {point.step for point in series.points}
    assert series.thinned
    assert len(series.points) <= KEEP
    assert {0, 5, 777, 13_131, 39_999} <= kept
