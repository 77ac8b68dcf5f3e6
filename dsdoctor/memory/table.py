"""Where the bytes of the given config go, line by line, and how far each figure can be trusted."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.memory import host, moments, terms
from dsdoctor.memory.facts import Basis, Term
from dsdoctor.memory.setup import Setup
from dsdoctor.units import size


def table(setup: Setup) -> tuple[Term, ...]:
    """The terms of a rank on its GPU, of one host, and of one host's NVMe; those of zero bytes are left out."""
    return tuple(one for one in (*_gpu(setup), *_host(setup), *_nvme(setup)) if one.bytes)


def _gpu(setup: Setup) -> Iterator[Term]:
    shard = "" if setup.stage < 3 else f"a shard of 1/{setup.ranks}, small parameters whole"
    training = {one.name: one.holding for one in moments.device_moments(setup)}
    backward, lasting = training[moments.BACKWARD], moments.lasting(setup)
    yield Term(place="gpu", name="weights", bytes=terms.weights(setup), basis="computed", note=shard)
    yield Term(place="gpu", name="gradients", bytes=terms.gradients(setup), basis="computed", note=_kept(setup))
    yield Term(place="gpu", name="master weights", bytes=terms.master(setup), basis="computed")
    yield Term(place="gpu", name="optimizer states", bytes=terms.states(setup), basis=_of_states(setup))
    yield Term(
        place="gpu", name="reduce buckets", bytes=terms.bucket(setup), basis="computed", note="reduce_bucket_size"
    )
    yield Term(place="gpu", name="gradient staging", bytes=terms.staging(setup), basis="computed")
    yield Term(place="gpu", name="secondary shard (hpZ)", bytes=terms.secondary(setup), basis="assumed")
    gathered = training[moments.FORWARD].buffers - lasting.buffers - terms.secondary(setup)
    yield Term(
        place="gpu", name="gathered parameters", bytes=gathered, basis="computed", note="at the turn to backward"
    )
    yield Term(
        place="gpu",
        name="gradients in backward",
        bytes=max(0, backward.gradients - terms.gradients(setup)),
        basis="computed",
        note="beside those that stay",
    )
    yield from _activations(setup)
    yield Term(place="gpu", name="passing in the step", bytes=_kernel(setup), basis="computed", note="fp32 gradients")
    yield Term(
        place="gpu",
        name="context and process" if setup.device == "cpu" else "CUDA context and NCCL",
        bytes=terms.overhead(setup),
        basis="assumed",
    )


def _activations(setup: Setup) -> Iterator[Term]:
    known = setup.activations
    basis: Basis = "measured" if known.source.startswith("measured") else "computed"
    if setup.model.shape is not None and setup.model.shape.approximate:
        basis = "assumed"
    yield Term(place="gpu", name="activations", bytes=known.saved + known.working, basis=basis, note=known.source)
    yield Term(place="gpu", name="logits and loss", bytes=known.loss, basis=basis)


def _host(setup: Setup) -> Iterator[Term]:
    each = f"{setup.ranks_per_host} ranks together"
    pinned: Basis = "assumed" if setup.device == "cuda" else "computed"
    loading = host.host_moments(setup)[0].holding.weights
    yield Term(place="host", name="model while loading", bytes=loading, basis="computed", note=each)
    yield Term(place="host", name="weights", bytes=host.weights(setup), basis=pinned, note=_rounded(setup))
    yield Term(place="host", name="gradients", bytes=host.gradients(setup), basis=pinned, note=_rounded(setup))
    yield Term(place="host", name="master weights", bytes=host.master(setup), basis=pinned)
    yield Term(place="host", name="optimizer states", bytes=host.states(setup), basis=_of_states(setup))
    yield Term(place="host", name="staging buffers", bytes=host.buffers(setup), basis=pinned)
    overhead = host.held(setup).overhead
    yield Term(place="host", name="processes", bytes=overhead, basis="assumed", note=each)


def _nvme(setup: Setup) -> Iterator[Term]:
    yield Term(place="nvme", name="swap files", bytes=host.nvme(setup), basis="assumed")


def _kept(setup: Setup) -> str:
    return "kept from backward to the step" if setup.stage < 3 else "a flat buffer that is always there"


def _of_states(setup: Setup) -> Basis:
    return "computed" if setup.states else "assumed"


def _kernel(setup: Setup) -> int:
    held = {one.name: one.holding for one in moments.device_moments(setup)}
    return max(0, held[moments.STEP].total - moments.end_of_backward(setup).total)


def _rounded(setup: Setup) -> str:
    if not setup.pinned or setup.device == "cpu":
        return ""
    exact = setup.master * setup.trained_shard
    return f"pinned: {size(exact)} become {size(host.block(setup, exact, pinned=True))} a rank"
