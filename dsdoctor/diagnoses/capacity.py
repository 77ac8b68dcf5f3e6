"""Whether the job fits into what the machine has, before it runs: the memory model against GPUs and hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.memory.facts import DeviceNeed, HostNeed, MemoryFacts, Need
from dsdoctor.units import size

SOURCE = "memory"
HEADROOM = 0.10
_BEFORE_THE_FIRST_STEP = ("initialization", "loading the model")


@dataclass(frozen=True, kw_only=True)
class _Squeeze:
    """One place that the job has to fit into: what it needs there at its peak, and what there is."""

    place: str
    need: DeviceNeed | HostNeed
    have: int

    @property
    def margin(self) -> float:
        return 1 - self.need.peak / max(self.have, 1)

    @property
    def fits_while_training(self) -> bool:
        return self.need.total <= self.have


class WillNotFit(Diagnosis):
    """The job needs more memory than a GPU, or the host, has (or nearly all of it).

    What proves it: the memory model of the given config (weights, gradients, optimizer states, buckets, and the highest
    moment) against the free memory of the smallest GPU and of the host or its cgroup. The evidence says which of them,
    at what moment, and of what the need is made. Less than a tenth left is a warning.

    When it could be wrong: activations are not counted, so the real need is higher. A model that is built under
    `zero.Init` needs less while it loads; what only does not fit before the first step is a warning for that reason. A
    run that passed refutes the estimate.

    What to do: the cheapest row that fits, as a patch. Each offload makes the step slower: a higher ZeRO stage comes
    first, then the optimizer's states on the CPU, then the parameters.
    """

    id = "memory/will-not-fit"
    severity = "error"
    title = "the job needs more memory than there is"

    def examine(self, case: Case) -> Iterator[Finding]:
        facts = case.memory
        need = facts.current if facts is not None else None
        if facts is None or need is None or need.margin is None or need.margin >= HEADROOM:
            return
        squeeze = min(_squeezes(facts, need), key=lambda one: one.margin)
        proved = squeeze.margin < 0 and not (squeeze.fits_while_training and _before_training(squeeze))
        yield self.finding(
            severity="error" if proved else "warning",
            title=None if squeeze.margin < 0 else "the job needs nearly all the memory there is",
            cause=(
                f"{squeeze.place} needs {size(squeeze.need.peak)} at {squeeze.need.peak_moment}"
                f" and {size(squeeze.have)} are free"
            ),
            evidence=tuple(_evidence(one, need) for one in _squeezes(facts, need)),
            confidence=0.8 if proved else 0.5,
            caveat="; ".join(facts.assumptions) or None,
            fixes=(_fix(facts),),
            keys=("zero_optimization.stage",),
        )


def _squeezes(facts: MemoryFacts, need: Need) -> list[_Squeeze]:
    places = []
    if facts.device == "cuda" and facts.gpu_bytes is not None:
        places.append(_Squeeze(place="a GPU", need=need.per_gpu, have=facts.gpu_bytes))
    if facts.host_bytes is not None:
        places.append(_Squeeze(place="the host", need=need.per_host, have=facts.host_bytes))
    return places


def _before_training(squeeze: _Squeeze) -> bool:
    return squeeze.need.peak_moment in _BEFORE_THE_FIRST_STEP


def _evidence(squeeze: _Squeeze, need: Need) -> Evidence:
    parts = ("weights", "gradients", "optimizer", "buffers", "overhead")
    terms = ", ".join(f"{part} {size(getattr(squeeze.need, part))}" for part in parts)
    return Evidence(
        source=SOURCE,
        text=f"{_name(need)}: {squeeze.place} needs {size(squeeze.need.total)} while training ({terms}), "
        f"{size(squeeze.need.peak)} at its peak ({squeeze.need.peak_moment}); free: {size(squeeze.have)}",
    )


def _fix(facts: MemoryFacts) -> Fix:
    if facts.recommended is None:
        return Fix(text="no stage and no offload to the CPU fits: more or larger GPUs, more RAM, or NVMe offload")
    need = facts.needs[facts.recommended]
    told = f"{size(need.per_gpu.peak)} a GPU and " if facts.device == "cuda" else ""
    if need.current:
        return Fix(text="free memory that other processes use, or start fewer ranks on the host")
    return Fix(text=f"{_name(need)} needs {told}{size(need.per_host.peak)} a host at its peak", patch=facts.patch)


def _name(need: Need) -> str:
    offloads = (("optimizer states", need.offload_optimizer), ("parameters", need.offload_param))
    moved = [f"{what} on {'the CPU' if where == 'cpu' else 'NVMe'}" for what, where in offloads if where != "none"]
    return f"ZeRO stage {need.stage}" + (f" with {' and '.join(moved)}" if moved else "")


DIAGNOSES: tuple[Diagnosis, ...] = (WillNotFit(),)
