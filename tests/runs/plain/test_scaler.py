"""The dynamic loss scale against DeepSpeed's own, move for move."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler as theirs
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.runs.plain.scaler import AutocastScale, DynamicScale, LossScale, loss_scale
from dsdoctor.runs.plain.settings import LossScaleSettings, Settings


def reference(settings: LossScaleSettings) -> theirs.DynamicLossScaler:
    return theirs.DynamicLossScaler(
        init_scale=settings.initial,
        scale_window=settings.window,
        min_scale=settings.minimum,
        delayed_shift=settings.hysteresis,
        consecutive_hysteresis=settings.consecutive_hysteresis,
    )


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    power=st.integers(0, 8),
    window=st.integers(1, 5),
    hysteresis=st.integers(0, 4),
    consecutive=st.booleans(),
    minimum=st.sampled_from([1.0, 3.0, 16.0]),
)
def test_moves_as_deepspeed_s(
    overflows: list[bool], power: int, window: int, hysteresis: int, consecutive: bool, minimum: float
) -> None:
    settings = LossScaleSettings(
        initial=max(2.0**power, minimum),
        window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        minimum=minimum,
    )
    ours, deepspeed_s = DynamicScale(settings), reference(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.dist, "get_rank", lambda: 1)
        for overflow in overflows:
            try:
                deepspeed_s.update_scale(overflow)
            except Exception:
                with pytest.raises(Exception, match=r"^Current loss scale already at minimum"):
                    ours.update(overflow)
                return
            ours.update(overflow)
            assert ours.scale == deepspeed_s.cur_scale


def test_the_exception_is_a_plain_one() -> None:
    scale = DynamicScale(LossScaleSettings(initial=1.0, hysteresis=1))
    with pytest.raises(Exception, match="already at minimum") as caught:
        scale.update(overflow=True)
    assert type(caught.value) is Exception


def test_before_0_17_1_the_window_is_one_step_shorter() -> None:
    old = DynamicScale(LossScaleSettings(initial=4.0, window=3), growth_delay=0)
    new = DynamicScale(LossScaleSettings(initial=4.0, window=3), growth_delay=1)
    grown = {"old": 0, "new": 0}
    for step in range(1, 5):
        for name, scale in (("old", old), ("new", new)):
            scale.update(overflow=False)
            if scale.scale > 4 and not grown[name]:
                grown[name] = step
    assert grown == {"old": 3, "new": 4}


def test_autocast_follows_torch_s_grad_scaler() -> None:
    ours = AutocastScale()
    torch_s = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    torch_s.scale(torch.zeros(1))
    for step in range(2005):
        overflow = step in (2, 3)
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        torch_s.step(optimizer)
        torch_s.update()
        ours.update(overflow)
    assert ours.scale == torch_s.get_scale() == 2.0**15


def test_a_saved_scale_goes_on_where_it_was() -> None:
    settings = LossScaleSettings(window=2, hysteresis=3)
    first, second = DynamicScale(settings), DynamicScale(settings)
    for overflow in (True, True, True, False):
        first.update(overflow)
    second.restore(first.state())
    for overflow in (False, False, False, True):
        first.update(overflow)
        second.update(overflow)
        assert first.scale == second.scale


def test_each_precision_gets_its_scale() -> None:
    sizes = {"micro_batch": 1, "accumulation": 1, "train_batch": 1}
    static = loss_scale(Settings(**sizes, precision="fp16", loss_scale=LossScaleSettings(static=8.0)))
    assert (type(static), static.scale, static.checks) == (LossScale, 8.0, True)
    assert isinstance(loss_scale(Settings(**sizes, precision="fp16")), DynamicScale)
    assert isinstance(loss_scale(Settings(**sizes, autocast=torch.float16)), AutocastScale)
    for plain in (Settings(**sizes), Settings(**sizes, precision="bf16"), Settings(**sizes, autocast=torch.bfloat16)):
        scale = loss_scale(plain)
        assert (scale.scale, scale.checks) == (1.0, False)
