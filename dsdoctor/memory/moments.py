"""What a rank holds on its device at the moments that can be the highest, in their order in time.

Each moment is the lasting terms that exist by then (`memory.terms`) plus what only lives within it. Symbols as in
`memory.setup`. Everything is pure arithmetic; the sources of the transients are named where they are computed.
"""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.memory import gathering, terms
from dsdoctor.memory.facts import Holding, Moment
from dsdoctor.memory.setup import Setup

_NORM = 8
"""Bytes of an element whose norm is taken: in fp64 (`get_norm_dtype`)."""
_ALLREDUCE = 500_000_000
"""Elements that the engine flattens at a time at stage 0 (`DeepSpeedEngine.buffered_allreduce_fallback`)."""
PARTITION, INITIALIZE = "partitioning", "initialize"
FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
FIRST_BACKWARD, FIRST_STEP = "first backward", "first optimizer step"
SAVE, CONSOLIDATE = "checkpoint save", "consolidated save"
TRAINING = (FORWARD, BACKWARD, STEP)
"""A step once all states are there."""
BEFORE_TRAINING = (PARTITION, INITIALIZE)


def device_moments(setup: Setup) -> tuple[Moment, ...]:
    """From `deepspeed.initialize` to the steady step. The first step has no optimizer states before its end."""
    before = lasting(setup, states=_states_at_init(setup))
    steady = lasting(setup)
    return (
        Moment(name=PARTITION, holding=_partition(setup)),
        Moment(name=INITIALIZE, holding=_initialize(setup)),
        Moment(name=FIRST_BACKWARD, holding=_backward(setup, before, traced=setup.accumulation_steps > 1)),
        Moment(name=FIRST_STEP, holding=_step(setup, steady)),
        Moment(name=FORWARD, holding=_forward(setup, steady)),
        Moment(name=BACKWARD, holding=_backward(setup, steady)),
        Moment(name=STEP, holding=_step(setup, steady)),
        Moment(name=SAVE, holding=steady),
        Moment(name=CONSOLIDATE, holding=_consolidate(setup, steady)),
    )


def lasting(setup: Setup, *, states: bool = True) -> Holding:
    """What is there between two steps, with or without the optimizer's states."""
    stage3 = setup.stage == 3
    kept = setup.full_accumulation or stage3
    return Holding(
        weights=terms.weights(setup),
        gradients=terms.gradients(setup) if kept else 0,
        optimizer=terms.master(setup) + (terms.states(setup) if states else 0),
        buffers=(terms.bucket(setup) if stage3 else 0) + terms.staging(setup),
        overhead=terms.overhead(setup),
    )


def end_of_backward(setup: Setup) -> Holding:
    """Between the last backward of a step and the step itself: the steady state that is usually quoted."""
    held = lasting(setup)
    low = setup.weight * setup.model.trainable if setup.full_accumulation else 0
    return replace(held, gradients=terms.gradients(setup) + low)


def _states_at_init(setup: Setup) -> bool:
    """The wrappers of 16-bit stage 0 make the states when they are built, by a step with gradients of zero."""
    return setup.stage == 0 and setup.low_precision


