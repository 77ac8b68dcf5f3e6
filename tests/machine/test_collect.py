"""MachineFacts from probes: real ones of this machine, and ones that fail in every way."""

import json
import sys
import time
from pathlib import Path

import pytest

from dsdoctor.machine.collect import collect, gather, parse_libraries
from dsdoctor.machine.facts import Device, MachineFacts


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_this_machine_as_the_kernel_says(tmp_path):
    """Against sources of its own: /proc and the installed distributions."""
    facts = collect(folder=tmp_path, probe_command=child("print('{\"errors\": []}')"))
    kib = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert facts.memory_total == int(kib["MemTotal"].split()[0]) * 1024
    assert facts.host_available is not None
    assert 0 < facts.host_available <= facts.memory_total
    assert facts.python.startswith("3.")
    assert facts.disks[0].path == str(tmp_path)
    assert not facts.not_collected
    json.dumps(facts.to_dict())


def test_torch_and_deepspeed_are_asked_in_another_process(tmp_path):
    """One real run of the probe: the parent must not have torch, the answer must."""
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    facts = collect(config=config, folder=tmp_path, timeout=120)
    assert not facts.not_collected
    assert facts.versions["torch"].startswith("2.")
    assert facts.accelerator in ("cpu", "cuda")
    assert facts.bf16 is not None
    assert "cpu_adam" in [op.name for op in facts.ops]
    (adam,) = (op for op in facts.ops if op.name == "cpu_adam")
    assert adam.needed_by == "optimizer.type"
    assert adam.compatible


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('no libcudart')", "ended with 1: no libcudart"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("print('[WARNING] not JSON')", "JSONDecodeError"),
        ("print('[1]')", "not an object"),
    ],
)
def test_a_probe_that_fails_is_recorded_and_the_rest_is_kept(tmp_path, code, why):
    facts = collect(folder=tmp_path, probe_command=child(code))
    (missed,) = facts.not_collected
    assert missed.probe == "torch and DeepSpeed"
    assert why in missed.why
    assert facts.memory_total
    assert facts.versions["torch"]  # from the installed distributions


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    code = (
        "import subprocess, sys, pathlib, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(other.pid))\n"
        "time.sleep(600)"
    )
    facts = collect(folder=tmp_path, timeout=2, probe_command=child(code))
    assert "no answer within 2 s" in facts.not_collected[0].why
    grandchild = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grandchild.exists() or grandchild.read_text().split()[2] == "Z"


def test_a_folder_that_is_not_there(tmp_path):
    facts = collect(folder=tmp_path / "gone", probe_command=child("print('{\"errors\": []}')"))
    assert [missed.probe for missed in facts.not_collected] == ["disks"]
    assert facts.disks == ()


def test_versions_are_joined_and_the_later_probe_wins():
    def broken() -> dict:
        raise PermissionError("no")

    facts = gather(
        [
            ("a", lambda: {"versions": {"torch": "2.1", "numpy": "1"}, "cores": 1}),
            ("b", broken),
            ("c", lambda: {"versions": {"torch": "2.1+cu121"}, "cores": 2}),
        ]
    )
    assert facts.versions == {"torch": "2.1+cu121", "numpy": "1"}
    assert facts.cores == 2
    assert facts.not_collected[0].probe == "b"


def test_answer_of_the_probe():
    answer = {
        "versions": {"torch": "2.4"},
        "errors": [["accelerator", "ImportError: libcudart"]],
        "devices": [
            {"index": 0, "uuid": "u", "name": "H100", "capability": [9, 0], "total_bytes": 80, "free_bytes": 70}
        ],
        "ops": [{"name": "fused_adam", "needed_by": "optimizer.type", "compatible": False, "missing": ["ninja"]}],
        "something_newer": 1,
    }
    found = parse_libraries(json.dumps(answer))
    assert found["devices"] == (
        Device(index=0, uuid="u", name="H100", capability=(9, 0), total_bytes=80, free_bytes=70),
    )
    assert found["ops"][0].missing == ("ninja",)
    assert found["not_collected"][0].why == "ImportError: libcudart"
    assert "something_newer" not in found


def test_the_least_room_counts():
    assert MachineFacts(memory_available=10, cgroup_limit=8, cgroup_used=5).host_available == 3
    assert MachineFacts(memory_available=10, cgroup_limit="unlimited", cgroup_used=5).host_available == 10
    assert MachineFacts(memory_available=2, cgroup_limit=8, cgroup_used=5).host_available == 2
    assert MachineFacts(memory_available=2, cgroup_limit=8, cgroup_used=9).host_available == 0
    assert MachineFacts().host_available is None
