"""Logs as a whole: what is certain, what a cut leaves, and the Python API."""

import json

import pytest

import dsdoctor
from dsdoctor.analysis import DOUBTFUL, analyze_log

STEPS = "".join(f"step {i} loss {3 - i / 50:.3f}\n" for i in range(1, 25))
TRACE = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 7, in main\n    loss = step(x)\n'
    '  File "/env/lib/python3.11/site-packages/{}", line 9, in f\n    g()\n{}\n'
)
OOM = TRACE.format(
    'deepspeed/runtime/engine.py", line 3, in backward\n    h()\n  File "/env/lib/python3.11/site-packages/x.py',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 has a total capacity of 79.15 GiB.",
)
KEY = TRACE.format("torch/utils/data/dataloader.py", "KeyError: 'label'")
EXIT = "[2024-03-20 12:15:47,438] [ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = {}\n"
FALLS = "".join(
    "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:1:u] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    f"Attempted loss scale: {2**p}, reducing to {max(1, 2 ** (p - 1))}\n"
    for p in range(16, -1, -1)
)
MINIMUM = TRACE.format(
    "deepspeed/runtime/fp16/loss_scaler.py",
    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
)
LOGS = {
    "launch/user-exception": STEPS + KEY + EXIT.format(1),
    "memory/gpu-oom-step": STEPS + OOM + EXIT.format(1),
    "memory/host-oom-kill": STEPS + EXIT.format(-9),
    "loss-scale/collapse": FALLS + MINIMUM + EXIT.format(1),
}


def analyzed(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    return analyze_log(path)


@pytest.mark.parametrize("identifier", LOGS)
def test_the_whole_log(tmp_path, identifier):
    assert analyzed(tmp_path, LOGS[identifier]).findings[0].id == identifier


@pytest.mark.parametrize("identifier", LOGS)
def test_a_cut_log_says_the_same_or_doubts(tmp_path, identifier):
    text = LOGS[identifier]
    known = {finding.id for finding in analyzed(tmp_path, text).findings}
    for cut in range(0, len(text), 17):
        for finding in analyzed(tmp_path, text[:cut]).findings[:1]:
            if finding.severity == "error" and finding.id not in known:
                assert finding.confidence <= DOUBTFUL, f"{finding.id} at {cut}: {text[:cut][-80:]!r}"
                assert finding.caveat


def test_an_exception_that_nobody_died_of_is_doubted(tmp_path):
    prose = "The answer of the model goes on here.\n" * 8
    (finding,) = analyzed(tmp_path, STEPS + KEY + "\n" + prose).findings
    assert finding.confidence <= DOUBTFUL
    assert "goes on" in finding.caveat
    (certain,) = analyzed(tmp_path, STEPS + KEY).findings
    assert certain.confidence > DOUBTFUL


def test_the_python_api(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(STEPS + KEY)
    document = dsdoctor.analyze_log([path]).to_dict()
    assert document["exit_code"] == 1
    assert document["findings"][0]["id"] == "launch/user-exception"
    assert json.loads(json.dumps(document, default=str))["understood"]["steps_seen"] == 24


def test_the_config_beside_the_log(tmp_path):
    """The window of the config tells a probe once a window from thrashing."""
    line = "[2024-03-20 12:15:47,438] [INFO] [loss_scaler.py:1:u] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
    text, step = "", 0
    for _ in range(8):
        text += "".join(f"step {i} loss 2.0\n" for i in range(step + 1, step + 31))
        step += 30
        text += f"{line}Attempted loss scale: 131072, reducing to 65536\n"
    path, config = tmp_path / "train.log", tmp_path / "ds.json"
    path.write_text(text)
    for window, expected in ((20, "loss-scale/periodic"), (1000, "loss-scale/thrash")):
        config.write_text(json.dumps({"fp16": {"enabled": True, "loss_scale_window": window, "hysteresis": 1}}))
        assert expected in {finding.id for finding in analyze_log(path, config=config).findings}
