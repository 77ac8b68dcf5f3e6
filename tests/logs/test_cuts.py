"""A log that is cut off says what the whole one says, or a consequence of it, or doubts itself since it ends there."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.analysis import DOUBTFUL, analyze_log

SKIPPED = (
    "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    "Attempted loss scale: {}, reducing to {}\n"
)
TRACE = 'Traceback (most recent call last):\n  File "/home/u/{}", line 7, in main\n    loss = step(x)\n{}\n'
LAUNCHER = (
    "E0122 13:57:00.488000 8361 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
    "local_rank: 1 (pid: 8366) of binary: python\n"
    + TRACE.format("env/lib/python3.11/site-packages/torch/distributed/run.py", "")[:-1]
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \ntrain.py FAILED\n"
    "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 8366)\n"
)


def steps(first, last):
    return "".join(
        f"{{'loss': {3 - i / 50:.4f}, 'grad_norm': 0.{i}, 'epoch': {i / 100}}}\n" for i in range(first, last)
    )


def ranked(rank, text):
    return "".join(f"[rank{rank}]: {line}\n" for line in text.splitlines())


QUOTED = (
    "sample (step 3)\nCalling root(-1) prints\nTraceback (most recent call last):\n"
    '  File "demo.py", line 6, in <module>\n    root(-1)\nValueError: negative input\nReward: 1.5\n'
)
LOGS = {
    "an exception of one rank": steps(1, 12) + ranked(1, TRACE.format("t.py", "KeyError: 'labels'")) + LAUNCHER,
    "out of memory": steps(1, 4)
    + ranked(0, TRACE.format("t.py", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0"))
    + LAUNCHER,
    "a chain": TRACE.format("t.py", "OSError: [Errno 28] No space left on device")
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + TRACE.format("t.py", "RuntimeError: save failed")
    + LAUNCHER,
    "an exception in a sample of a healthy run": steps(1, 9) + QUOTED + steps(9, 30) + "training finished\n",
    "a warm-up": "".join(SKIPPED.format(2 ** (20 - i), 2 ** (19 - i)) for i in range(6))
    + "".join(f"step {i} loss {3 - i / 50:.3f}\n" for i in range(6, 60))
    + "training finished\n",
}


def test_the_warm_up_is_one(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(LOGS["a warm-up"])
    assert [finding.id for finding in analyze_log(path).findings] == ["loss-scale/warmup"]


def told(path):
    return [finding for finding in analyze_log(path).findings if finding.severity != "info"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    found = {}
    for name, text in LOGS.items():
        path = folder / "a.log"
        path.write_text(text)
        found[name] = told(path)
    return found


def test_what_the_whole_logs_say(whole):
    assert {name: [finding.id for finding in found[:1]] for name, found in whole.items()} == {
        "an exception of one rank": ["launch/user-exception"],
        "out of memory": ["memory/gpu-oom-step"],
        "a chain": ["disk/full"],
        "an exception in a sample of a healthy run": [],
        "a warm-up": [],
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(LOGS)), part=st.floats(0, 1))
def test_a_cut_log_says_no_more_than_the_whole_one(tmp_path, whole, name, part):
    text = LOGS[name]
    path = tmp_path / "a.log"
    path.write_text(text[: int(part * len(text))])
    for first in told(path)[:1]:
        doubted = first.confidence <= DOUBTFUL and "ends" in (first.caveat or "")
        assert first.id in {finding.id for finding in whole[name]} or doubted, (first.id, first.caveat)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.booleans(), min_size=30, max_size=30))
def test_ranks_may_be_interleaved_in_any_way(tmp_path, order):
    """Each rank's lines stay in order, and each has its own exception."""
    zero = ranked(0, TRACE.format("t.py", "KeyError: 'labels'")).splitlines(keepends=True)
    one = ranked(1, TRACE.format("t.py", "ValueError: bad")).splitlines(keepends=True)
    mixed = []
    for first in order:
        mixed += [(zero if first else one).pop(0)] if (zero if first else one) else []
    path = tmp_path / "a.log"
    path.write_text("".join(mixed + zero + one))
    failures = {(f.rank, f.type, f.message, len(f.frames)) for f in analyze_log(path).logs.failures}
    assert failures == {(0, "KeyError", "'labels'", 1), (1, "ValueError", "bad", 1)}
