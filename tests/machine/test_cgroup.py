"""Control groups of both versions, as files in a folder."""

import doctest
from pathlib import Path

import pytest

from dsdoctor.machine import cgroup

GIB = 1 << 30


def lay_out(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "sys"


def test_doctests():
    assert doctest.testmod(cgroup).failed == 0


def test_version_2_takes_the_least_limit_of_the_ancestors(tmp_path):
    proc, mount = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/mine\n",
            "sys/jobs/memory.max": f"{8 * GIB}\n",
            "sys/jobs/cpu.max": "max 100000\n",
            "sys/jobs/mine/memory.max": f"{16 * GIB}\n",
            "sys/jobs/mine/memory.current": f"{5 * GIB}\n",
            "sys/jobs/mine/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\n"
            f"slab_reclaimable {GIB // 2}\n",
            "sys/jobs/mine/memory.swap.max": "0\n",
            "sys/jobs/mine/cpu.max": "150000 100000\n",
            "sys/jobs/mine/memory.events": "low 0\noom 3\noom_kill 2\n",
        },
    )
    found = cgroup.read(proc, mount)
    assert found == cgroup.Cgroup(version=2, limit=8 * GIB, used=2 * GIB, swap=0, cpu_quota=1.5, oom_kills=2)


def test_version_2_without_limit_is_unlimited_not_unknown(tmp_path):
    proc, mount = lay_out(
        tmp_path,
        {"proc/self/cgroup": "0::/a\n", "sys/a/memory.max": "max\n", "sys/a/memory.current": "12\n"},
    )
    found = cgroup.read(proc, mount)
    assert (found.limit, found.used, found.cpu_quota, found.swap) == ("unlimited", 12, None, None)


def test_version_1_with_a_path_that_only_the_host_has(tmp_path):
    """A container without a cgroup namespace shows the host's path; its own group is the mount."""
    proc, mount = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/memory/memory.memsw.limit_in_bytes": f"{6 * GIB}\n",
            "sys/memory/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
            "sys/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "sys/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    found = cgroup.read(proc, mount)
    assert found == cgroup.Cgroup(version=1, limit=4 * GIB, used=2 * GIB, swap=2 * GIB, cpu_quota=2.0, oom_kills=1)


def test_version_1_no_limit(tmp_path):
    proc, mount = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "9:memory:/\n",
            "sys/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/memory/memory.memsw.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = cgroup.read(proc, mount)
    assert (found.limit, found.swap, found.used) == ("unlimited", "unlimited", None)


def test_a_path_that_leads_out_of_the_mount_is_not_followed(tmp_path):
    proc, mount = lay_out(
        tmp_path, {"proc/self/cgroup": "0::/../../x\n", "sys/memory.max": "5\n", "x/memory.max": "1\n"}
    )
    assert cgroup.read(proc, mount).limit == 5


def test_not_linux(tmp_path):
    with pytest.raises(OSError, match="cgroup"):
        cgroup.read(tmp_path, tmp_path)


def test_room_is_that_of_the_level_where_least_is_left(tmp_path):
    """A pod's or a job's limit holds for all groups in it together, so a group with little of its own may be full."""
    proc, mount = lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/job/memory.max": f"{16 * GIB}\n",
            "sys/job/memory.current": f"{15 * GIB}\n",
            "sys/job/step/memory.max": f"{8 * GIB}\n",
            "sys/job/step/memory.current": f"{1 * GIB}\n",
            "sys/job/step/memory.swap.current": "7\n",
        },
    )
    found = cgroup.read(proc, mount)
    assert (found.limit, found.used, found.swap_used) == (16 * GIB, 15 * GIB, 7)
