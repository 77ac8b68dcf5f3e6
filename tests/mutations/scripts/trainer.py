"""A tiny GPT-2 with Hugging Face's Trainer, subclassed as people do to compute a loss of their own."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = (torch.arange(12) * (1 + index % 3) + index) % 24
        return {"input_ids": ids, "labels": ids.clone()}


class OwnTrainer(Trainer):
    done = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        step, rank = self.done, self.args.process_index  # noqa: F841 (for what is planted)
        self.done += 1
        x = inputs["input_ids"]  # noqa: F841
        # PLANT batch
        output = model(**inputs)
        loss = output.loss
        # PLANT loss
        return (loss, output) if return_outputs else loss


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(1)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=24, n_positions=12, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    # PLANT model
    OwnTrainer(model=model, args=arguments, train_dataset=Counting()).train()


if __name__ == "__main__":
    main()
