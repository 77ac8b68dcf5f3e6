"""Fine-tuning of a tiny GPT-2 with a subclass of the Trainer, in the way of the language-modeling examples."""

import sys
from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class ModelArguments:
    layers: int = field(default=2)
    in_code: str = field(default="", metadata={"help": "a ds_config for TrainingArguments(deepspeed=...)"})


class Blocks(torch.utils.data.Dataset):
    """Text in blocks of equal length: a walk through the alphabet in steps of one to three."""

    def __len__(self):
        return 192

    def __getitem__(self, index):
        ids = (torch.arange(16) * (1 + index % 3) + index) % 26
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


class SmoothedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss + 1e-4 * outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


def main():
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    if any(argument.startswith("--in_code") for argument in sys.argv):
        own = HfArgumentParser(ModelArguments).parse_args_into_dataclasses()[0]
        training = TrainingArguments(
            output_dir="out",
            use_cpu=True,
            bf16=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=10,
            learning_rate=3e-3,
            warmup_steps=2,
            save_strategy="no",
            report_to="none",
            deepspeed=own.in_code,
        )
    else:
        own, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    config = GPT2Config(
        n_layer=own.layers, n_head=2, n_embd=32, vocab_size=26, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    trainer = SmoothedTrainer(model=GPT2LMHeadModel(config), args=training, train_dataset=Blocks())
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
