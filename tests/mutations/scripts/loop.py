"""A small encoder trained in the way of DeepSpeed's own examples: initialize, engine.backward, engine.step."""

import argparse

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        hidden = self.norm(torch.relu(self.embed(x)))
        # PLANT forward
        hidden = torch.tanh(self.wide(hidden))
        return self.head(hidden)


def batches(rank, size):
    generator = torch.Generator().manual_seed(17 + rank)
    while True:
        x = torch.randn(size, 16, generator=generator)
        yield x, x.sum(1, keepdim=True) / 4


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    model = Net()
    # PLANT model
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = batches(rank, engine.train_micro_batch_size_per_gpu())
    dtype = next(engine.module.parameters()).dtype
    for step in range(60):  # noqa: B007 (for what is planted)
        x, y = next(data)
        # PLANT batch
        prediction = engine(x.to(engine.device, dtype))
        loss = nn.functional.mse_loss(prediction.float(), y.to(engine.device))
        # PLANT loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
