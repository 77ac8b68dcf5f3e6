"""More ways for a job to go wrong, about processes, ranks that wait for each other, and ZeRO-3: `ranks.py HOW`.

Like job.py it is run, by `produce_ranks.py`, and never imported.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import signal
import sys
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from job import WIDTH, Net, config, kill_with, train
from tqdm import tqdm

WAIT = 6
"""Seconds that a collective waits for its ranks."""


def group(seconds: int = WAIT) -> None:
    """A process group that loses its patience soon, DeepSpeed's too."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))


def zero3(model: torch.nn.Module) -> Any:
    group()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, config=config(zero_optimization=zero))
    return engine


def step(engine: Any, number: int) -> None:
    loss = engine(torch.randn(4, WIDTH))
    engine.backward(loss)
    engine.step()
    print(f"step {number} loss {loss.item():.4f}", flush=True)


def invalid_free() -> None:
    """An extension that frees what was never allocated: glibc says so and aborts."""
    train(config(), 5)
    if dist.get_rank() == 1:
        ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(ctypes.create_string_buffer(64)) + 16))
    dist.barrier()


def aborts_at_the_end() -> None:
    """All work is done and said so; then a library aborts while the process ends."""
    train(config(), 5)
    dist.barrier()
    if dist.get_rank() == 0:
        print("training finished", flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        os.abort()


def nobody_listens() -> None:
    dist.init_process_group("gloo", rank=1, world_size=2, timeout=datetime.timedelta(seconds=4))


def privileged_port() -> None:
    """Rank 0 is to listen on a port below 1024, and does not run as root."""
    if os.getuid() == 0:
        os.setuid(65534)
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=4))


def monitored() -> None:
    """Rank 1 trains as the others do, and then does not come to the barrier."""
    group()
    for number in range(1, 6):
        dist.all_reduce(torch.ones(4))
        print(f"step {number} loss {1 / number:.3f}", flush=True)
    if dist.get_rank() == 1:
        time.sleep(3 * WAIT)
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=WAIT))


def tokenising() -> None:
    """Rank 0 prepares the data for longer than the others wait for it at the barrier."""
    group()
    if dist.get_rank() == 0:
        for _ in tqdm(range(40), desc="Running tokenizer on dataset", unit=" examples"):
            time.sleep(2 * WAIT / 40)
    dist.barrier()
    train(config(), 3)


class Branches(Net):
    """A tower that only some samples use, here those of rank 1 from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2 and dist.get_rank() == 1:
            for layer in self.tower:
                x = layer(x)
        return super().forward(x)


def branch() -> None:
    engine = zero3(Branches())
    for number in range(1, 6):
        step(engine, number)


class Experts(Net):
    """Each rank's tokens go to one expert, and not to the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH * (i + 1)) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.experts[dist.get_rank()](x).mean()


def experts() -> None:
    print(json.dumps({"model_type": "toy-moe", "num_local_experts": 4}, indent=2), flush=True)
    engine = zero3(Experts())
    for number in range(1, 6):
        step(engine, number)


def generates() -> None:
    """Texts of unequal length under ZeRO-3: the rank that is done goes on to the next collective."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=64, eos_token_id=None)
    model = GPT2LMHeadModel(size)
    engine = zero3(model)
    engine.eval()
    length = 6 if dist.get_rank() == 0 else 40
    ids = torch.ones(1, 4, dtype=torch.long)
    texts = engine.module.generate(ids, max_new_tokens=length, do_sample=False, synced_gpus=False, pad_token_id=0)
    dist.all_reduce(torch.tensor([texts.numel()]))


class Gathers(torch.nn.Linear):
    """A layer that gathers its own weight in its forward pass, and lets go of it while it is in use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters([self.weight]):
            scale = self.weight.abs().mean()
        return super().forward(x) / scale


def gathers() -> None:
    model = Net()
    model.first = Gathers(WIDTH, WIDTH)
    engine = zero3(model)
    for number in range(1, 4):
        step(engine, number)


def replaced() -> None:
    """A layer is exchanged after ZeRO-3 has partitioned the model."""
    engine = zero3(Net())
    engine.module.second = torch.nn.Linear(WIDTH, 2)
    step(engine, 1)


def device_map() -> None:
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    from transformers.integrations import HfDeepSpeedConfig

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)).save_pretrained("model")
    settings = HfDeepSpeedConfig(config(stage=3))
    AutoModelForCausalLM.from_pretrained("model", device_map="auto")
    print(settings)


def goes_around() -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=config(stage=0))
    engine(torch.randn(4, WIDTH)).backward()


def scalar_weight() -> None:
    """A parameter without dimensions, which plain PyTorch trains."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.temperature)

    train(config(stage=3), 3, model=Scaled())


HOW = {
    "waits": group,
    "abort": lambda: kill_with(signal.SIGABRT),
    "illegal": lambda: kill_with(signal.SIGILL),
    "alarm": lambda: kill_with(signal.SIGXCPU),
    "cpu-terminated": lambda: kill_with(signal.SIGTERM),
    "invalid-free": invalid_free,
    "end-abort": aborts_at_the_end,
    "gloo-interface": group,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--local_rank", type=int)
    how = parser.parse_args().how
    named = {**{name.replace("_", "-"): value for name, value in globals().items() if callable(value)}, **HOW}
    named[how]()


if __name__ == "__main__":
    sys.exit(main())
