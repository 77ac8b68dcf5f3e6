"""Where logs come from: files, folders, compressed files, standard input, in any encoding, as blocks of UTF-8 bytes.

Blocks end at line ends, so that a block can be searched as a whole; nothing is ever read as a whole. A line that is
longer than a block is handed on in pieces.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BLOCK = 1 << 18
"""Bytes read at once; also the longest piece of a line."""
STDIN = "-"

_NOT_LOGS = {
    ".bin", ".safetensors", ".pt", ".pth", ".npy", ".npz", ".so", ".o", ".pyc", ".png", ".jpg", ".pdf", ".zip",
    ".tar", ".whl", ".json", ".jsonl", ".arrow", ".parquet", ".pkl", ".model", ".py", ".ipynb", ".md", ".html",
    ".csv", ".yaml", ".yml", ".toml",
}  # fmt: skip
_RANK_IN_NAME = re.compile(r"(?<![a-z])(?:global_?)?rank[-_.]?(\d+)", re.IGNORECASE)
_TORCHRUN_NAME = re.compile(r"[/\\](\d+)[/\\]std(?:out|err)\.log$")


class Unreadable(Exception):
    """An input cannot be read; the message is one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input. `name` is what evidence calls it; `rank` what its name says, None if it says nothing."""

    name: str
    path: Path | None
    rank: int | None = None


def find(paths: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """The inputs that these paths stand for: files, all logs of a folder in natural order, `-` for standard input.

    Raises Unreadable for a path that does not exist and for a folder without logs.
    """
    found: list[Source] = []
    for given in paths:
        if str(given) == STDIN:
            found.append(Source(name="<stdin>", path=None))
            continue
        path = Path(given)
        if path.is_dir():
            found.extend(_of_folder(path))
        elif path.exists():
            found.append(Source(name=str(given), path=path))
        else:
            raise Unreadable(f"{given}: no such file or folder")
    return found


def blocks(source: Source) -> Iterator[bytes]:
    """The text of a source as UTF-8 blocks that end at line ends. Raises Unreadable, possibly after some blocks."""
    try:
        with _open(source) as stream:
            yield from _whole_lines(_decoded(stream))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise Unreadable(f"{source.name}: the compressed file is damaged or cut off ({error})") from None
    except OSError as error:
        raise Unreadable(f"{source.name}: {error.strerror or error}") from None


def _of_folder(folder: Path) -> list[Source]:
    files = [path for path in folder.rglob("*") if path.is_file() and _is_log(path)]
    if not files:
        raise Unreadable(f"{folder}: no log in this folder")
    return [Source(name=str(path), path=path, rank=_rank_of(path)) for path in sorted(files, key=_natural)]


def _is_log(path: Path) -> bool:
    """True if the name may be a log's and the beginning is text."""
    if path.suffix.lower() in _NOT_LOGS or path.name.startswith("."):
        return False
    if path.suffix in (".gz", ".zst"):
        return True
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError:
        return False
    return b"\0" not in head or _utf16(head) is not None


def _rank_of(path: Path) -> int | None:
    match = _RANK_IN_NAME.search(path.name) or _TORCHRUN_NAME.search(str(path))
    return int(match[1]) if match else None


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key by which rank10 comes after rank9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _open(source: Source) -> IO[bytes]:
    if source.path is None:
        return io.BufferedReader(sys.stdin.buffer.raw) if hasattr(sys.stdin.buffer, "raw") else sys.stdin.buffer
    raw = source.path.open("rb")
    head = raw.peek(4)[:4] if isinstance(raw, io.BufferedReader) else b""
    if head[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if head == b"\x28\xb5\x2f\xfd":
        return _open_zstd(source, raw)
    return raw


def _open_zstd(source: Source, raw: IO[bytes]) -> IO[bytes]:
    """A .zst file, if any of the modules that read them is there (Python 3.14 has one of its own)."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return zstd.open(raw)  # type: ignore[no-any-return, unused-ignore]
    except ImportError:
        pass
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]

        return zstandard.ZstdDecompressor().stream_reader(raw)  # type: ignore[no-any-return, unused-ignore]
    except ImportError:
        raise Unreadable(f"{source.name}: .zst needs the package zstandard (pip install zstandard)") from None


def _decoded(stream: IO[bytes]) -> Iterator[bytes]:
    """Blocks as they come, UTF-16 turned into UTF-8."""
    head = stream.read(BLOCK)
    encoding = _utf16(head)
    if encoding is None:
        yield head.removeprefix(codecs.BOM_UTF8)
        while block := stream.read(BLOCK):
            yield block
        return
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    while head:
        yield decoder.decode(head).encode("utf-8", "replace")
        head = stream.read(BLOCK)


def _utf16(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:400]
    if len(sample) >= 8 and sample[1::2].count(0) > len(sample) * 0.4:
        return "utf-16-le"
    return "utf-16-be" if len(sample) >= 8 and sample[0::2].count(0) > len(sample) * 0.4 else None


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Regroup blocks so that each ends at a line end, or holds a piece of one very long line."""
    rest = b""
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield rest + piece[:end]
            rest = piece[end:]
        else:
            rest += piece
            if len(rest) >= BLOCK:
                yield rest
                rest = b""
    if rest:
        yield rest
