"""A Hugging Face Trainer with a DeepSpeed config, DeepSpeed's part played by the plain engine.

`hf_rank.py FOLDER from-config|own-optimizer` trains four steps, or only the last where FOLDER has step 3.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dsdoctor.runs import plain

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2},
}
OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def main() -> None:
    folder, own_optimizer = Path(sys.argv[1]), sys.argv[2] == "own-optimizer"
    deepspeed.initialize = plain.initialize
    deepspeed.DeepSpeedEngine = plain.PlainEngine
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    rows = [{"input_ids": torch.arange(8) + i % 5, "labels": torch.arange(8) + i % 5} for i in range(64)]
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        deepspeed=AUTO if own_optimizer else {**AUTO, **OPTIMIZER},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=4,
        learning_rate=1e-2,
        bf16=True,
        use_cpu=True,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    last = sorted((folder / "out").glob("checkpoint-3"))
    trainer.train(resume_from_checkpoint=str(last[0]) if last else None)
    trainer.save_model(str(folder / "saved"))
    engine = trainer.model_wrapped
    (folder / "seen.json").write_text(
        json.dumps(
            {
                "engine": type(engine).__name__,
                "steps": engine.global_steps,
                "micro_batch": engine.train_micro_batch_size_per_gpu(),
                "accumulation": engine.gradient_accumulation_steps(),
                "dtype": str(next(engine.parameters()).dtype),
                "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
                "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
            }
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
