"""A tiny GPT-2 with Hugging Face's Trainer and a ds_config of "auto" values."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = (torch.arange(12) + index) % 24
        return {"input_ids": ids, "labels": ids.clone()}


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=24, n_positions=12, bos_token_id=0, eos_token_id=0)
    Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Counting()).train()


if __name__ == "__main__":
    main()
