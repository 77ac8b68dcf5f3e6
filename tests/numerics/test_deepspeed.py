"""The detector on real DeepSpeed with one rank; `test_first_bad.py` has two."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.finding import FirstBad
from dsdoctor.numerics import DebugUnderflowOverflow, Detector, attach
from tests.numerics.test_phases import Log, Net
from tests.numerics.test_rules import Singular

deepspeed = pytest.importorskip("deepspeed")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one, and fp16 allowed on a CPU that DeepSpeed would refuse."""
    from deepspeed.accelerator import get_accelerator

    patch = pytest.MonkeyPatch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }.items():
        patch.setenv(name, value)
    if get_accelerator().device_name() == "cpu":
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    deepspeed.init_distributed(dist_backend="gloo" if get_accelerator().device_name() == "cpu" else None)
    yield
    torch.distributed.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    patch.undo()


def config(stage: int, precision: str = "bf16", **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # nothing stays gathered
        zero |= dict.fromkeys(
            ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 0
        ) | {"stage3_prefetch_bucket_size": 0}
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        **more,
    }
    if precision != "fp32":
        settings[precision] = {"enabled": True, **more.get(precision, {})}
    return settings


def initialize(model: nn.Module, settings: dict[str, Any]) -> Any:
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def run(
    engine: Any, data: list[Tensor], **options: Any
) -> tuple[Detector, list[tuple[FirstBad, str, str]], list[float]]:
    hits: list[tuple[FirstBad, str, str]] = []
    losses = []
    dtype = next(engine.module.parameters()).dtype
    with attach(engine, on_first_bad=lambda *hit: hits.append(hit), **{"mode": "frames", **options}) as detector:
        for batch in data:
            loss = engine(batch.to(dtype)).float().pow(2).mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    assert detector.problems == []
    return detector, hits, losses


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 8) for _ in range(count)]


STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
def test_healthy_run_is_silent_and_frames_hold_whole_weights(stage: int) -> None:
    engine = initialize(Net(), config(stage))
    seen: list[str] = []
    with attach(engine, mode="frames", trace_batches=[2], on_first_bad=lambda *hit: seen.append(hit[1])) as detector:
        for batch in batches(6):
            engine.backward(engine(batch.bfloat16()).float().mean())
            frames = detector._frames.last()
            engine.step()
    rows = {row.label: row.range for frame in frames for row in frame.rows if frame.name == "first"}
    weight = rows["weight"]
    assert weight is not None, "gathered, not of size 0"
    assert weight.high > 0
    assert (seen, detector.problems) == ([], [])


def test_the_drop_in_class_sees_whole_weights_after_initialize(capsys: pytest.CaptureFixture[str]) -> None:
    engine = initialize(Net(), config(3))
    debug = DebugUnderflowOverflow(engine, trace_batch_nums=[0])
    engine.backward(engine(batches(1)[0].bfloat16()).float().mean())
    debug.remove()
    assert debug.problems == []
    assert re.search(r"first Linear\n\d\.\d\de.\d\d \d\.\d\de.\d\d weight\n", capsys.readouterr().out)


@STAGES
def test_forward_birth_with_step_and_operation(stage: int) -> None:
    net = Net(nn.Sequential(nn.Linear(8, 8), Log()))
    engine = initialize(net, config(stage))

    def zero_from_third_step(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        zero_from_third_step.calls += 1  # type: ignore[attr-defined]
        return output * 0 if zero_from_third_step.calls > 5 else None  # type: ignore[attr-defined]

    zero_from_third_step.calls = 0  # type: ignore[attr-defined]
    net.middle[0].register_forward_hook(zero_from_third_step)  # type: ignore[index, union-attr, operator]
    found = run(engine, batches(8))[1][0][0]
    assert (found.step, found.micro_step, found.phase) == (2, 1, "forward")
    assert (found.module, found.kind, found.op) == ("middle.1", "inf", "aten.log")


@STAGES
def test_corrupted_weight(stage: int) -> None:
    net = Net(nn.Linear(8, 8))
    with torch.no_grad():
        net.middle.weight[0, 0] = float("nan")  # type: ignore[union-attr, index, operator]
    found = run(initialize(net, config(stage)), batches(2))[1][0][0]
    assert (found.step, found.phase, found.module, found.tensor) == (0, "parameter", "middle", "weight")


@STAGES
def test_overflow_of_a_linear_in_fp16_at_any_scale(stage: int) -> None:
    net = Net(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    nn.init.constant_(net.middle[0].weight, 5e4)  # type: ignore[index, union-attr, arg-type]
    nn.init.ones_(net.first.weight)
    engine = initialize(net, config(stage, "fp16", fp16={"initial_scale_power": 4}))
    found, report, patch = run(engine, [b.abs() + 1 for b in batches(2)])[1][0]
    assert (found.step, found.phase, found.module, found.kind) == (0, "forward", "middle.0", "inf")
    assert found.cause == "overflow"
    assert 'keep_in_fp32(model, "middle.0"' in patch
    assert "middle.0 Linear" in report


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_scale_search_is_silent(stage: int) -> None:
    engine = initialize(Net(), config(stage, "fp16", fp16={"initial_scale_power": 24, "hysteresis": 1}))
    _, hits, _ = run(engine, batches(32))
    assert engine.skipped_steps > 0, "the search has to overflow"
    assert hits == []


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_bad_at_every_scale(stage: int) -> None:
    class Singular(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sqrt((x * 0).pow(2)) + x

    engine = initialize(Net(Singular()), config(stage, "fp16", fp16={"initial_scale_power": 2, "hysteresis": 1}))
    hits: list[FirstBad] = []

    def until_the_floor() -> None:
        for batch in batches(12):
            engine.backward(engine(batch.half()).float().mean())
            engine.step()

    with (
        attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)),
        pytest.raises(Exception, match="minimum"),
    ):
        until_the_floor()
    assert (hits[0].step, hits[0].phase, hits[0].module) == (0, "backward", "middle")


@STAGES
@pytest.mark.parametrize("mode", ["frames", "sentinel"])
def test_bit_equal_losses(stage: int, mode: Any) -> None:
    def losses(observed: bool) -> list[float]:
        torch.manual_seed(3)
        engine = initialize(Net(nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8))), config(stage))
        torch.manual_seed(4)
        data = [torch.randn(4, 8) for _ in range(20)]
        if observed:
            return run(engine, data, mode=mode)[2]
        values = []
        for batch in data:
            loss = engine(batch.bfloat16()).float().pow(2).mean()
            values.append(loss.item())
            engine.backward(loss)
            engine.step()
        return values

    assert losses(True) == losses(False)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_step_skipped_by_bf16_is_still_a_finding(stage: int) -> None:
    data = batches(4)
    data[3][0, 0] = float("nan")
    found = run(initialize(Net(), config(stage)), data)[1][0][0]
    assert (found.step, found.micro_step, found.phase, found.kind) == (1, 1, "input", "nan")


