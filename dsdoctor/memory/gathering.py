"""Stage 3: the bytes of parameters that are whole for a while, because a module works with them or will soon."""

from __future__ import annotations

from dsdoctor.memory import terms
from dsdoctor.memory.setup import Setup


def at_the_turn(setup: Setup) -> int:
    """Stage 3: parameters that are whole at the turn from forward to backward, and those on their way.

    A prefetch goes on until it has passed its size, and gathers into a flat buffer, out of which the parameters are
    copied (`AllGatherCoalescedHandle.wait`); two of these are under way.
    """
    return _kept(setup) + min(_cut(setup), _ahead(setup))


def for_backward(setup: Setup) -> int:
    """The same at the begin of backward, where what is kept need not be gathered again.

    Embeddings that are frozen have no backward and are not kept.
    """
    kept, rest = _kept(setup), _cut(setup)
    unused = setup.weight * setup.model.largest if setup.model.frozen > setup.model.trainable else 0
    return max(0, kept - unused) + min(rest - kept, _ahead(setup))


def _cut(setup: Setup) -> int:
    """Stage 3: bytes of all parameters that are not kept whole; nothing is gathered by a single rank."""
    if setup.ranks == 1 or setup.stage < 3:
        return 0
    return setup.weight * setup.model.all - terms.persistent(setup)


def _kept(setup: Setup) -> int:
    """Parameters that stay gathered, or are gathered early.

    One is kept if it is used again within `max_reuse_distance` elements (from a place before the end of forward,
    backward comes back after twice as many), and every submodule, however small, sets off another prefetch, which
    only `max_live_parameters` stops (`partitioned_param_coordinator.py`).
    """
    return min(_cut(setup), setup.weight * max(setup.max_live, setup.max_reuse // 2))


def _ahead(setup: Setup) -> int:
    """What two prefetches gather, the larger one with the largest parameter.

    They stop where `max_live_parameters` are whole, but for the module at work.
    """
    live = _kept(setup) // setup.weight
    each = min(setup.prefetch, max(0, setup.max_live - live))
    return setup.weight * (2 * each + setup.model.largest_parameter + setup.model.largest_untied)


def one_by_one(setup: Setup) -> int:
    """Before the order of the modules is known: the one at work, and the buffer that it was gathered in."""
    if setup.ranks == 1 or setup.stage < 3:
        return 0
    return 2 * setup.weight * setup.model.largest_module
