"""The callbacks on real DeepSpeed: that the engine behind the trainer is found, at ZeRO 2 and 3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

TRAINER = """
import json, os, sys
import torch, transformers
from dsdoctor.integrations.transformers import NumericsCallback
from tests.numerics.test_transformers import MODELS

stage, folder = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
rows = [{"input_ids": torch.randint(2, 64, (8,))} for _ in range(24)]
for row in rows:
    row["labels"] = row["input_ids"].clone()
settings = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
}
arguments = transformers.TrainingArguments(
    output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, use_cpu=True,
    bf16=True, save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", deepspeed=settings,
)
model = MODELS["llama"]()

class Spoils(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: torch.log(out * 0))

callback = NumericsCallback(stop=True, on_first_bad=lambda *_: None)
trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Spoils(), callback])
trainer.train()
found, detector = callback.first_bad, callback._watching.detector
print(json.dumps([type(detector._engine).__name__, found and [found.step, found.micro_step, found.phase, found.module],
                  trainer.state.global_step, detector.problems]), flush=True)
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_of_transformers(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [*launch, str(script), str(stage), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    engine, found, steps, problems = json.loads(done.stdout.strip().splitlines()[-1])
    assert engine == "DeepSpeedEngine"
    assert found[:3] == [2, 0, "forward"]
    assert found[3].startswith("model.layers.1")
    assert steps == 3
    assert problems == []
