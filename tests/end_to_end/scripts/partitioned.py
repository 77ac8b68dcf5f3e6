"""A regression whose loss is spoilt once the gradients are partitioned (ZeRO 2 and 3): a fault that follows one key.

With `--save DIR` it writes a checkpoint after 4 steps; the weights of a run that goes on from one are told on stdout.
"""

import argparse

import deepspeed
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--deepspeed_config", default="ds_config.json")
    parser.add_argument("--save")
    parser.add_argument("--spoilt-from", type=int, default=2)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=args.deepspeed_config
    )
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for step in range(30):
        x = torch.randn(4, 8, generator=generator)
        loss = nn.functional.mse_loss(engine(x.bfloat16()).float(), x.sum(1, keepdim=True))
        if engine.zero_optimization_stage() >= 2 and step >= args.spoilt_from:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
        if args.save and step == 3:
            engine.save_checkpoint(args.save, tag="four")
            break


if __name__ == "__main__":
    main()