OFFLOADED = {"device": "cpu"}
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "clipping": (2, "bf16", {"gradient_clipping": 0.1}),
    "autocast": (1, "fp32", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "offloaded optimizer": (2, "bf16", {"offload_optimizer": OFFLOADED}),
    "offloaded weights": (3, "bf16", {"offload_optimizer": OFFLOADED, "offload_param": OFFLOADED}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["frames", "auto"])
def test_other_kinds_of_training(kind: str, mode: Any) -> None:
    """Healthy steps are silent, then a bad batch is found."""
    stage, precision, more = KINDS[kind]
    settings = config(stage, precision) | {"zero_force_ds_cpu_optimizer": False}
    for key, value in more.items():
        (settings["zero_optimization"] if key.startswith("offload") else settings)[key] = value
    data = batches(8)
    data[5][0, 0] = float("nan")
    engine = initialize(Net(), settings)
    detector, hits, _ = run(engine, data, mode=mode)
    assert [(hit[0].step, hit[0].micro_step, hit[0].phase) for hit in hits] == [(2, 1, "input")]
    assert detector.warnings == []


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_steps_that_are_skipped_in_silence(stage: int) -> None:
    """Under bf16 DeepSpeed says nothing of a step that it skips."""
    engine = initialize(Net(Singular()), config(stage) | {"gradient_accumulation_steps": 1})
    detector, _, _ = run(engine, batches(40), mode="sentinel")
    assert len(detector.warnings) == 1
    assert "40 of the last 40 steps changed no weight" in detector.warnings[0]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["frames", "sentinel"])
def test_a_pipeline(mode: Any) -> None:
    """One stage; two are tried by hand. The engine runs forward and backward by its own schedule."""
    from deepspeed.pipe import PipelineModule

    class Fails(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.log(super().forward(x) * 0) if self.calls == 7 else super().forward(x)

    net = PipelineModule(layers=[nn.Linear(8, 8), Fails(8, 8), nn.Linear(8, 8)], num_stages=1, loss_fn=nn.MSELoss())
    settings = config(0, "fp32") | {"gradient_accumulation_steps": 4, "steps_per_print": 1000}
    engine = initialize(net, settings)
    hits: list[FirstBad] = []
    samples = iter([(batch, batch) for batch in batches(12)])
    with attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(found)) as detector:
        for _ in range(3):
            engine.train_batch(data_iter=samples)
    assert detector.problems == []
    assert [(h.step, h.micro_step, h.phase, h.module) for h in hits] == [(1, 2, "forward", "1")]


def test_input_that_overflows_in_the_engines_cast() -> None:
    engine = initialize(Net(), config(1, "fp16", fp16={"initial_scale_power": 4, "auto_cast": True}))
    hits: list[FirstBad] = []
    with attach(engine, mode="frames", on_first_bad=lambda found, *_: hits.append(found)):
        engine.backward(engine(torch.full((4, 8), 1e6)).float().mean())
    assert (hits[0].phase, hits[0].kind, hits[0].cause) == ("input", "inf", "cast-overflow")


def plain(model: nn.Module, settings: dict[str, Any]) -> Any:
    from dsdoctor.runs import plain

    return plain.initialize(model=model, model_parameters=list(model.parameters()), config=settings)[0]


def test_the_plain_engine_is_understood_as_well() -> None:
    """Scale search silent, a bad batch found at its step, as on DeepSpeed."""
    fp16 = config(2, "fp16", fp16={"initial_scale_power": 24, "hysteresis": 1})
    engine = plain(Net(), fp16)
    assert run(engine, batches(32))[1] == []
    assert engine.skipped_steps > 0
    data = batches(4)
    data[3][0, 0] = float("nan")
    found = run(plain(Net(), fp16), data)[1][0][0]
    assert (found.step, found.micro_step, found.phase) == (1, 1, "input")
