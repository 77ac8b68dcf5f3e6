"""Counters of skipped steps: what the shares of steps mean where the overflows have no lines of their own."""

from dsdoctor.loss_scale import LossScaleHistory, SkipCount
from dsdoctor.skip_counts import intervals, read


def counted(*pairs, scales=None, **values):
    """A history of (step, skipped so far)."""
    scales = scales or [None] * len(pairs)
    counts = tuple(
        SkipCount(step=step, skipped=skipped, scale=scale) for (step, skipped), scale in zip(pairs, scales, strict=True)
    )
    return LossScaleHistory(source="train.log", attempts=(), counts=counts, **values)


def every(length, share, *, upto):
    return tuple((step, int(step * share)) for step in range(length, upto + 1, length))


def test_no_skips_are_no_pattern():
    reading = read(counted((10, 0), (20, 0), scales=[65536.0, 131072.0]))
    assert (reading.pattern, reading.skipped, reading.settled_at) == ("none", 0, 131072)


def test_skips_of_the_first_line_only_are_the_search():
    reading = read(counted((10, 6), (20, 6), (30, 6), scales=[2048.0] * 3))
    assert (reading.pattern, reading.skipped, reading.warmup_skips) == ("warmup", 6, 6)
    assert (reading.settled_at, reading.recommended_power) == (2048, 11)


def test_a_search_may_take_several_lines():
    assert read(counted((10, 10), (20, 17), (30, 17), (40, 17))).pattern == "warmup"


def test_a_share_that_probes_cannot_reach_is_thrash():
    reading = read(counted((10, 4), *((step, 4 + step // 8) for step in range(20, 410, 10))))
    assert reading.pattern == "thrash"
    assert reading.late_share is not None
    assert 0.1 < reading.late_share < 0.15


def test_even_and_rare_skips_are_probes():
    # window 100, hysteresis 2: two skips every 103 steps, told every 10 steps
    pairs = tuple((step, 2 * (step // 103)) for step in range(10, 1040, 10))
    assert read(counted(*pairs)).pattern == "periodic"
    assert read(counted(*pairs, window=100)).pattern == "periodic"


def test_the_window_of_the_config_decides_where_it_is_known():
    pairs = tuple((step, 2 * (step // 103)) for step in range(10, 1040, 10))
    assert read(counted(*pairs, window=1000)).pattern == "thrash"


def test_every_step_skipped_for_longer_than_a_search_is_a_collapse():
    reading = read(counted(*every(10, 1.0, upto=50)))
    assert (reading.pattern, reading.recommended_precision) == ("collapse", "bf16")
    assert read(counted(*every(10, 1.0, upto=50)), bf16_supported=False).recommended_precision == "fp32"
    assert read(counted(*every(10, 1.0, upto=30))).pattern == "warmup"  # a search from 2^32 can take that long


def test_every_step_skipped_at_the_smallest_scale_is_a_collapse_at_once():
    assert read(counted((10, 0), (20, 10), scales=[64.0, 1.0])).pattern == "collapse"


def test_a_run_that_recovers_has_not_collapsed():
    pairs = (*every(10, 1.0, upto=50), (60, 50), (70, 50), (80, 50))
    assert read(counted(*pairs)).pattern != "collapse"


def test_without_a_scale_skips_are_stuck_or_odd():
    assert read(counted((10, 0), (20, 5), precision="bf16")).pattern == "stuck"
    assert read(counted((100, 0), (200, 1), precision="bf16")).pattern == "outliers"


def test_a_counter_of_a_checkpoint_starts_at_its_first_line():
    parts = intervals(counted((5010, 40), (5020, 40), (5030, 41)).counts)
    assert [(part.steps, part.skipped) for part in parts] == [(10, 0), (10, 1)]


def test_a_scale_that_stands_while_every_step_is_skipped_is_at_its_floor():
    """Megatron with a min_loss_scale of 1000, which its lines do not tell."""
    scales = [max(1000.0, 2.0 ** (16 - k)) for k in range(16)]
    reading = read(counted(*((step, step) for step in range(1, 17)), scales=scales))
    assert (reading.pattern, reading.skipped) == ("collapse", 16)
    assert read(counted(*((step, step) for step in range(1, 9)), scales=scales[:8])).pattern != "collapse"
