"""Parameters out of the headers of safetensors files: names, shapes and dtypes, without reading a weight.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the little-endian length of a JSON header, which maps
each tensor's name to its dtype, shape and place. Files are not trusted: lengths, shapes and places are checked before
anything of that size is read. Pickled weights (.bin, .pt) are never opened.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsdoctor.memory.parameter import Parameter

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library itself."""
_LONGEST_INDEX = 50_000_000
_MOST_FILES = 4096
_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "U64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_BUFFERS = (
    ".inv_freq",
    ".position_ids",
    ".masked_bias",
    ".attn.bias",
    ".rotary_emb.cos_cached",
    ".rotary_emb.sin_cached",
)
"""Ends of names that are no parameters."""


class HeaderUnreadable(Exception):
    """A file is no safetensors file, or is damaged; `str()` is one line for the user."""


def of_files(paths: list[Path]) -> tuple[Parameter, ...]:
    """The parameters of all files, in the order of their names' places. Raises HeaderUnreadable."""
    if len(paths) > _MOST_FILES:
        raise HeaderUnreadable(f"{len(paths)} weight files are more than {_MOST_FILES}")
    found: dict[str, Parameter] = {}
    for path in paths:
        for one in read(path):
            found.setdefault(one.name, one)
    if not found:
        raise HeaderUnreadable(f"{paths[0] if paths else 'the folder'} holds no tensors")
    return tuple(found.values())


def files_of(folder: Path) -> list[Path]:
    """The weight files of a folder: those that the index names, else all of them. Raises HeaderUnreadable."""
    index = folder / INDEX
    if index.is_file():
        return of_index(index)
    return sorted(folder.glob("*.safetensors"))


def of_index(index: Path) -> list[Path]:
    """The files that an index names, each once. Raises HeaderUnreadable."""
    try:
        if index.stat().st_size > _LONGEST_INDEX:
            raise HeaderUnreadable(f"not an index of weights: {index} is too large")
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = sorted({index.parent / str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HeaderUnreadable(f"not an index of weights: {index}") from None
    missing = [file.name for file in files if file.parent != index.parent or not file.is_file()]
    if missing:
        raise HeaderUnreadable(f"{index} names {missing[0]}, which is not beside it ({len(missing)} missing)")
    return files


def read(path: Path) -> Iterator[Parameter]:
    """The parameters of one file. Raises HeaderUnreadable."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise HeaderUnreadable(
                    f"not a safetensors file, or a damaged one: {path} (its header's length is wrong)"
                )
            header = json.loads(file.read(length))
    except OSError as error:
        raise HeaderUnreadable(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise HeaderUnreadable(f"not a safetensors file, or a damaged one: {path} (its header is no JSON)") from None
    if not isinstance(header, dict):
        raise HeaderUnreadable(f"not a safetensors file, or a damaged one: {path} (its header is no object)")
    for name, entry in header.items():
        if name != "__metadata__" and not name.endswith(_BUFFERS):
            yield _parameter(path, name, entry, room=size - 8 - length)


def _parameter(path: Path, name: str, entry: Mapping[str, Any], *, room: int) -> Parameter:
    try:
        each, shape = _BYTES[entry["dtype"]], [_dimension(one) for one in entry["shape"]]
        begin, end = (_dimension(one) for one in entry["data_offsets"])
    except (KeyError, TypeError, ValueError):
        raise HeaderUnreadable(f"a damaged safetensors file: {path} (the entry of {name})") from None
    elements = math.prod(shape)
    if end > room or end - begin != elements * each:
        raise HeaderUnreadable(f"a damaged or cut-off safetensors file: {path} (the place of {name})")
    return Parameter(name, elements, True, float(each), ".experts." in name)


def _dimension(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value
