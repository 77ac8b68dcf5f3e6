"""Links and ranks that work and are far slower than their like, by the figures of the communication check."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.units import rate

SOURCE = "comm"
_MAX_EVIDENCE = 6


class SlowLink(Diagnosis):
    """Ranks exchange far more slowly than their link should let them, or than the other pairs of the same kind do.

    What it is: a collective is as fast as its slowest link. A cable or card that fell back to a lower speed, a pair of
    GPUs joined over the processor instead of NVLink, sockets instead of InfiniBand, or a virtual interface.

    What proves it: the check measures every two ranks one after another, while the others wait. A pair is told that is
    three times slower than the middle of the pairs inside one node, or of those across nodes; and over NCCL one that
    gets less than a fifth of what its link gives by its specification (nvidia-smi and the kernel say which it is).
    Nothing is concluded from the speed of gloo inside one node, where there is no link.

    When it could be wrong: a machine that is busy with other work gives uneven figures; repeat the check when it is
    quiet. GPUs of one node are often joined unevenly on purpose (`nvidia-smi topo -m`). Where P2P or InfiniBand was
    switched off by a variable, the link is not at fault.

    What to do: `ethtool INTERFACE` or `ibstat` for the speed of the port, `nvidia-smi topo -m` and `nvidia-smi nvlink
    -s` for the way between two GPUs; `NCCL_DEBUG=INFO` shows which transport NCCL took ("via P2P", "via NET/Socket").
    Leave the slow node out and repeat the check.
    """

    id = "comm/slow-link"
    severity = "warning"
    title = "a link is far slower than it should be"

    def examine(self, case: Case) -> Iterator[Finding]:
        facts = case.comm
        if facts is None or facts.speeds is None:
            return
        below = facts.speeds.below_their_links() if facts.backend == "nccl" else ()
        odd = [(pair, times) for pair, times in facts.speeds.slow_pairs() if pair.across or facts.backend == "nccl"]
        if below:
            pair = below[0]
            assert pair.way is not None
            why = f"where {pair.way.name} should give {rate(pair.way.best or 0.0)}"
        elif odd:
            pair, times = odd[0]
            why = f"{times:.1f} times less than the middle of such pairs"
        else:
            return
        told = list(dict.fromkeys([*below, *(one for one, _ in odd)]))
        yield self.finding(
            cause=f"ranks {_place(facts, pair.low)} and {_place(facts, pair.high)} exchange "
            f"{rate(pair.bandwidth)}, {why}",
            evidence=tuple(
                Evidence(source=SOURCE, rank=one.low, text=f"with rank {one.high}: {rate(one.bandwidth)}")
                for one in told
            )[:_MAX_EVIDENCE],
            confidence=0.7,
            caveat="A machine that is busy with other work gives uneven figures; repeat the check when it is quiet.",
            fixes=(
                Fix(text="look at the speed of the port (ethtool, ibstat) and the way (nvidia-smi topo -m, nvlink -s)"),
                *(Fix(text=f"unset {name}, which keeps NCCL from a faster way") for name in _switched_off(case)),
            ),
        )


class SlowRank(Diagnosis):
    """One GPU computes far more slowly than the others, and all wait for it in every step.

    What it is: a GPU whose clock is held down (heat, power cap, a broken fan), one that another process uses, or one of
    another model among the others.

    What proves it: in the communication check every rank multiplies the same matrices, as often as fits into a moment;
    the best time of this rank is 1.5 times that of the middle of all ranks or more. Fewer than three ranks have no
    middle. Nothing is concluded from CPUs, where other work on the machine makes any rank slow.

    When it could be wrong: GPUs of several models in one job differ rightly; then all of them are as slow as this one.

    What to do: `nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE -i N` on its node shows the clocks and why they are held
    down; end other processes on it; leave it out (`CUDA_VISIBLE_DEVICES`) and repeat the check.
    """

    id = "comm/slow-rank"
    severity = "warning"
    title = "one GPU is far slower than the others"

    def examine(self, case: Case) -> Iterator[Finding]:
        facts = case.comm
        if facts is None or facts.speeds is None or facts.device != "cuda":
            return
        slow = facts.speeds.slow_ranks()
        if not slow:
            return
        rank, times = slow[0]
        more = f"; {len(slow) - 1} more are slow" if len(slow) > 1 else ""
        yield self.finding(
            cause=f"rank {_place(facts, rank)} computes {times:.1f} times more slowly than the middle of all{more}",
            evidence=tuple(
                Evidence(
                    source=SOURCE,
                    rank=one,
                    text=f"{facts.speeds.compute[one] * 1e3:.2f} ms for the same product, {by:.1f} times the middle",
                )
                for one, by in slow
            )[:_MAX_EVIDENCE],
            confidence=0.75,
            caveat="GPUs of several models in one job differ rightly.",
            fixes=(
                Fix(text="look why its clock is held down: nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE on its node"),
                Fix(text="end other processes on it, or leave it out (CUDA_VISIBLE_DEVICES) and repeat the check"),
            ),
        )


def _place(facts: CommFacts, rank: int) -> str:
    return f"{rank} ({next((one.host for one in facts.ranks if one.rank == rank), '') or '?'})"


def _switched_off(case: Case) -> tuple[str, ...]:
    """Variables of the user that keep NCCL from using a link."""
    known = case.machine.environment if case.machine is not None else {}
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    return tuple(name for name in names if known.get(name, "0") not in ("", "0"))


DIAGNOSES: tuple[Diagnosis, ...] = (SlowLink(), SlowRank())
