"""The detector in the loops of Transformers, Accelerate and Lightning, on the CPU and without DeepSpeed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsdoctor.integrations.callbacks import engine_of
from tests.numerics.engine import TinyEngine
from tests.numerics.test_phases import Net, batches
from tests.numerics.test_transformers import MODELS

NAN = float("nan")


@pytest.mark.parametrize("bad", [True, False])
def test_the_trainer_of_transformers(bad: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from dsdoctor.integrations.transformers import NumericsCallback

    torch.manual_seed(0)
    model = MODELS["llama"]()
    rows = [{"input_ids": torch.randint(2, 64, (8,))} for _ in range(24)]
    for row in rows:
        row["labels"] = row["input_ids"].clone()
    callback = NumericsCallback(stop=True, on_first_bad=lambda *_: None)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=5,
        use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip

    class Spoils(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if bad and state.global_step == 2:
                model.model.layers[1].mlp.down_proj.weight.data[0, 0] = NAN

    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Spoils(), callback])
    trainer.train()
    found = callback.first_bad
    assert trainer.state.global_step == (3 if bad else 5)
    assert all(not module._forward_hooks for module in model.modules())
    if bad:
        assert found is not None
        # the weights were good when the detector came, so a step before is what it can blame
        assert (found.step, found.module, found.tensor) == (1, "model.layers.1.mlp.down_proj", "weight")
    else:
        assert found is None
    assert callback._watching.detector is not None
    assert callback._watching.detector.problems == []


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    from dsdoctor.integrations.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    data = batches(8)
    data[5][0, 0] = NAN
    with attach(accelerator, model, on_first_bad=lambda *_: None) as detector:
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
    assert detector.first_bad is not None
    assert (detector.first_bad.step, detector.first_bad.micro_step, detector.first_bad.phase) == (2, 1, "input")
    assert detector.problems == []


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from dsdoctor.integrations.lightning import NumericsCallback

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    rows = torch.stack(batches(6)).flatten(0, 1)
    rows[17, 0] = NAN
    callback = NumericsCallback(stop=True, on_first_bad=lambda *_: None)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows, batch_size=4))
    found = callback.first_bad
    assert found is not None
    assert (found.step, found.phase) == (4, "input"), "forward and backward run inside the optimizer's step"


def test_the_engine_around_a_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers hand callbacks the bare model; what trains it is DeepSpeed's engine."""
    fake = ModuleType("deepspeed")
    fake.DeepSpeedEngine = TinyEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    net, other = Net(), Net()
    engine = TinyEngine(net)
    assert engine_of(net) is engine
    assert engine_of(engine) is engine
    assert engine_of(other) is None
    assert engine_of(SimpleNamespace()) is None
    monkeypatch.delitem(sys.modules, "deepspeed")
    assert engine_of(nn.Tanh()) is None
