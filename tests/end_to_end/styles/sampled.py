"""Prints, step by step, all that chance decides: the samples drawn, a dropout mask, augmentation, and the loss."""

import random

import deepspeed
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, x * (1 + 0.1 * random.random())


def main():
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    random.seed(5 + rank)
    numpy.random.seed(6 + rank)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
    torch.manual_seed(8 + rank)
    rows = Rows()
    sampler = DistributedSampler(rows, shuffle=True, seed=9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for indices, x in DataLoader(rows, batch_size=4, sampler=sampler, num_workers=0):
            loss = engine(x).pow(2).mean()
            engine.backward(loss)
            engine.step()
            drawn = (random.random(), numpy.random.rand(), torch.rand(()).item())
            print("drawn", indices.tolist(), *(value.hex() for value in drawn), "loss", loss.item().hex(), flush=True)


if __name__ == "__main__":
    main()
