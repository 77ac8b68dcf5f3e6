"""Links and their speeds, from what nvidia-smi and the kernel print (documented or recorded output)."""

import doctest
import subprocess

import pytest

from dsdoctor.machine import interconnect
from dsdoctor.machine.interconnect import Way, ask, ethernet, parse, parse_nvlink, parse_topology, ports

# nvidia-smi topo -m, of a machine whose first two GPUs have an NVLink bridge
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNODE\t32-63\t1\t\tN/A
NIC0\tPXB\tPXB\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
# nvidia-smi nvlink -s
NVLINK = """\
GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-a0)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100 80GB PCIe (UUID: GPU-a1)
\t Link 0: <inactive>
\t Link 1: 25 GB/s
GPU 2: NVIDIA A100 80GB PCIe (UUID: GPU-a2)
\t Link 0: <inactive>
"""
GPUS = "0, GPU-a0, 4, 16, 16\n1, GPU-a1, 4, 16, 16\n2, GPU-a2, 4, 16, 4\n3, GPU-a3, [N/A], [N/A], [N/A]\n"


def answers(line: list[str], timeout: float) -> tuple[int, str]:
    if line[1] == "topo":
        return 0, TOPOLOGY
    return 0, NVLINK if line[1] == "nvlink" else GPUS


def test_doctests():
    assert doctest.testmod(interconnect).failed == 0


def test_the_way_between_two_gpus():
    """12 links of 25 GB/s; a PCIe 4.0 lane is 1.969 GB/s, of which 16 are there and 4 are in use."""
    links = parse(ask(answers, lambda name: name))
    assert links.between("a1", "a0") == Way(name="NVLink (NV12)", best=300e9)
    far = links.between("a0", "a2")
    assert far.name == "PCIe (SYS, 4 of 16 lanes in use)"
    assert far.best == pytest.approx(31.5e9, rel=1e-2)
    assert links.between("a0", "a3") == Way(name="PCIe (?)")  # its slot is not known
    assert links.between("a0", "somewhere else") is None


def test_without_or_with_a_broken_nvidia_smi():
    def hangs(line, timeout):
        raise subprocess.TimeoutExpired(line, timeout)

    assert ask(answers, lambda name: None) == {}
    assert parse(ask(hangs, lambda name: name)).between("a0", "a1") is None
    assert parse(ask(lambda line, timeout: (9, "NVIDIA-SMI has failed"), lambda name: name)).gpus == {}


@pytest.mark.parametrize("text", ["", "GPU0\tCPU Affinity\nGPU0\t X \t0-15\n", "garbage\n\nGPU0\n"])
def test_a_topology_of_one_gpu_or_none(text):
    assert parse_topology(text) == {}


def test_links_that_are_down():
    assert parse_nvlink("GPU 0: H100 (UUID: GPU-1)\n Link 0: <inactive>\n Link 1: 0 GB/s\n Link 2: 26.562 GB/s\n") == {
        0: 26.562e9
    }


def test_ports(tmp_path):
    """The kernel's text: /sys/class/infiniband/CARD/ports/N/{rate,state}."""
    for card, rate, state in [
        ("mlx5_0", "200 Gb/sec (4X HDR)\n", "4: ACTIVE\n"),
        ("mlx5_1", "2.5 Gb/sec (1X SDR)\n", "1: DOWN\n"),
        ("mlx5_2", "", "4: ACTIVE\n"),
    ]:
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate)
        (port / "state").write_text(state)
    assert ports(tmp_path) == {"mlx5_0:1": 25e9}
    assert ports(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("speed", "has", "expected"),
    [("10000\n", "device", 1.25e9), ("10000\n", "bonding", 1.25e9), ("10000\n", "", None), ("-1\n", "device", None)],
)
def test_ethernet(tmp_path, speed, has, expected):
    """Mb/s; a veth has no device and says 10000 all the same, a virtual card says -1."""
    (tmp_path / "eth0" / has).mkdir(parents=True)
    (tmp_path / "eth0" / "speed").write_text(speed)
    assert ethernet("eth0", tmp_path) == expected


def test_an_interface_that_gives_no_speed(tmp_path):
    (tmp_path / "eth0" / "device").mkdir(parents=True)
    assert ethernet("eth0", tmp_path) is None
    assert ethernet("", tmp_path) is None
