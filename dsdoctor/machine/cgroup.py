"""What the control group allows this process: memory, swap, CPU. Reads `/proc/self/cgroup` and `/sys/fs/cgroup`.

Both versions and the mixed set-up are understood. A limit of any ancestor holds too, and whatever runs below that
ancestor counts against it, so the level with the least room along the path counts. In a container the path of
`/proc/self/cgroup` may not exist below the mount: then the mount is the group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.machine.facts import Limit

_V1_NO_LIMIT = 1 << 60
"""Version 1 shows "no limit" as the largest multiple of the page size below 2^63; no machine has 2^60 bytes."""


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """Limits in bytes and cores, None where the file is not there.

    `limit` and `used` are of the level with the least room, without page cache that the kernel can drop. `swap` is the
    least limit of swap, `swap_used` what the own group holds there. `oom_kills` counts since the group was made.
    """

    version: int | None = None
    limit: Limit = None
    used: int | None = None
    swap: Limit = None
    swap_used: int | None = None
    cpu_quota: float | None = None
    oom_kills: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """Files of one version: limit, usage, prefix of the names in memory.stat that count a whole subtree."""

    limit: str
    usage: str
    prefix: str


_V1 = _Memory(limit="memory.limit_in_bytes", usage="memory.usage_in_bytes", prefix="total_")
_V2 = _Memory(limit="memory.max", usage="memory.current", prefix="")


def read(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> Cgroup:
    """The control group of this process. Raises OSError where there is no `/proc/self/cgroup` (not Linux)."""
    paths = parse_proc_cgroup((proc / "self" / "cgroup").read_text(encoding="utf-8"))
    if "memory" in paths:
        return _read_v1(mount, paths)
    return _read_v2(mount, paths.get("", "/")) if "" in paths else Cgroup()


def oom_kills() -> int:
    """Out-of-memory kills so far: the control group's count, the machine's where it has none (the top group of
    version 2 has no counter), 0 where nothing tells."""
    with contextlib.suppress(OSError):
        count = read().oom_kills
        return count if count is not None else parse_stat(_text(Path("/proc/vmstat"))).get("oom_kill", 0)
    return 0


def parse_proc_cgroup(text: str) -> dict[str, str]:
    """Map each controller to its path; version 2 has the key "".

    >>> parse_proc_cgroup("5:memory:/job\\n2:cpu,cpuacct:/job\\n0::/")
    {'memory': '/job', 'cpu': '/job', 'cpuacct': '/job', '': '/'}
    """
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def parse_limit(text: str | None) -> Limit:
    """One limit file of either version.

    >>> parse_limit("max\\n"), parse_limit("1073741824\\n"), parse_limit("9223372036854771712"), parse_limit(None)
    ('unlimited', 1073741824, 'unlimited', None)
    """
    if text is None:
        return None
    word = text.strip()
    if word == "max" or (word.isdigit() and int(word) >= _V1_NO_LIMIT):
        return "unlimited"
    return int(word) if word.isdigit() else None


def parse_stat(text: str | None) -> dict[str, int]:
    """Lines of "name number", as in memory.stat and memory.events."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _read_v2(mount: Path, path: str) -> Cgroup:
    group = _group(mount, path)
    limit, used = _narrowest(_V2, group, mount)
    return Cgroup(
        version=2,
        limit=limit,
        used=used,
        swap=_least(parse_limit(_text(folder / "memory.swap.max")) for folder in _upwards(group, mount)),
        swap_used=_number(group / "memory.swap.current"),
        cpu_quota=_least_quota(_quota_v2(_text(folder / "cpu.max")) for folder in _upwards(group, mount)),
        oom_kills=parse_stat(_text(group / "memory.events")).get("oom_kill"),
    )


def _read_v1(mount: Path, paths: dict[str, str]) -> Cgroup:
    """Version 1 limits memory and swap together; what that leaves beyond the memory is swap."""
    top = mount / "memory"
    group = _group(top, paths["memory"])
    limit, used = _narrowest(_V1, group, top)
    alone = _least(parse_limit(_text(folder / _V1.limit)) for folder in _upwards(group, top))
    both = _least(parse_limit(_text(folder / "memory.memsw.limit_in_bytes")) for folder in _upwards(group, top))
    charged = [_number(group / name) for name in ("memory.memsw.usage_in_bytes", _V1.usage)]
    return Cgroup(
        version=1,
        limit=limit,
        used=used,
        swap=max(0, both - alone) if isinstance(both, int) and isinstance(alone, int) else both,
        swap_used=max(0, charged[0] - charged[1]) if charged[0] is not None and charged[1] is not None else None,
        cpu_quota=_quota_v1(mount, paths.get("cpu")),
        oom_kills=parse_stat(_text(group / "memory.oom_control")).get("oom_kill"),
    )


def _narrowest(files: _Memory, group: Path, mount: Path) -> tuple[Limit, int | None]:
    """Limit and use of the level with the least room; without any limit, "unlimited" or None and the group's use."""
    own = _used(files, group)
    limits = [(parse_limit(_text(folder / files.limit)), folder) for folder in _upwards(group, mount)]
    bounded = [(limit, max(own or 0, _used(files, folder) or 0)) for limit, folder in limits if isinstance(limit, int)]
    if not bounded:
        return _least(limit for limit, _ in limits), own
    limit, used = min(bounded, key=lambda pair: pair[0] - pair[1])
    return limit, used if used or own is not None else None


def _quota_v1(mount: Path, path: str | None) -> float | None:
    if path is None:
        return None
    top = mount / "cpu"
    found = []
    for folder in _upwards(_group(top, path), top):
        quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        found.append(_quota_v2(f"{quota or ''} {period or ''}"))
    return _least_quota(iter(found))


def _quota_v2(text: str | None) -> float | None:
    """Cores of a `cpu.max` line ("200000 100000" = 2 cores), None without a quota."""
    words = (text or "").split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _used(files: _Memory, group: Path) -> int | None:
    """What is charged to the group and all below it, less the caches (of files' pages, of names) that the kernel drops
    before it kills."""
    charged = _number(group / files.usage)
    if charged is None:
        return None
    stat = parse_stat(_text(group / "memory.stat"))
    cache = sum(stat.get(f"{files.prefix}{kind}", 0) for kind in ("inactive_file", "active_file", "slab_reclaimable"))
    return max(0, charged - cache)


def _number(path: Path) -> int | None:
    found = parse_limit(_text(path))
    return found if isinstance(found, int) else None


def _group(mount: Path, path: str) -> Path:
    group = mount / path.lstrip("/")
    return group if ".." not in path and group.is_dir() else mount


def _upwards(group: Path, mount: Path) -> Iterator[Path]:
    yield group
    while group not in (mount, group.parent):
        group = group.parent
        yield group


def _least(limits: Iterator[Limit]) -> Limit:
    found = [limit for limit in limits if limit is not None]
    numbers = [limit for limit in found if isinstance(limit, int)]
    return min(numbers) if numbers else ("unlimited" if found else None)


def _least_quota(quotas: Iterator[float | None]) -> float | None:
    return min((quota for quota in quotas if quota is not None), default=None)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
