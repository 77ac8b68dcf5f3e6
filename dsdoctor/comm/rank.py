"""One rank of the communication check: `python -m dsdoctor.comm.rank SPEC`, started by a launcher on every rank.

Meets the others, binds its device, allocates, and runs every collective with its value checked. Writes each step to its
record file (`comm.order`) and ends with 0 where all passed, with 1 where a step failed, with the watchdog's codes where
one took too long. Runs in rank processes only; imports torch once the watchdog stands.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from dsdoctor.comm.order import LAST_STEP, CommOrder
from dsdoctor.comm.watchdog import Recorder, Watchdog, peer_states

if TYPE_CHECKING:
    import torch

    from dsdoctor.comm.collectives import Group

_ALLOCATION = 64 << 20
"""Bytes of the one allocation that is written and read back."""
_NOT_OFFERED = ("not supported", "does not support", "not implemented", "unsupported", "no support")


class MissingRanks(Exception):
    """Some ranks did not come to the rendezvous within the deadline."""


def main(path: str) -> int:
    """Run the order at `path` as the rank that the launcher's environment says. Returns the exit code."""
    order = CommOrder.read(path)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recorder = Recorder(order.folder, rank)
    watchdog = Watchdog(recorder, folder=order.folder, rank=rank, world_size=world_size, deadline=order.deadline)
    watchdog.start()
    return Check(order, rank, world_size, recorder, watchdog).run()


class Check:
    """The steps of one rank, in order. The first that fails ends the rank: after it the group cannot be trusted."""

    def __init__(self, order: CommOrder, rank: int, size: int, recorder: Recorder, watchdog: Watchdog) -> None:
        self._order = order
        self._rank = rank
        self._size = size
        self._recorder = recorder
        self._watchdog = watchdog

    def run(self) -> int:
        steps: list[tuple[str, str, Callable[[], None]]] = [
            ("import", "", self._import),
            ("rendezvous", "", self._rendezvous),
            ("device", "", self._bind),
            ("allocation", "", self._allocate),
            ("process-group", "", self._join),
        ]
        if not all(self._step(*step) for step in steps):
            return 1
        passed = [self._collectives(dtype) for dtype in self._order.dtypes]
        return 0 if all(passed) and self._step(LAST_STEP, "", self._leave) else 1

    def _step(self, name: str, dtype: str, action: Callable[[], None]) -> bool:
        """Run one step. A wrong value is written down and the check goes on; anything else ends it."""
        self._recorder.write("begin", step=name, dtype=dtype)
        start = time.monotonic()
        status, text = "passed", ""
        try:
            # reading torch from a cold or remote disk takes its time and says nothing of the ranks
            with contextlib.nullcontext() if name == "import" else self._watchdog.timed(name, dtype):
                action()
        except Exception as error:
            status, text = _status(error), f"{type(error).__name__}: {error}"
        self._write_end(name, dtype, status, text, time.monotonic() - start)
        if status == "failed":
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        return status in ("passed", "not-offered")

    def _write_end(self, name: str, dtype: str, status: str, text: str, seconds: float) -> None:
        peers = peer_states(self._order.folder, self._others) if status == "failed" else {}
        self._recorder.write(
            "end", step=name, dtype=dtype, status=status, text=text[:2000], seconds=seconds, peers=peers
        )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _import(self) -> None:
        import torch

        asked = self._order.device
        if asked == "auto":
            asked = "cuda" if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu" else "cpu"
        self._on_gpu = asked == "cuda"
        self._backend = "nccl" if self._on_gpu else "gloo"
        self._recorder.write("chosen", device=asked, backend=self._backend)

    def _rendezvous(self) -> None:
        """Meet at the master's store and say who did not come. The watchdog's clock is the limit, this the reason."""
        from torch.distributed.rendezvous import rendezvous

        limit = self._order.deadline * 0.9
        end = time.monotonic() + limit
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit))))
        store.set(f"dsdoctor/arrived/{self._rank}", "1")
        missing = self._others
        while missing and time.monotonic() < end:
            missing = [rank for rank in missing if not store.check([f"dsdoctor/arrived/{rank}"])]
            time.sleep(0.02 if missing else 0)
        if missing:
            raise MissingRanks(f"after {limit:.0f} s not at the rendezvous: rank {', '.join(map(str, missing))}")
        self._store = store

    def _bind(self) -> None:
        import torch

        if self._on_gpu:
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._device)
        else:
            self._device = torch.device("cpu")

    def _allocate(self) -> None:
        import torch

        block = torch.full((_ALLOCATION // 4,), 1.0, device=self._device)
        total = float(block.sum(dtype=torch.float64))
        if total != _ALLOCATION // 4:
            raise RuntimeError(f"memory that was filled with ones sums to {total}")

    def _join(self) -> None:
        """Make the process group on the store of the rendezvous. Its own limit lies behind the watchdog's."""
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import PrefixStore

        dist.init_process_group(
            self._backend,
            store=PrefixStore("dsdoctor/group", self._store),
            rank=self._rank,
            world_size=self._size,
            timeout=timedelta(seconds=self._order.deadline * 2 + 10),
        )

    def _collectives(self, dtype: str) -> bool:
        from dsdoctor.comm import collectives

        group = collectives.Group(rank=self._rank, size=self._size, device=self._device, dtype=_torch_dtype(dtype))
        passed = [self._step(step.__name__, dtype, partial(self._finish, step, group)) for step in collectives.STEPS]
        return all(passed)

    def _finish(self, collective: Callable[[Group], None], group: Group) -> None:
        """On a GPU a collective is only queued when its call returns."""
        import torch

        collective(group)
        if self._on_gpu:
            torch.cuda.synchronize()

    def _leave(self) -> None:
        """The last common act: after it no rank waits for this one."""
        import torch.distributed as dist

        dist.barrier()


def _status(error: Exception) -> str:
    if type(error).__name__ == "WrongValue":
        return "wrong-value"
    text = str(error).lower()
    offered = not isinstance(error, NotImplementedError) and not any(word in text for word in _NOT_OFFERED)
    return "failed" if offered else "not-offered"


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the order in the first argument without a dash (a launcher may put its own in front), then leave at once.

    Leaving without Python's shut-down keeps the threads of NCCL and gloo from ending a finished rank by a signal.
    """
    code = main(next(argument for argument in arguments if not argument.startswith("-")))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
