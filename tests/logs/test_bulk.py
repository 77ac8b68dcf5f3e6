"""Steps read in bulk: the same comes out as when every segment is read by itself."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsdoctor.logs.scan import Scanner
from dsdoctor.logs.source import Source, blocks
from dsdoctor.logs.story import Story

KEPT = 200
STAMP = "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:190:update_scale] "
OVERFLOW = STAMP + "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"


def understood(path, *, in_bulk):
    """What the log says: as it is read, or with every single segment looked at."""
    story = Story()
    source = Source(name=path.name, path=path)
    scanner = Scanner(source, story)
    if not in_bulk:
        scanner._lines.attention = 10**9
    scanner.scan(blocks(source))
    facts = story.facts((source.name,))
    return {
        "lines": facts.lines,
        "steps": facts.steps_seen,
        "failures": facts.failures,
        "ends": (facts.end, facts.exits),
        "events": [(event.kind, event.line, event.last_line, event.count, event.step) for event in facts.events],
        "series": [(s.name, s.thinned, [(p.step, repr(p.value), p.evidence) for p in s.points]) for s in facts.series],
        "scale": facts.loss_scale,
    }


@pytest.fixture(autouse=True)
def short_series(monkeypatch):
    """Thin early and in small blocks, so that short logs show what long ones do."""
    monkeypatch.setattr("dsdoctor.logs.series.KEEP", KEPT)
    monkeypatch.setattr("dsdoctor.logs.source.BLOCK", 1 << 15)
    monkeypatch.setattr("dsdoctor.logs.scan.SHORT", 0)
    monkeypatch.setattr("dsdoctor.logs.bulk.FEW", 2)


def same(path):
    in_bulk = understood(path, in_bulk=True)
    assert in_bulk == understood(path, in_bulk=False)
    return in_bulk


def trainer(count, *, prefix="", values=None):
    """What the Trainer prints: a bar, blanks over it, and the dict of the step."""
    for step in range(1, count + 1):
        loss, norm = values(step) if values is not None else (f"{3 - step / count:.4f}", repr(1 + math.sin(step)))
        cells = "█" * (step * 10 // count)
        yield f"\r {step * 100 // count:2d}%|{cells:10}| {step}/{count} [00:01<02:03,  1.{step % 9}it/s]"
        yield "\r" + " " * 40 + f"\r{prefix}"
        yield f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': {1e-3 / step}, 'epoch': {step / count:.2f}}}\n"


def test_a_log_of_the_trainer(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(trainer(1300)))
    series = {name: (thinned, points) for name, thinned, points in same(path)["series"]}
    thinned, points = series["loss"]
    assert thinned
    assert len(points) <= KEPT
    assert (points[0][0], points[-1][0]) == (1, 1300)
    assert [float(value) for _, value, _ in points] == sorted((float(v) for _, v, _ in points), reverse=True)


MEGATRON = (
    " iteration {0:8d}/ 5000 | consumed samples: {0} | elapsed time per iteration (ms): 12{0}.4 | learning rate: "
    "1.5{0:03d}E-05 | lm loss: {1:.6E} | loss scale: 131072.0 | grad norm: {1:.3f} |\n"
)
PLAIN = "[rank{2}]: [2024-03-20 12:15:{0:02d}] step {0}/5000 | loss {1:.4f} | grad_norm {1:.2f} | lr 3.00e-04\n"


def test_a_number_may_end_a_line(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"iter {step}: lr 0.5 loss {7 / step}\n" for step in range(1, 1500)))
    assert [points[-1][0] for _, _, points in same(path)["series"]] == [1499] * 2


DICT = "{{'loss': {1}, 'learning_rate': 1e-05, 'step': {0}}}\n"


@pytest.mark.parametrize("line", [MEGATRON, PLAIN, DICT, "steps: {0} loss: {1} iter time\n"])
def test_lines_that_number_their_steps(tmp_path, line):
    path = tmp_path / "a.log"
    path.write_text("".join(line.format(step, 12 / step, step % 2) for step in range(1, 1500)))
    got = same(path)
    assert got["steps"] == 1499
    assert [points[-1][0] for _, _, points in got["series"]] == [1499] * len(got["series"])


def test_every_rank_and_overflows_between(tmp_path):
    pieces = list(trainer(1200, prefix="[rank{}]: "))
    for at in range(300, len(pieces), 3 * 51):
        pieces[at] += OVERFLOW.format(2 ** (at % 7 + 9), 2 ** (at % 7 + 8))
    text = "".join(piece.format(at % 4) if "{}" in piece else piece for at, piece in enumerate(pieces))
    path = tmp_path / "a.log"
    path.write_text(text)
    assert same(path)["scale"].attempts


@pytest.mark.parametrize("odd", ["nan", "inf", "-1.5", "12.5", "1e+10", "0", "3e-05", "'0.25'", "9.9e-100", "None"])
def test_values_of_any_form(tmp_path, odd):
    def values(step):
        return (odd if step % 97 == 5 else f"{2.5 - step % 89 / 100}", odd if step > 1100 else f"{step % 83 / 9 + 0.1}")

    path = tmp_path / "a.log"
    path.write_text("".join(trainer(1150, values=values)))
    same(path)


def test_epochs_whose_bars_start_anew(tmp_path):
    lines = [
        f"Epoch {epoch}: {step}%|█ | {step}/100 [00:01<00:02, 3.1it/s]\r" + ("{'loss': %.3f}\n" % (1 / step))
        for epoch in range(30)
        for step in range(1, 101)
    ]
    path = tmp_path / "a.log"
    path.write_text("".join(lines))
    assert same(path)["steps"] == 3000


def test_only_bars_and_no_line_end(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"\r {i // 30}%|█ | {i}/3000 [00:01<00:02, 3.1it/s]" for i in range(3000)))
    assert (same(path)["steps"], same(path)["lines"]) == (2999, 1)


def test_an_exception_that_training_survives_and_one_that_it_does_not(tmp_path):
    trace = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    x\nKeyError: {}\n'
    pieces = list(trainer(900))
    pieces[1200] += "\n" + trace.format(1)
    path = tmp_path / "a.log"
    path.write_text("".join(pieces) + trace.format(2))
    assert [failure.message for failure in same(path)["failures"]] == ["2"]


INFO = "[2024-03-20 12:15:47,438] [INFO] [logging.py:96:log_dist] [Rank 0] "
LINES = st.sampled_from(
    [
        "{'loss': 1.5, 'grad_norm': nan, 'learning_rate': 1e-05}\n",
        "{'loss': 0.25, 'grad_norm': 11.5, 'learning_rate': 2.5e-05}\n",
        "[rank2]: {'loss': '3.5', 'grad_norm': '1.5'}\r\n",
        "{'eval_loss': 2.0, 'epoch': 1.0}\n",
        "{'loss': 2.0, 'step': nan}\n",
        "{'loss': 2.0, 'step': 11}\n",
        "\r 10%|█ | 3/30 [00:04<00:05,  8.90it/s]",
        "\r 20%|█ | 9/30 [00:04<00:05,  8.90it/s]{'loss': 1.25}\n",
        "Epoch 2:  10%|█ | 1/30 [00:04<00:05,  8.90it/s]\r",
        "Map: 100%|█ | 70/70 [00:04<00:05,  8.90it/s]\n",
        OVERFLOW.format(65536, 32768),
        "step 7 loss 2.25\n",
        *(MEGATRON.format(step, 1.5) for step in (3, 8)),
        MEGATRON.format(9, 2.5)[:-1] + " number of skipped iterations:   1 |\n",
        *(
            f"{INFO}step={step}, skipped={skipped}, lr=[1e-05], mom=[0.9]\n"
            for step, skipped in ((5, 0), (6, 1), (7, 1))
        ),
        INFO + "time (ms) | fwd: 1.50 | bwd: 2.50 | step: 3.50\n",
        "\r 10%|█▏ | 4/30 [00:04<00:05,  8.90it/s, loss=1.25]",
        *(f"node0{at}:1{at}:2{at} [{at}] NCCL INFO Channel 0{at}/1 : 0[0] -> 1[1] via P2P/CUMEM\n" for at in range(3)),
        "[rank1]: node0:1:2 [1] NCCL INFO Channel 00/1 : 0[0] -> 1[1] via P2P/CUMEM\n",
        "plain text 12\n",
        "got signal: 1\n",
        "got signal: 9\n",
        "\n",
    ]
)


def deepspeed(count):
    for step in range(1, count):
        yield f"{INFO}step={step}, skipped={step // 400}, lr=[{1 / step}], mom=[0.9]\n"
        yield f"{INFO}time (ms) | fwd: {step}.50 | bwd: 2.{step} | bwd_inner: 1.0 | step: 3.50\n"


def tqdm(count):
    for step in range(count):
        bar = "█" * (step * 10 // count)
        yield f"\r {step}%|{bar:10}| {step}/{count} [00:04<00:05,  8.90it/s, loss={7 / (step + 1):.4f}]"


def nccl(count):
    for at in range(count):
        yield f"[rank{at % 3}]: node{at % 2}:{at}:2 [1] NCCL INFO Channel {at % 32} : 0[0] -> 1[1] via P2P/CUMEM\n"


@pytest.mark.parametrize("told", [deepspeed, tqdm, nccl])
def test_other_repeated_lines(tmp_path, told):
    path = tmp_path / "a.log"
    path.write_text("".join(told(900)))
    got = same(path)
    assert got["series"] or sum(count for _, _, _, count, _ in got["events"]) == 900


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(LINES, max_size=40))
def test_any_mixture(tmp_path, lines):
    path = tmp_path / "a.log"
    path.write_bytes("".join(lines).encode())
    same(path)


START = "[2024-03-20 12:15:47,438] [INFO] [launch.py:145:main] WORLD INFO DICT: {'localhost': [0, 1]}\n"
RAISED = 'Traceback (most recent call last):\n  File "/home/u/t.py", line 1, in f\n    x\nKeyError: 1\n'


@pytest.mark.parametrize("again", [700, 1500])
def test_a_job_that_was_started_again(tmp_path, again):
    path = tmp_path / "a.log"
    bad = trainer(1300, values=lambda step: ("nan" if step > 900 else "2.5", "1.5"))
    path.write_text("".join((START, *bad, RAISED, START, *trainer(again))))
    got = same(path)
    values = {value for name, _, points in got["series"] if name == "loss" for _, value, _ in points}
    assert ("nan" in values) == (again < 1300), "the second attempt counts alone if it came as far as the first"
    assert got["failures"] == ()


def test_prefixes_that_are_learned(tmp_path):
    path = tmp_path / "a.log"
    lines = [PLAIN.format(step, 12 / step, step % 2) for step in range(1, 900)]
    lines[400:400] = RAISED.splitlines(keepends=True)
    path.write_text("".join(f"[job a/{at % 3}] {line}" for at, line in enumerate(lines)))
    assert same(path)["steps"] == 899
