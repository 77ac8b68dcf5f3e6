"""What passes between the parent and the ranks of the communication check: one order in, one record file a rank out.

A record file holds JSON lines, each with `event` and `time` (seconds since the epoch):
`hello` (rank, pid, host), `chosen` (device, backend), `bound` (uuid, free, total: the GPU and its bytes),
`begin` (step, dtype, elements), `end` (step, dtype, status, seconds, text, stack, peers), `measured` (what, bytes,
seconds a round), `timeout` (step, dtype, seconds, stack, peers), `terminated` (the same, when SIGTERM came),
`asked` (calls, ras: collectives that torch's flight recorder shows as unfinished, and what NCCL said of the job).
`peers` maps ranks of the same host to the state of their process: a letter of `/proc/PID/stat`, or `gone`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dsdoctor.comm.sizes import Message, messages

LAST_STEP = "goodbye"
"""The step after which nothing that happens to a rank proves anything."""
MOST_PAIR_RANKS = 16
"""More ranks than this have too many pairs to measure them all."""


@dataclass(frozen=True, kw_only=True)
class CommOrder:
    """What every rank has to do. `deadline` is in seconds, for each step; `messages` are sizes of the job.

    `pair_ranks` are measured against each other, two by two.
    """

    folder: str
    device: Literal["auto", "cpu", "cuda"]
    dtypes: tuple[str, ...]
    deadline: float
    messages: tuple[Message, ...] = ()
    pair_ranks: tuple[int, ...] = ()

    def write(self) -> Path:
        """Write the order into its folder and return the path."""
        path = order_path(self.folder)
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str | Path) -> CommOrder:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["dtypes"], values["pair_ranks"] = tuple(values["dtypes"]), tuple(values["pair_ranks"])
        return cls(**{**values, "messages": tuple(Message(**one) for one in values["messages"])})


def order_for(
    config: Mapping[str, Any],
    *,
    device: Literal["auto", "cpu", "cuda"],
    deadline: float,
    folder: Path,
    ranks: int,
    leaders: Sequence[int] = (),
) -> CommOrder:
    """What the ranks have to do for this ds_config. Many ranks are paired by the leaders of their nodes only."""
    return CommOrder(
        folder=str(folder),
        device=device,
        dtypes=dtypes(config),
        deadline=deadline,
        messages=messages(config),
        pair_ranks=tuple(range(ranks) if ranks <= MOST_PAIR_RANKS else leaders[:MOST_PAIR_RANKS]),
    )


def dtypes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The precision of the config, if it is a low one, and fp32."""
    for name in ("bf16", "bfloat16", "fp16"):
        part = config.get(name)
        if isinstance(part, Mapping) and part.get("enabled") is True:
            return ("bf16" if name.startswith("b") else "fp16", "fp32")
    return ("fp32",)


def order_path(folder: str | Path) -> Path:
    return Path(folder) / "order.json"


def record_path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"comm-rank{rank}.jsonl"


def read_records(folder: str | Path, rank: int) -> list[dict[str, Any]]:
    """The records of one rank, none for a rank that wrote nothing; a last line cut off by a kill is left out."""
    try:
        text = record_path(folder, rank).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return list(_parse(text))


def _parse(text: str) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ValueError):
        for line in text.splitlines():
            yield json.loads(line)
