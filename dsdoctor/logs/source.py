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
from typing import IO, Any

BLOCK = 1 << 20
"""Bytes read at once; also the longest piece of a line."""
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
STDIN = "-"
_PACKED = {b"PK\x03\x04": "unzip -p", b"BZh": "bzip2 -dc", b"\xfd7zXZ\x00": "xz -dc"}
"""What unpacks a file that begins so; dsdoctor itself does not."""
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ufffd]")
_HEAD = 8192

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
    except Exception as error:
        if type(error).__name__ != "ZstdError":  # of whichever module reads .zst here
            raise
        raise Unreadable(f"{source.name}: the compressed file is damaged or cut off ({error})") from None


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


def is_compressed(source: Source) -> bool:
    """True if the file begins like one of gzip or zstd. Raises Unreadable."""
    if source.path is None or not source.path.is_file():
        return False
    try:
        with source.path.open("rb") as stream:
            return stream.read(4).startswith((GZIP, ZSTD))
    except OSError as error:
        raise Unreadable(f"{source.name}: {error.strerror or error}") from None


def open_plain(source: Source) -> IO[bytes]:
    """The bytes of a source as they are, without a buffer. Raises Unreadable."""
    try:
        return open(0, "rb", buffering=0, closefd=False) if source.path is None else source.path.open("rb", buffering=0)
    except OSError as error:
        raise Unreadable(f"{source.name}: {error.strerror or error}") from None


def _open(source: Source) -> IO[bytes]:
    if source.path is None:
        return io.BufferedReader(sys.stdin.buffer.raw) if hasattr(sys.stdin.buffer, "raw") else sys.stdin.buffer
    raw = source.path.open("rb")
    head = raw.peek(6) if isinstance(raw, io.BufferedReader) else b""
    if head.startswith(GZIP):
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if head.startswith(ZSTD):
        return _open_zstd(source, raw)
    for begins, command in _PACKED.items():
        if head.startswith(begins):
            raise Unreadable(f"{source.name}: unpack it first: {command} {source.path} | dsdoctor log -")
    return raw


def is_binary(block: bytes) -> bool:
    """True if the beginning of what `blocks` gives holds so many control characters or bad bytes that it is no text."""
    head = block[:_HEAD].decode("utf-8", "replace")
    return len(_NO_TEXT.findall(head)) > len(head) / 10


def _open_zstd(source: Source, raw: IO[bytes]) -> IO[bytes]:
    """A .zst file, if any of the modules that read them is there (Python 3.14 has one of its own)."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return zstd.open(raw)  # type: ignore[no-any-return, unused-ignore]
    except ImportError:
        pass
    try:
        import zstandard

        return _ZstdFrames(raw, zstandard.ZstdDecompressor())  # type: ignore[return-value]
    except ImportError:
        hint = f"pip install zstandard, or: zstd -dc {source.path} | dsdoctor log -"
        raise Unreadable(f"{source.name}: .zst cannot be read without the package zstandard; {hint}") from None


class _ZstdFrames:
    """Frames of zstd, one after the other. The package's own reader does not tell a cut-off file from a whole one."""

    def __init__(self, raw: IO[bytes], frames: Any) -> None:
        self._raw = raw
        self._frames = frames
        self._frame: Any = None

    def __enter__(self) -> _ZstdFrames:
        return self

    def __exit__(self, *error: object) -> None:
        self._raw.close()

    def read1(self, size: int) -> bytes:
        """What a little more of the file gives, about `size` bytes or fewer unless it is packed extremely well."""
        text = b""
        while not text:
            packed = self._raw.read(min(size, 2048))
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return b""
            self._frame = self._frame or self._frames.decompressobj()
            text = self._frame.decompress(packed)
            if self._frame.eof:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)
                self._frame = None
        return text


def _decoded(stream: IO[bytes]) -> Iterator[bytes]:
    """Blocks as they come, UTF-16 turned into UTF-8. What comes before a failure is handed on first."""
    text = Utf8()
    parts: list[bytes] = []
    size = 0
    failure: Exception | None = None
    while failure is None:
        try:
            part = stream.read1(BLOCK)  # type: ignore[attr-defined]
        except Exception as error:
            failure, part = error, b""
        parts.append(part)
        size += len(part)
        if size >= BLOCK or (size and not part):
            yield text.feed(b"".join(parts))
            parts, size = [], 0
        if not part:
            break
    if failure is not None:
        raise failure


class Utf8:
    """Turns what a file holds into UTF-8, block by block."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None
        self._started = False

    def feed(self, block: bytes) -> bytes:
        """The text of the next block."""
        if not self._started:
            self._started = True
            encoding = _utf16(block)
            if encoding is not None:
                self._decoder = codecs.getincrementaldecoder(encoding)("replace")
            else:
                block = block.removeprefix(codecs.BOM_UTF8)
        return block if self._decoder is None else self._decoder.decode(block).encode("utf-8", "replace")


def _utf16(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[:400:2], head[1:400:2]
    for text, zeros, encoding in ((even, odd, "utf-16-le"), (odd, even, "utf-16-be")):
        if len(head) >= 8 and zeros.count(0) > len(zeros) * 0.8 and text.count(0) < len(text) * 0.2:
            return encoding
    return None


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Regroup blocks so that each ends at a line end, or holds a piece of one very long line."""
    lines = WholeLines()
    for piece in pieces:
        if block := lines.feed(piece):
            yield block
    if lines.rest:
        yield lines.rest


class WholeLines:
    """Keeps back what follows the last line end, as `rest`, until its line is complete or too long to be kept."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The lines that are complete with this piece."""
        end = piece.rfind(b"\n") + 1
        if not end and len(self.rest) + len(piece) >= BLOCK:
            end = piece.rfind(b"\r") + 1 or len(piece)
        if not end:
            self.rest += piece
            return b""
        lines = b"".join((self.rest, memoryview(piece)[:end]))
        self.rest = piece[end:]
        return lines
