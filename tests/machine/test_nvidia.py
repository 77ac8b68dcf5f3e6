"""The driver's GPUs, from recorded output of nvidia-smi."""

import doctest

import pytest

from dsdoctor.machine import nvidia

# nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free,driver_version,compute_cap
#            --format=csv,noheader,nounits
TWO_GPUS = """\
0, GPU-5d2f0f60-2f5b-7a1c-0e1d-3a1f7b6c9d10, NVIDIA A100-SXM4-80GB, 81920, 81042, 550.54.15, 8.0
1, GPU-a1b2c3d4-0000-1111-2222-333344445555, NVIDIA A100-SXM4-80GB, 81920, 412, 550.54.15, 8.0
"""
JETSON = "0, GPU-1, Orin (nvgpu), [N/A], [N/A], 540.4.0, [N/A]\n"


def test_doctests():
    assert doctest.testmod(nvidia).failed == 0


def test_two_gpus():
    devices, driver = nvidia.parse(TWO_GPUS)
    assert driver == "550.54.15"
    assert [device.index for device in devices] == [0, 1]
    assert devices[0].uuid == "5d2f0f60-2f5b-7a1c-0e1d-3a1f7b6c9d10"  # as torch shows it, without the prefix
    assert devices[0].total_bytes == 81920 * 1024 * 1024
    assert devices[1].free_bytes == 412 * 1024 * 1024
    assert devices[1].capability == (8, 0)


def test_values_that_the_driver_does_not_know():
    (device,), _ = nvidia.parse(JETSON)
    assert (device.total_bytes, device.free_bytes, device.capability) == (None, None, None)


def test_not_installed():
    assert nvidia.gpus(which=lambda name: None) == {}


def test_installed_and_failing():
    message = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    with pytest.raises(RuntimeError, match="ended with 9: NVIDIA-SMI has failed"):
        nvidia.gpus(command=lambda command, timeout: (9, message), which=lambda name: name)


def test_asks_for_what_it_parses():
    asked = []

    def command(line: list[str], timeout: float) -> tuple[int, str]:
        asked.extend(line)
        return 0, TWO_GPUS

    found = nvidia.gpus(command=command, which=lambda name: f"/usr/bin/{name}")
    assert "--query-gpu=" + ",".join(nvidia.QUERY) in asked
    assert found["versions"] == {"driver": "550.54.15"}


# nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name,used_memory --format=csv,noheader,nounits
PROCESSES = """\
GPU-5d2f0f60-2f5b-7a1c-0e1d-3a1f7b6c9d10, 4711, /usr/bin/python3, 71680
GPU-5d2f0f60-2f5b-7a1c-0e1d-3a1f7b6c9d10, 4712, [Not Found], [N/A]
"""


def test_processes_on_the_gpus():
    asked = []

    def command(line: list[str], timeout: float) -> tuple[int, str]:
        asked.extend(line)
        return 0, PROCESSES

    known, hidden = nvidia.processes(command, lambda name: name)["gpu_processes"]
    assert "--query-compute-apps=" + ",".join(nvidia.PROCESSES) in asked
    assert (known.uuid, known.pid) == ("5d2f0f60-2f5b-7a1c-0e1d-3a1f7b6c9d10", 4711)
    assert known.used_bytes == 71680 * 1024 * 1024
    assert hidden.used_bytes is None


def test_no_process_and_no_driver():
    assert nvidia.parse_processes("") == ()
    assert nvidia.parse_processes("No running processes found\n") == ()
    assert nvidia.processes(which=lambda name: None) == {}
    with pytest.raises(RuntimeError, match="ended with 9"):
        nvidia.processes(lambda line, timeout: (9, "NVIDIA-SMI has failed"), lambda name: name)
