"""A small regression with DeepSpeed; `--fault` plants what the test asks for, on rank 1 or everywhere."""

import argparse
import time

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 1)

    def forward(self, x, poison):
        hidden = torch.relu(self.first(x))
        if poison:
            hidden = hidden / (hidden.sum() * 0)
        return self.second(hidden)


def batches(rank, size):
    generator = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(size, 8, generator=generator)
        yield x, x.sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed_config", default="ds_config.json")
    parser.add_argument("--fault", choices=("none", "nan", "raise", "hang"), default="none")
    parser.add_argument("--at", type=int, default=3)
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Net()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    dtype = next(engine.module.parameters()).dtype
    data = batches(rank, engine.train_micro_batch_size_per_gpu())
    for step in range(30):
        here = step == args.at and rank == 1
        if here and args.fault == "raise":
            raise LookupError(f"no shard for step {step}")
        if here and args.fault == "hang":
            time.sleep(3600)
        x, y = next(data)
        prediction = engine(x.to(engine.device, dtype), step >= args.at and args.fault == "nan")
        loss = nn.functional.mse_loss(prediction.float(), y.to(engine.device))
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
