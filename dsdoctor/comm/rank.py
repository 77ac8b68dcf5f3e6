"""One rank of the communication check: `python -m dsdoctor.comm.rank SPEC`, started by a launcher on every rank.

Meets the others, binds its device, allocates, and runs every collective with its value checked. Writes each step to its
record file (`comm.order`) and ends with 0 where all passed, with 1 where a step failed, with the watchdog's codes where
one took too long. Runs in rank processes only; imports torch once the watchdog stands.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

from dsdoctor.comm.order import LAST_STEP, CommOrder
from dsdoctor.comm.sizes import CPU_LIMIT
from dsdoctor.comm.watchdog import Recorder, Watchdog, peer_states

if TYPE_CHECKING:
    import torch

    from dsdoctor.comm.collectives import Group

_ALLOCATION = 64 << 20
"""Bytes of the one allocation that is written and read back."""
_SHM = "/dev/shm"
_SHM_BYTES = 16 << 20
CPU_BYTES = (4 << 10, 1 << 20)
GPU_BYTES = (4 << 10, 1 << 20, 64 << 20)
"""Sizes at which speed is measured: where latency rules, where bandwidth does."""
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
        self._most = CPU_LIMIT

    def run(self) -> int:
        steps: list[tuple[str, str, Callable[[], None]]] = [
            ("import", "", self._import),
            ("rendezvous", "", self._rendezvous),
            ("device", "", self._bind),
            ("allocation", "", self._allocate),
            ("shared-memory", "", self._share_memory),
            ("process-group", "", self._join),
        ]
        if not all(self._step(*step) for step in steps):
            return 1
        passed = [self._collectives(dtype) for dtype in self._order.dtypes]
        passed += [self._as_in_the_job(self._order.dtypes[0]), self._measure(self._order.dtypes[0])]
        return 0 if all(passed) and self._step(LAST_STEP, "", self._leave) else 1

    def _step(self, name: str, dtype: str, action: Callable[[], None], elements: int = 0) -> bool:
        """Run one step. A wrong value is written down and the check goes on; anything else ends it."""
        self._recorder.write("begin", step=name, dtype=dtype, elements=elements)
        start = time.monotonic()
        status, text, stack = "passed", "", ""
        try:
            # reading torch from a cold or remote disk takes its time and says nothing of the ranks
            with contextlib.nullcontext() if name == "import" else self._watchdog.timed(name, dtype):
                action()
        except Exception as error:
            status, text = _status(error), f"{type(error).__name__}: {error}"
            stack = "".join(traceback.format_tb(error.__traceback__)) if status == "failed" else ""
        self._write_end(name, dtype, status, time.monotonic() - start, text=text[:2000], stack=stack)
        if status == "failed":
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        return status in ("passed", "not-offered")

    def _write_end(self, name: str, dtype: str, status: str, seconds: float, **told: str) -> None:
        peers = peer_states(self._order.folder, self._others) if status == "failed" else {}
        self._recorder.write("end", step=name, dtype=dtype, status=status, seconds=seconds, peers=peers, **told)

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
        self._watchdog.uses_nccl = self._on_gpu
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
            if not torch.version.cuda:
                raise RuntimeError("this torch is not compiled with CUDA")
            self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            uuid = str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))
            self._recorder.write("bound", uuid=uuid, free=free, total=total)
        else:
            self._device = torch.device("cpu")

    def _allocate(self) -> None:
        import torch

        block = torch.full((_ALLOCATION // 4,), 1.0, device=self._device)
        total = float(block.sum(dtype=torch.float64))
        if total != _ALLOCATION // 4:
            raise RuntimeError(f"memory that was filled with ones sums to {total}")

    def _share_memory(self) -> None:
        """Take and give back as much of /dev/shm as NCCL takes for a few channels of one rank.

        Raises OSError with the path, so that it is not mistaken for a full disk.
        """
        if not os.path.isdir(_SHM):
            raise NotImplementedError(f"there is no {_SHM}")
        with tempfile.TemporaryFile(dir=_SHM, prefix="dsdoctor-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, _SHM_BYTES)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} for {_SHM_BYTES >> 20} MiB in {_SHM}") from None

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

        group = self._group(dtype)
        passed = [self._step(step.__name__, dtype, partial(step, group)) for step in collectives.STEPS]
        return all(passed)

    def _as_in_the_job(self, dtype: str) -> bool:
        """Several groups, repeats, odd sizes, and the sizes that the ds_config makes."""
        from dsdoctor.comm import collectives

        group = self._group(dtype)
        passed = [
            self._step(step.__name__, dtype, partial(step, group))
            for step in (collectives.several_groups, collectives.repeated_all_reduce)
        ]
        passed.append(self._step("largest-size", dtype, partial(self._agree_on_size, group)))
        sizes = [("all_reduce", elements) for elements in collectives.ODD_SIZES]
        sizes += [(message.collective, message.elements) for message in self._order.messages]
        for name, elements in dict.fromkeys((name, min(elements, self._most)) for name, elements in sizes):
            collective = {"all_reduce": collectives.all_reduce_of, "all_gather": collectives.all_gather_of}[name]
            passed.append(self._step(name, dtype, partial(collective, group, elements), elements))
        return all(passed)

    def _agree_on_size(self, group: Group) -> None:
        """Elements of the largest message, the same on all ranks: a quarter of the memory of the fullest GPU."""
        import torch
        import torch.distributed as dist

        if self._on_gpu:
            free, _ = torch.cuda.mem_get_info(self._device)
            smallest = torch.tensor([free // 4 // group.dtype.itemsize], device=self._device)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            group.wait_for_device()
            self._most = int(smallest)

    def _measure(self, dtype: str) -> bool:
        """Figures are written down as they come; they are no judgement."""
        return self._step("measure", dtype, partial(self._write_figures, self._group(dtype)))

    def _write_figures(self, group: Group) -> None:
        from dsdoctor.comm import measuring

        making = measuring.Measuring(group, limit=self._order.deadline / 3)
        sizes = GPU_BYTES if self._on_gpu else CPU_BYTES
        parts = (making.collectives(sizes), making.pairs(self._order.pair_ranks), making.compute())
        for what, size, seconds in chain.from_iterable(parts):
            self._recorder.write("measured", what=what, bytes=size, seconds=seconds)

    def _group(self, dtype: str) -> Group:
        from dsdoctor.comm import collectives

        return collectives.Group(rank=self._rank, size=self._size, device=self._device, dtype=_torch_dtype(dtype))

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
