"""Numbers for people."""

from __future__ import annotations


def size(count: int | None) -> str:
    """A number of bytes in binary units, `unknown` for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def seconds(count: float) -> str:
    """A duration: `0.4 s`, `12 s`, `3 min 5 s`."""
    if count < 10:
        return f"{count:.1f} s"
    if count < 60:
        return f"{count:.0f} s"
    return f"{int(count) // 60} min {int(count) % 60} s"


def rate(count: float) -> str:
    """Bytes a second, in powers of ten as links are sold: `1.3 GB/s`."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.1f} kB/s"
