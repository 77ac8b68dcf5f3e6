"""Image classification with `deepspeed.initialize` and its own arguments, in the way of the CIFAR tutorial."""

import argparse
import os

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class Images(torch.utils.data.Dataset):
    """Small noisy pictures of ten classes, read from a file beside the script."""

    def __init__(self, count):
        here = os.path.dirname(os.path.abspath(__file__))
        with open(os.path.join(here, "classes.txt")) as file:
            self.names = file.read().split()
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(len(self.names), (count,), generator=generator)
        patterns = torch.randn(len(self.names), 3, 16, 16, generator=generator)
        self.images = patterns[self.labels] + 0.5 * torch.randn(count, 3, 16, 16, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 5)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.1)
        self.full = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        return self.full(self.drop(self.pool(F.relu(self.conv(x))).flatten(1)))


def arguments():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--client", choices=("none", "objects", "callables"), default="none")
    parser.add_argument("--dict", action="store_true", help="pass the config as a dict instead of a path")
    return deepspeed.add_config_arguments(parser).parse_args()


def client(args, parameters):
    """Optimizer and scheduler of the script's own, as objects or as functions that make them."""

    def make_optimizer(groups):
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    def make_scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)

    if args.client == "objects":
        optimizer = make_optimizer(parameters)
        return {"optimizer": optimizer, "lr_scheduler": make_scheduler(optimizer)}
    if args.client == "callables":
        return {"optimizer": make_optimizer, "lr_scheduler": make_scheduler}
    return {}


def main():
    args = arguments()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    net = Net()
    parameters = [p for p in net.parameters() if p.requires_grad]
    config = {}
    if args.dict:
        config = {"config": {"train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}}
        args.deepspeed_config = None
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=Images(256),
        **client(args, parameters),
        **config,
    )
    criterion = nn.CrossEntropyLoss()
    dtype = next(engine.module.parameters()).dtype
    running = 0.0
    for epoch in range(args.epochs):
        for i, (inputs, labels) in enumerate(loader):
            inputs, labels = inputs.to(engine.device, dtype), labels.to(engine.device)
            loss = criterion(engine(inputs).float(), labels)
            engine.backward(loss)
            engine.step()
            running += loss.item()
            if i % args.log_interval == args.log_interval - 1 and engine.global_rank == 0:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running / args.log_interval:.3f}")
                running = 0.0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
