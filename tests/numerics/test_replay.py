"""The operation and the cause that a second run of a module names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.numerics.events import Origin
from dsdoctor.numerics.replay import NotReplayable, RandomState, find_origin

INF = float("inf")
half = torch.float16


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def origin(function: Callable[..., Tensor], *args: Tensor) -> Origin:
    return find_origin(Function(function), args, {}, RandomState.now())


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


CASES = [
    ("log", lambda x: torch.log(x - 1) * 2 + 1, ones(3), "aten.log", "domain"),
    ("log in place", lambda x: (x - 1).log_().mul(2), ones(3), "aten.log_", "domain"),
    ("log into a slice", lambda x: torch.cat([x, (x - 1).clone()[:2].log_()]), ones(3), "aten.log_", "domain"),
    ("division", lambda x: x / (x - x), ones(3), "aten.div", "domain"),
    ("root", lambda x: (x - 2).sqrt(), ones(3), "aten.sqrt", "domain"),
    ("power", lambda x: (x - 2) ** 0.5, ones(3), "aten.pow", "domain"),
    ("matmul", lambda x: torch.relu(x @ x), ones(2, 2, dtype=half) * 300, "aten.mm", "overflow"),
    ("product", lambda x: x * x, ones(2, dtype=half) * 300, "aten.mul", "overflow"),
    ("exp", lambda x: torch.exp(x), ones(2) * 1e4, "aten.exp", "overflow"),
    ("cast", lambda x: x.to(half).float(), ones(2) * 1e6, "aten._to_copy", "cast-overflow"),
    ("inf - inf", lambda x: (x * x) - (x * x), ones(2, dtype=half) * 300, "aten.mul", "overflow"),
    ("masked row", lambda x: torch.softmax(x.masked_fill(x > 0, -INF), -1), ones(2, 3), "aten._softmax", "masked-row"),
    ("mean of nothing", lambda x: x[:0].mean() + x, ones(3), "aten.mean", "unknown"),
    (
        "ignored labels",
        lambda x: nn.functional.cross_entropy(x, torch.full((2,), -100)),
        ones(2, 3),
        "aten.nll_loss_forward",
        "ignored-labels",
    ),
]


@pytest.mark.parametrize(("function", "value", "op", "cause"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_operation_and_cause(function: Callable[..., Tensor], value: Tensor, op: str, cause: str) -> None:
    found = origin(function, value)
    assert (found.op, found.cause, found.deliberate) == (op, cause, False)


def test_the_exact_result_of_an_overflow_is_told() -> None:
    detail = origin(lambda x: x * x, torch.tensor([300.0], dtype=half)).detail
    assert "9e+04" in detail, "300 * 300"
    assert "6.55e+04" in detail, "65504, the largest float16"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.masked_fill(x > 0, -INF),
        lambda x: torch.where(x > 0, -INF, x),
        lambda x: x + torch.tensor(-INF),
        lambda x: x + torch.full_like(x, -INF).triu(),
        lambda x: nn.functional.pad(x, (1, 1), value=-INF),
        lambda x: x + torch.finfo(x.dtype).min + torch.full_like(x, torch.finfo(x.dtype).min),
    ],
    ids=["masked_fill", "where", "tensor", "triu", "pad", "twice the lowest"],
)
def test_a_constant_is_deliberate(function: Callable[..., Tensor]) -> None:
    assert origin(function, ones(3, 3)).deliberate


def test_a_mask_from_outside_is_not_the_origin() -> None:
    mask = torch.zeros(3, 3).fill_diagonal_(-INF)
    found = origin(lambda x, m: torch.log(torch.softmax(x + m, -1)), ones(3, 3), mask)
    assert (found.op, found.cause) == ("aten.log", "domain")


def test_a_bad_buffer_is_named() -> None:
    norm = nn.BatchNorm1d(3).eval()
    norm.running_mean[1] = float("nan")  # type: ignore[index]
    found = find_origin(norm, (ones(2, 3),), {}, RandomState.now())
    assert (found.op, found.cause) == (None, "corrupted-weights")
    assert "running_mean" in found.detail


def test_dropout_is_repeated_with_its_own_mask() -> None:
    drop = nn.Dropout(0.5)
    torch.manual_seed(0)
    before = RandomState.now()
    value = ones(64, dtype=half) * 40000
    assert drop(value).isinf().any()
    after = torch.get_rng_state()
    found = find_origin(drop, (value,), {}, before)
    assert found.cause == "overflow"
    assert torch.equal(torch.get_rng_state(), after)


def test_the_input_of_a_submodule_is_looked_for_without_running_it() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Function(lambda x: pytest.fail("the child must not run"))

        def forward(self, x: Tensor) -> Tensor:
            return self.child(1 / (x - 1))  # type: ignore[no-any-return]

    parent = Parent()
    found = find_origin(parent, (ones(2),), {}, RandomState.now(), child=parent.child)
    assert (found.op, found.cause) == ("aten.reciprocal", "domain")


def test_hooks_below_do_not_run_and_are_back_afterwards() -> None:
    calls: list[int] = []
    parent = nn.Sequential(nn.Identity(), Function(torch.log))
    parent[0].register_forward_hook(lambda *_: calls.append(1))
    find_origin(parent, (torch.zeros(2),), {}, RandomState.now())
    assert calls == []
    parent(torch.zeros(2))
    assert calls == [1]


def test_arguments_with_a_state_are_refused() -> None:
    with pytest.raises(NotReplayable, match="state"):
        find_origin(Function(lambda x, cache: x), (ones(1), object()), {}, RandomState.now())


def test_communication_is_refused(tmp_path: object) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def reduce(x: Tensor) -> Tensor:
            distributed.all_reduce(x)
            return x

        with pytest.raises(NotReplayable, match="ranks"):
            origin(reduce, ones(2))
    finally:
        distributed.destroy_process_group()


def test_the_line_of_the_program_and_the_element_are_named() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x)  # here

    x = torch.ones(2, 3)
    x[1, 2] = 0
    origin = find_origin(Log(), (x,), {}, RandomState.now())
    assert origin.line is not None
    assert origin.line.startswith(__file__)
    assert origin.line.endswith("return torch.log(x)  # here")
    assert origin.detail.endswith("1 of 6 elements, the first at [1, 2]")


@pytest.mark.parametrize(("dtype", "cause"), [(torch.float16, "lost-eps"), (torch.bfloat16, None)])
def test_an_eps_that_the_type_cannot_hold(dtype: torch.dtype, cause: str | None) -> None:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.norm() + 1e-8)

    x = torch.zeros(3, dtype=dtype)
    origin = find_origin(Normed(), (x,), {}, RandomState.now())
    if cause is None:
        assert bool(Normed()(x).isfinite().all()), "bfloat16 holds 1e-8"
    else:
        assert (origin.cause, origin.op) == (cause, "aten.div")
        assert "1e-08 is 0 in float16" in origin.detail


def test_an_eps_that_is_held_is_not_blamed() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1e-3) / (x * 0)

    assert find_origin(Halved(), (torch.ones(3).half(),), {}, RandomState.now()).cause == "domain"