def _partition(setup: Setup) -> Holding:
    """Before any master weights: the model on the device, and what it is turned into.

    Stages 1 and 2 flatten each group beside its parameters. Without zero.Init stage 3 moves the whole model to the
    device first (`_configure_distributed_model`) and cuts one parameter after the other.
    """
    overhead = terms.overhead(setup)
    whole = setup.weight * setup.model.all
    if setup.stage == 0:
        return Holding(weights=whole, overhead=overhead)
    if setup.stage < 3:
        return Holding(weights=whole, buffers=setup.weight * setup.model.trainable, overhead=overhead)
    if setup.built_in_shards:
        return Holding(weights=setup.weight * setup.weight_shard, overhead=overhead)
    first = setup.weight * -(-setup.model.largest // setup.ranks)
    return Holding(weights=whole, buffers=first, overhead=overhead)


def _initialize(setup: Setup) -> Holding:
    """Masters, and a first gradient for them, which `initialize_optimizer_states` makes before stage 3's buckets."""
    held = lasting(setup, states=_states_at_init(setup))
    if setup.stage == 0:
        return _initialize_plain(setup, held)
    part = setup.stepped_at_a_time
    first = setup.master * part if setup.offload_optimizer == "none" and not setup.full_accumulation else 0
    if setup.stage < 3:
        return held.plus(gradients=first)
    ready = held.plus(weights=-terms.persistent(setup), buffers=extra_at_init(setup))
    bare = replace(ready, gradients=first, buffers=0)
    return max(ready, bare, key=lambda one: one.total)


def extra_at_init(setup: Setup) -> int:
    """Stage 3, with its buckets: twice the largest trainable parameter, as was seen on real engines."""
    return 2 * setup.weight * setup.model.largest_parameter


def _initialize_plain(setup: Setup, held: Holding) -> Holding:
    """Stage 0: the 16-bit wrappers make the states by a step, the fused one with gradients of its flat masters only."""
    if not setup.low_precision:
        return held
    return held.plus(gradients=4 * setup.model.trainable) if setup.fused else _step(setup, held)


def _forward(setup: Setup, held: Holding) -> Holding:
    """All activations and the logits, beside the gradients of earlier micro-steps."""
    known = setup.activations
    held = held.plus(activations=known.saved + known.loss_forward)
    held = held.plus(buffers=terms.secondary(setup) + gathering.at_the_turn(setup))
    if setup.accumulation_steps == 1 or setup.full_accumulation:
        return held
    if setup.stage > 1:
        return held.plus(gradients=_accumulated(setup))
    return held.plus(gradients=setup.weight * setup.model.trainable, buffers=terms.bucket(setup))


def _backward(setup: Setup, held: Holding, *, traced: bool = True) -> Holding:
    """The highest of its begin, with all activations, the layers, and its end, with all gradients."""
    held = held.plus(buffers=terms.secondary(setup), gradients=_accumulated(setup))
    known = setup.activations
    gathered = gathering.for_backward(setup) if traced else gathering.one_by_one(setup)
    begin = held.plus(activations=known.saved + known.loss, buffers=gathered)
    within = known.output + known.passing + known.working
    head = held.plus(activations=known.saved + within, gradients=_head(setup), buffers=gathered + _early_bucket(setup))
    end = _reducing(setup, held).plus(buffers=gathered)
    return max(
        begin, head, end, _first_layer(setup, held, gathered), *_tied_end(setup, held), key=lambda one: one.total
    )


def _first_layer(setup: Setup, held: Holding, gathered: int) -> Holding:
    """The layer that backward comes to last, computed again under checkpointing; its gradients are not there yet."""
    known = setup.activations
    working = known.output + known.passing + known.working if known.working else 0
    if setup.stage >= 2:
        return _reducing(setup, held).plus(buffers=gathered, activations=working)
    layers = setup.model.shape.layers if setup.model.shape is not None else 1
    others = setup.weight * setup.model.trainable * (layers - 1) // layers
    return held.plus(gradients=others, buffers=_early_bucket(setup), activations=working)


def _head(setup: Setup) -> int:
    """The first gradients: of the head, and of the layer before it.

    Stage 2 makes room for all of its own part when the first bucket is reduced (`copy_grads_in_partition`). A head that
    is used twice waits for its other part.
    """
    if not setup.activations.known:
        return 0
    w, model = setup.weight, setup.model
    layers = model.shape.layers if model.shape is not None else 1
    first = w * min(model.trainable, max(model.tied, model.largest_parameter) + model.trainable // layers)
    if setup.stage == 2 and setup.offload_optimizer == "none":
        return w * model.tied + setup.accumulated * setup.trained_shard
    return first if setup.stage < 2 else w * (model.tied or model.largest_parameter)


def _early_bucket(setup: Setup) -> int:
    return terms.bucket(setup) if setup.stage < 3 else 0


def _tied_end(setup: Setup, held: Holding) -> list[Holding]:
    """The end of backward for a parameter that is used twice: both parts of its gradient, and their sum."""
    if not setup.model.tied or not _as_they_come(setup):
        return []
    own = setup.accumulated * setup.trained_shard if setup.stage < 3 and setup.offload_optimizer == "none" else 0
    normed = _NORM // (setup.ranks if setup.stage == 3 else 1) if setup.offload_optimizer != "none" else 0
    parts = max(3 * setup.weight, setup.weight + normed) * setup.model.tied
    return [held.plus(gradients=own + parts, buffers=_early_bucket(setup))]


def _accumulated(setup: Setup) -> int:
    """Gradients of earlier micro-steps that wait for the boundary apart from those of this one (stage 2)."""
    if setup.accumulation_steps == 1 or setup.stage != 2 or setup.offload_optimizer != "none":
        return 0
    return setup.accumulated * setup.trained_shard


def _reducing(setup: Setup, held: Holding) -> Holding:
    """The end of backward, where gradients and what reduces them are highest."""
    w, trained, shard = setup.weight, setup.model.trainable, setup.trained_shard
    bucket = terms.bucket(setup)
    if setup.full_accumulation:
        flat = setup.accumulated * min(trained, _ALLREDUCE)  # by then the 16-bit ones have been added and freed
        return held.plus(gradients=max(0, w * trained - flat), buffers=flat)
    if setup.stage == 0:
        return held.plus(gradients=w * trained, buffers=w * min(trained, _ALLREDUCE))
    if not _as_they_come(setup):
        return _reducing_at_the_boundary(setup, held)
    waiting = w * setup.model.tied
    if setup.stage < 3:
        own = 0 if setup.offload_optimizer != "none" else setup.accumulated * shard
        return held.plus(gradients=own + waiting + _in_flight(setup), buffers=bucket)
    return held.plus(gradients=waiting + _in_flight(setup))


def _as_they_come(setup: Setup) -> bool:
    """Gradients are reduced within backward; stage 1 does so with overlap_comm only."""
    return setup.stage > 1 or (setup.stage == 1 and setup.overlap)


def _in_flight(setup: Setup) -> int:
    """Gradients on their way into a reduction, at stages 2 and 3, where no more of them is kept whole.

    One in its own memory while what the bucket holds is flattened for several ranks; or, with CPU offload, one that is
    made fp64 for its norm, at stage 3 only the own part of it.
    """
    w, largest = setup.weight, setup.model.largest_untied
    flattened = setup.model.fullest_bucket(setup.reduce_bucket) if setup.ranks > 1 or setup.stage == 3 else 0
    normed = _NORM * -(-largest // (setup.ranks if setup.stage == 3 else 1))
    return w * largest + max(w * flattened, normed if setup.offload_optimizer != "none" else 0)


def _reducing_at_the_boundary(setup: Setup, held: Holding) -> Holding:
    """Stage 1: all gradients are there; moved through the bucket, those of the own part to a buffer of their own.

    `reduce_ipg_grads`, `copy_grads_in_partition`: the own part is allocated when the first bucket has been reduced, by
    which time that bucket's gradients have left their own memory.
    """
    w, trained = setup.weight, setup.model.trainable
    moved = setup.model.first_bucket(setup.reduce_bucket)
    if setup.offload_optimizer == "none":
        more = max(0, w * setup.trained_shard - w * moved)
    else:
        more = max(0, _NORM * setup.model.largest_parameter - w * moved)
    more = max(more, 2 * w * setup.model.tied)
    return held.plus(gradients=w * trained + more, buffers=terms.bucket(setup))


def _step(setup: Setup, held: Holding) -> Holding:
    """The optimizer's step: gradients in the master's precision and what the kernel needs for itself."""
    temporaries = setup.temporaries * (setup.master or 4)
    if setup.stage == 0:
        return _plain_step(setup, held)
    if setup.offload_optimizer != "none":
        return held
    if setup.full_accumulation:
        return held.plus(buffers=(temporaries + setup.accumulated) * setup.trained_shard)
    a, m = setup.accumulated, setup.master
    if setup.stage == 3:
        part = setup.stepped_at_a_time
        flat = a * part if a != m else 0
        return held.plus(gradients=m * part, buffers=max(flat, temporaries * part))
    shard = setup.trained_shard
    flattened = (2 * a + (m if a != m else 0)) * shard
    return held.plus(gradients=m * shard, buffers=max(flattened - m * shard, temporaries * shard))


def _plain_step(setup: Setup, held: Holding) -> Holding:
    """Stage 0. torch's Adam steps one parameter after the other on a CPU, all at once on a GPU (foreach).

    The 16-bit wrappers need fp32 gradients; the fused one casts every gradient and then flattens them
    (`FP16_Optimizer.step`).
    """
    trained, largest = setup.model.trainable, setup.model.largest_parameter
    kernel = setup.temporaries * 4 * (largest if setup.device == "cpu" else trained)
    if not setup.low_precision:
        return held.plus(gradients=4 * trained, buffers=kernel)
    flat = 4 * trained if setup.fused else 0
    return held.plus(gradients=(setup.weight + 4) * trained, buffers=max(kernel, flat))


def _consolidate(setup: Setup, held: Holding) -> Holding:
    """Stage 3 gathers one module after the other for a file with all weights; below it they are there anyway."""
    if setup.stage < 3:
        return held
    return held.plus(buffers=setup.weight * setup.model.largest_module)
