"""Sentence pairs with Accelerate, in the way of its NLP example; how DeepSpeed is asked for is an argument."""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(5, 40, (12,), generator=generator)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] > words[6]).long()}


def make_accelerator(args):
    if args.how == "plugin":
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=args.accumulate, gradient_clipping=1.0)
        return Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
    if args.how == "file":
        return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config))
    return Accelerator(gradient_accumulation_steps=args.accumulate)  # by ACCELERATE_... in the environment


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=("plugin", "file", "environment"), default="plugin")
    parser.add_argument("--config", default="ds_config.json")
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()

    accelerator = make_accelerator(args)
    set_seed(42)
    config = BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    loader = DataLoader(Pairs(), shuffle=True, batch_size=4, drop_last=True)
    sections = accelerator.state.deepspeed_plugin.deepspeed_config if accelerator.state.deepspeed_plugin else {}
    if "optimizer" in sections:
        optimizer, scheduler = DummyOptim(model.parameters(), lr=1e-3), None
    else:
        optimizer = AdamW(model.parameters(), lr=1e-3)
        scheduler = get_linear_schedule_with_warmup(optimizer, 2, 60)
    if scheduler is None:
        scheduler = DummyScheduler(optimizer) if "scheduler" in sections else None
    prepared = [each for each in (model, optimizer, loader, scheduler) if each is not None]
    model, optimizer, loader, *rest = accelerator.prepare(*prepared)
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                if rest:
                    rest[0].step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.4f}")
    accelerator.wait_for_everyone()
    accelerator.save_state("checkpoint")
    accelerator.end_training()


if __name__ == "__main__":
    main()
