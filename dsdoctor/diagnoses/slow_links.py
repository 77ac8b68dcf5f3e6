"""Links and ranks that work and are far slower than their like, by the figures of the communication check."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.units import rate

SOURCE = "comm"
_MAX_EVIDENCE = 6


class SlowLink(Diagnosis):
    """One pair of ranks exchanges far more slowly than the other pairs of the same kind, and all wait for it.

    What it is: a collective is as fast as its slowest link. A cable or card that fell back to a lower speed, a pair of
    GPUs joined over the processor instead of NVLink, a virtual interface, or a busy neighbour shows as one pair that is
    several times slower than the middle of the pairs inside one node, or of those across nodes.

    What proves it: the check measures every two ranks one after another, while the others wait.

    When it could be wrong: a machine that is busy with other work gives uneven figures; repeat the check when it is
    quiet. GPUs of one node are often joined unevenly on purpose (`nvidia-smi topo -m`).

    What to do: `ethtool INTERFACE` or `ibstat` for the speed of the port, `nvidia-smi topo -m` for the way between two
    GPUs; leave the slow node out and repeat the check.
    """

    id = "comm/slow-link"
    severity = "warning"
    title = "one link is far slower than the others"

    def examine(self, case: Case) -> Iterator[Finding]:
        facts = case.comm
        slow = facts.speeds.slow_pairs() if facts is not None and facts.speeds is not None else ()
        if facts is None or not slow:
            return
        hosts = {rank.rank: rank.host for rank in facts.ranks}
        pair, times = slow[0]
        low, high = (f"{rank} ({hosts.get(rank, '?')})" for rank in (pair.low, pair.high))
        yield self.finding(
            cause=f"ranks {low} and {high} exchange "
            f"{rate(pair.bandwidth)}, {times:.1f} times less than the middle of such pairs",
            evidence=tuple(
                Evidence(source=SOURCE, rank=one.low, text=f"with rank {one.high}: {rate(one.bandwidth)}")
                for one, _ in slow
            )[:_MAX_EVIDENCE],
            confidence=0.7,
            caveat="A machine that is busy with other work gives uneven figures; repeat the check when it is quiet.",
            fixes=(Fix(text="look at the speed of the port (ethtool, ibstat) and the way (nvidia-smi topo -m)"),),
        )


DIAGNOSES: tuple[Diagnosis, ...] = (SlowLink(),)
