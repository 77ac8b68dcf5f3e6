"""Whether the job fits into what the machine has, before it runs: the memory model against GPUs and hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run_model
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.memory.facts import DeviceNeed, MemoryFacts, Need
from dsdoctor.memory.host import CONSTRUCTION
from dsdoctor.memory.ladder import HEADROOM, SWAP_FOLDER
from dsdoctor.memory.moments import BEFORE_TRAINING
from dsdoctor.units import size

SOURCE = "memory"
_CHECKPOINTING = "switch activation checkpointing on (Transformers: gradient_checkpointing_enable)"
_PARTS = ("weights", "gradients", "optimizer", "buffers", "activations", "overhead")


@dataclass(frozen=True, kw_only=True)
class _Squeeze:
    """One place that the job has to fit into: what it needs there at its peak, and what there is. Bytes."""

    place: str
    peak: int
    moment: str
    have: int
    training: int
    """What a step needs once training runs."""
    parts: str = ""

    @property
    def margin(self) -> float:
        return 1 - self.peak / max(self.have, 1)

    @property
    def is_proved(self) -> bool:
        """Too little, and not only before the first step, where the way of loading decides."""
        only_before = self.moment in (CONSTRUCTION, *BEFORE_TRAINING) and self.training <= self.have
        return self.margin < 0 and not only_before


class WillNotFit(Diagnosis):
    """The job needs more memory than a GPU, the host or its NVMe has (or nearly all of it).

    What proves it: the memory model of the given config (weights, gradients, optimizer states, buckets, activations
    where the model's shape is known, and the highest moment) against the free memory of the smallest GPU, of the host
    or its cgroup, and of the NVMe folder. The evidence says which of them, at what moment, and of what it is made.
    Less than a tenth left is a warning.

    When it could be wrong: where activations are not counted the real need is higher. A model that is built under
    `zero.Init` needs less while it loads; what only does not fit before the first step is a warning for that reason. A
    run that passed refutes the estimate.

    What to do: the cheapest row that fits, as a patch. Each offload makes the step slower: a higher ZeRO stage comes
    first, then the optimizer's states on the CPU, then the parameters. `dsdoctor memory` shows all rows.
    """

    id = "memory/will-not-fit"
    severity = "error"
    title = "the job needs more memory than there is"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from before_run_model.pinned_buffers(self, case)
        facts = case.memory
        need = facts.current if facts is not None else None
        if facts is None or need is None or need.margin is None or need.margin >= HEADROOM:
            return
        squeeze = min(_squeezes(facts, need), key=lambda one: (not one.is_proved, one.margin))
        proved = squeeze.is_proved
        yield self.finding(
            severity="error" if proved else "warning",
            title=None if squeeze.margin < 0 else "the job needs nearly all the memory there is",
            cause=f"{squeeze.place} needs {size(squeeze.peak)} at {squeeze.moment} and {size(squeeze.have)} are free",
            evidence=tuple(_evidence(one, need) for one in _squeezes(facts, need)),
            confidence=0.8 if proved else 0.5,
            caveat="; ".join(facts.assumptions) or None,
            fixes=tuple(_fixes(facts)),
            keys=("zero_optimization.stage",),
        )


def _squeezes(facts: MemoryFacts, need: Need) -> list[_Squeeze]:
    places = []
    if facts.device == "cuda" and facts.gpu_bytes is not None:
        places.append(_squeeze("a GPU", need.per_gpu, facts.gpu_bytes))
    if facts.host_bytes is not None:
        places.append(_squeeze("the host", need.per_host, facts.host_bytes))
    if need.per_nvme and facts.nvme_bytes is not None:
        swap = _Squeeze(
            place="the NVMe folder",
            peak=need.per_nvme,
            moment="initialize",
            have=facts.nvme_bytes,
            training=need.per_nvme,
        )
        places.append(swap)
    return places


def _squeeze(place: str, need: DeviceNeed, have: int) -> _Squeeze:
    parts = ", ".join(f"{part} {size(getattr(need, part))}" for part in _PARTS if getattr(need, part))
    return _Squeeze(place=place, peak=need.peak, moment=need.peak_moment, have=have, training=need.total, parts=parts)


def _evidence(squeeze: _Squeeze, need: Need) -> Evidence:
    made_of = f" ({squeeze.parts})" if squeeze.parts else ""
    return Evidence(
        source=SOURCE,
        text=f"{_name(need)}: {squeeze.place} needs {size(squeeze.training)} while training{made_of}, "
        f"{size(squeeze.peak)} at its peak ({squeeze.moment}); free: {size(squeeze.have)}",
    )


def _fixes(facts: MemoryFacts) -> Iterator[Fix]:
    if facts.recommended is None:
        yield Fix(text=_nothing_fits(facts))
    else:
        yield _row(facts, facts.needs[facts.recommended])
    if facts.advice.checkpointing == "given":
        yield Fix(text=f"or {_CHECKPOINTING}: then the config fits as it is, for a forward pass more")
    if facts.advice.micro_batch:
        yield Fix(text=f"or with the config as it is: a micro-batch of {facts.advice.micro_batch} at most")
    for hint in facts.advice.loading:
        yield Fix(text=hint)


def _row(facts: MemoryFacts, need: Need) -> Fix:
    told = f"{size(need.per_gpu.peak)} a GPU and " if facts.device == "cuda" else ""
    if need.current:
        return Fix(text="free memory that other processes use, or start fewer ranks on the host")
    own = "; put your own folder for nvme_path" if SWAP_FOLDER in str(facts.patch) else ""
    return Fix(text=f"{_name(need)} needs {told}{size(need.per_host.peak)} a host at its peak{own}", patch=facts.patch)


def _nothing_fits(facts: MemoryFacts) -> str:
    advice = facts.advice
    ways = []
    if advice.checkpointing == "row":
        ways.append(f"{_CHECKPOINTING}, with which one does (--checkpointing shows which)")
    if advice.ranks is not None:
        ways.append(f"{advice.ranks} ranks on {advice.ranks // facts.ranks_per_host} such hosts would do")
    if advice.row_micro_batch:
        ways.append(f"a micro-batch of {advice.row_micro_batch} would do")
    return f"no stage and no offload fits: {'; '.join(ways) or 'more or larger GPUs, more RAM, or NVMe offload'}"


def _name(need: Need) -> str:
    offloads = (("optimizer states", need.offload_optimizer), ("parameters", need.offload_param))
    moved = [f"{what} on {'the CPU' if where == 'cpu' else 'NVMe'}" for what, where in offloads if where != "none"]
    return f"ZeRO stage {need.stage} in {need.precision}" + (f" with {' and '.join(moved)}" if moved else "")


DIAGNOSES: tuple[Diagnosis, ...] = (WillNotFit(),)
