"""A classifier of number sequences with Accelerate; DeepSpeed comes in by the plugin, the optimizer by the config."""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim, set_seed
from torch import nn
from torch.utils.data import DataLoader


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, (x[:8].sum() > x[8:].sum()).long()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        hidden = self.norm(torch.relu(self.embed(x.to(self.embed.weight.dtype))))
        # PLANT forward
        hidden = torch.tanh(self.wide(hidden))
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="ds_config.json")
    args = parser.parse_args()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.config))
    set_seed(1)
    model = Net()
    # PLANT model
    optimizer = DummyOptim(model.parameters(), lr=1e-3)
    loader = DataLoader(Sequences(), shuffle=True, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rank = accelerator.process_index  # noqa: F841 (for what is planted)
    for step, (x, y) in enumerate(loader):  # noqa: B007
        # PLANT batch
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x).float(), y)
            # PLANT loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
