"""A rank of the communication check with one fault, chosen by the variable COMM_FAULT: `KIND:RANK`.

Run by a launcher as a module in place of `dsdoctor.comm.rank`; the product knows nothing of it.
"""

import os
import signal
import sys
import time

from dsdoctor.comm import collectives, rank


def never_starts() -> None:
    time.sleep(600)


def leaves_at_once() -> None:
    print("cannot load libsomething.so", file=sys.stderr)
    os._exit(3)


def stands_still_before_a_collective() -> None:
    def all_reduce(group: collectives.Group) -> None:
        time.sleep(600)

    collectives.STEPS = (all_reduce, *collectives.STEPS[1:])


def dies_in_a_collective() -> None:
    def all_reduce(group: collectives.Group) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    collectives.STEPS = (all_reduce, *collectives.STEPS[1:])


def is_stopped_in_a_collective() -> None:
    def all_reduce(group: collectives.Group) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    collectives.STEPS = (all_reduce, *collectives.STEPS[1:])


def calls_another_collective() -> None:
    """This rank broadcasts where the others reduce."""

    def all_reduce(group: collectives.Group) -> None:
        collectives.dist.broadcast(collectives.torch.zeros(collectives.ELEMENTS), src=1)

    collectives.STEPS = (all_reduce, *collectives.STEPS[1:])


def sends_wrong_values() -> None:
    """This rank contributes 1 more than it should to element 5 of the sum; elements belong to the ranks in turn."""
    right = collectives._share

    def wrong(group: collectives.Group, owner: int, elements: int) -> object:
        tensor = right(group, owner, elements)
        tensor[5] += 1
        return tensor

    collectives._share = wrong


def has_no_such_collective() -> None:
    def reduce_scatter_tensor(group: collectives.Group) -> None:
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")

    replaced = [
        reduce_scatter_tensor if step.__name__ == "reduce_scatter_tensor" else step for step in collectives.STEPS
    ]
    collectives.STEPS = tuple(replaced)


def cannot_allocate() -> None:
    def fail(self: rank.Check) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 64.00 MiB")

    rank.Check._allocate = fail


def fails_as_nccl_does() -> None:
    """NCCL took a bridge of docker, says so in its log, and torch passes on its last words."""
    abort = "socketStartConnect: Connect to 172.17.0.9<41234> failed : Software caused connection abort"

    def fail(self: rank.Check) -> None:
        with open(os.environ["NCCL_DEBUG_FILE"], "a") as log:
            log.write("node1:4211:4299 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>\n")
            log.writelines(f"node1:4211:4299 [0] NCCL INFO Trees [{number}] -1/-1/-1->0->1\n" for number in range(500))
            log.write(f"node1:4211:4299 [0] misc/socket.cc:484 NCCL WARN {abort}\n")
        raise RuntimeError(f"NCCL error in: NCCLUtils.hpp:268, unhandled system error\nLast error:\n{abort}")

    rank.Check._join = fail


if __name__ == "__main__":
    kind, _, wanted = os.environ.get("COMM_FAULT", "").partition(":")
    if kind and wanted in ("all", os.environ["RANK"]):
        globals()[kind]()
    rank.run(sys.argv[1:])
