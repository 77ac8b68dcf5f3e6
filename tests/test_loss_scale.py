"""The reading of loss-scale histories, on histories made by DeepSpeed's own rule played through here."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsdoctor.loss_scale import LossScaleHistory, ScaleAttempt, read


def played(
    overflows: Callable[[int, float], bool],
    *,
    steps: int,
    power: int = 16,
    hysteresis: int = 2,
    window: int = 1000,
    floor: float = 1.0,
    raises: bool = True,
    known_steps: bool = True,
    loss_finite: bool | None = None,
) -> LossScaleHistory:
    """What DeepSpeed's dynamic scaler (ZeRO, 0.17.1 and later) does when `overflows(step, scale)`.

    Overflow: one unit of hysteresis or half the scale; at the floor the run ends (`raises`). A clean step doubles the
    scale when the number of clean steps since the last overflow, less one, is a positive multiple of the window.
    """
    scale, left, last, attempts, done = 2.0**power, hysteresis, -1, [], 0
    for step in range(steps):
        done = step + 1
        if overflows(step, scale):
            before = scale
            if left > 1:
                left -= 1
            elif scale <= floor and raises:
                attempts.append(ScaleAttempt(step=step, scale=scale, next_scale=scale, raised=True))
                break
            else:
                scale = max(scale / 2, floor)
            attempts.append(ScaleAttempt(step=step if known_steps else None, scale=before, next_scale=scale))
            last = step
        elif step - last - 1 > 0 and (step - last - 1) % window == 0:
            scale *= 2
            left = hysteresis
    return LossScaleHistory(
        source="played",
        attempts=tuple(attempts),
        steps_seen=done if known_steps else None,
        initial_power=power,
        window=window,
        hysteresis=hysteresis,
        floor=floor,
        loss_finite=loss_finite,
    )


def above(power: int) -> Callable[[int, float], bool]:
    """A model whose gradients overflow at every scale above 2**power."""
    return lambda step, scale: scale > 2.0**power


def never(step: int, scale: float) -> bool:
    return False


def always(step: int, scale: float) -> bool:
    return True


def test_no_overflow_is_no_pattern() -> None:
    reading = read(played(never, steps=50))
    assert (reading.pattern, reading.skipped, reading.settled_at) == ("none", 0, None)


# Skips of the search: (p - w) + (h - 1).
@pytest.mark.parametrize(
    ("power", "holds", "hysteresis", "skips"), [(16, 12, 2, 5), (16, 12, 1, 4), (32, 12, 2, 21), (16, 12, 4, 7)]
)
@pytest.mark.parametrize("known_steps", [True, False])
def test_search_at_the_start_is_warmup(power: int, holds: int, hysteresis: int, skips: int, known_steps: bool) -> None:
    history = played(above(holds), steps=200, power=power, hysteresis=hysteresis, known_steps=known_steps)
    reading = read(history)
    assert reading.pattern == "warmup"
    assert reading.skipped == reading.warmup_skips == skips
    assert reading.settled_at == 2.0**holds
    assert reading.recommended_power == holds
    assert reading.recommended_precision is None


def test_search_that_is_still_on_has_not_settled() -> None:
    reading = read(played(above(4), steps=6))
    assert reading.pattern == "warmup"
    assert reading.settled_at is None
    assert reading.recommended_power is None


def test_search_may_pause_for_a_lucky_batch() -> None:
    reading = read(played(lambda step, scale: scale > 2.0**10 and step not in (3, 6), steps=100))
    assert reading.pattern == "warmup"
    assert reading.settled_at == 1024


# Riding the edge: h skips every W + 1 + h steps, first at W + 2 for a model that just holds the start scale.
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_riding_the_edge_is_periodic(hysteresis: int) -> None:
    history = played(above(16), steps=200, window=20, hysteresis=hysteresis)
    first = [a.step for a in history.attempts[: 2 * hysteresis]]
    gap = 20 + 1 + hysteresis
    assert first[hysteresis] - first[0] == gap  # type: ignore[operator]
    reading = read(history)
    assert reading.pattern == "periodic"
    assert reading.settled_at == 2.0**16
    assert reading.recommended_power is None
    assert reading.late_share == 0


def test_riding_the_edge_after_a_search_advises_the_lower_start() -> None:
    reading = read(played(above(12), steps=300, window=50))
    assert (reading.pattern, reading.warmup_skips, reading.settled_at) == ("periodic", 5, 4096)
    assert reading.recommended_power == 12


def test_riding_the_edge_is_seen_without_step_numbers() -> None:
    reading = read(played(above(12), steps=300, window=50, known_steps=False))
    assert (reading.pattern, reading.warmup_skips) == ("periodic", 5)


def test_first_probe_of_a_long_healthy_run_is_periodic() -> None:
    reading = read(played(above(16), steps=1500))
    assert (reading.pattern, reading.skipped) == ("periodic", 2)


def test_growth_faster_than_the_window_is_not_explained_by_it() -> None:
    attempts = tuple(ScaleAttempt(step=100 + 20 * i, scale=2.0**17, next_scale=2.0**16) for i in range(20))
    history = LossScaleHistory(source="x", attempts=attempts, steps_seen=600, window=1000, hysteresis=2)
    assert read(history).pattern == "thrash"


# From a fresh scaler the end comes at overflow number (h - 1) + (p - log2(floor)) + 1; the last one is not a skip.
@pytest.mark.parametrize(
    ("power", "hysteresis", "floor", "number"), [(16, 2, 1, 18), (16, 1, 1, 17), (32, 2, 1, 34), (4, 2, 1, 6)]
)
def test_fall_to_the_floor_is_collapse(power: int, hysteresis: int, floor: float, number: int) -> None:
    history = played(always, steps=100, power=power, hysteresis=hysteresis, floor=floor)
    assert len(history.attempts) == number
    reading = read(history)
    assert (reading.pattern, reading.skipped, reading.settled_at) == ("collapse", number - 1, None)
    assert reading.recommended_precision == "bf16"
    assert reading.recommended_power is None


def test_collapse_on_devices_without_bf16_advises_fp32() -> None:
    assert read(played(always, steps=100), bf16_supported=False).recommended_precision == "fp32"


def test_collapse_with_nan_loss_advises_no_precision() -> None:
    assert read(played(always, steps=100, loss_finite=False)).recommended_precision is None


@pytest.mark.parametrize("known_steps", [True, False])
def test_endless_skipping_at_the_floor_is_collapse(known_steps: bool) -> None:
    """Without ZeRO nothing is raised: the scale stays at 1 and every step is skipped."""
    reading = read(played(always, steps=40, raises=False, known_steps=known_steps))
    assert (reading.pattern, reading.skipped) == ("collapse", 40)


def test_collapse_in_the_middle_of_a_run() -> None:
    assert read(played(lambda step, scale: step >= 500, steps=1000)).pattern == "collapse"


def test_scale_that_touched_the_floor_and_went_on_is_not_collapse() -> None:
    history = played(lambda step, scale: step < 20, steps=200, raises=False)
    assert read(history).pattern == "warmup"


def test_irregular_overflows_long_after_the_search_are_thrash() -> None:
    late = {30, 100, 121, 135, 140, 160, 190, 195, 201}
    reading = read(played(lambda step, scale: scale > 2.0**14 or step in late, steps=220))
    assert (reading.pattern, reading.skipped, reading.warmup_skips) == ("thrash", 12, 3)
    assert reading.late_share == pytest.approx(9 / 217)


def test_a_few_odd_batches_are_outliers() -> None:
    reading = read(played(lambda step, scale: step in (300, 5000), steps=9000))
    assert reading.pattern == "outliers"


def test_hysteresis_zero_is_stuck() -> None:
    """With hysteresis 0 the counter goes negative and the scale never falls."""
    attempts = tuple(ScaleAttempt(step=i, scale=65536, next_scale=65536) for i in range(8))
    history = LossScaleHistory(source="x", attempts=attempts, steps_seen=8, hysteresis=0, initial_power=16)
    assert read(history).pattern == "stuck"


def test_static_scale_that_overflows_again_and_again_is_stuck() -> None:
    attempts = tuple(ScaleAttempt(step=3 * i, scale=2.0**20, next_scale=2.0**20) for i in range(10))
    history = LossScaleHistory(source="x", attempts=attempts, steps_seen=30, dynamic=False)
    assert read(history).pattern == "stuck"


def test_single_skip_in_bf16_is_no_scale_pattern() -> None:
    attempts = (ScaleAttempt(step=7, scale=1, next_scale=1),)
    history = LossScaleHistory(source="x", attempts=attempts, steps_seen=100, dynamic=False, precision="bf16")
    reading = read(history)
    assert (reading.pattern, reading.settled_at) == ("outliers", None)


def falling(*, first: int, halvings: int, first_step: int | None) -> LossScaleHistory:
    """A fall from 2^24, a step each, that a record shows from its `first_step` on and in which it ends."""
    attempts = tuple(
        ScaleAttempt(step=first + k, scale=2.0 ** (24 - k), next_scale=2.0 ** (23 - k)) for k in range(halvings)
    )
    seen = first + halvings
    return LossScaleHistory(source="x", attempts=attempts, steps_seen=seen, first_step=first_step, ended=False)


def test_a_fall_that_a_record_without_its_beginning_opens_with_is_the_search() -> None:
    reading = read(falling(first=900, halvings=14, first_step=900))
    assert (reading.pattern, reading.warmup_skips, reading.settled_at) == ("warmup", 14, None)


@pytest.mark.parametrize("first_step", [None, 1])
def test_a_fall_after_hundreds_of_clean_steps_is_no_search(first_step: int | None) -> None:
    assert read(falling(first=400, halvings=14, first_step=first_step)).pattern == "thrash"


def test_one_probe_at_the_head_of_an_excerpt_is_no_search() -> None:
    reading = read(falling(first=900, halvings=1, first_step=900))
    assert (reading.pattern, reading.warmup_skips, reading.recommended_power) == ("periodic", 0, None)


def test_a_probe_goes_on_where_a_clean_step_lies_between_its_overflows() -> None:
    """Hysteresis is not given back in between, so the second overflow at the grown scale halves it."""
    probes = tuple(
        ScaleAttempt(step=at + 103 * k, scale=2.0**17, next_scale=scale)
        for k in range(1, 8)
        for at, scale in ((0, 2.0**17), (3, 2.0**16))
    )
    history = LossScaleHistory(source="x", attempts=probes, steps_seen=900, window=100, initial_power=16)
    assert (read(history).pattern, read(history).late_share) == ("periodic", 0)
