"""A small DeepSpeed job that can go wrong in many ways: `job.py HOW`. It is run by `produce.py`, never imported.

Without --strict it takes --local_rank like most scripts do. fp16 is allowed on the CPU, except for `no-fp16`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
WIDTH = 16


def config(stage: int = 2, **keys: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": ADAM,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10,
        "log_level": "info",
        **keys,
    }


class Net(torch.nn.Module):
    """Two layers; a `spike` makes the gradients of one step overflow, not the loss; `scale` makes all of them large."""

    def __init__(self, scale: float = 1.0, hidden: int = WIDTH) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, hidden)
        self.second = torch.nn.Linear(hidden, 1)
        self.scale = scale
        self.spike = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        spike = self.spike
        if y.requires_grad and spike != 1:
            y.register_hook(lambda gradient: gradient * spike)
        return ((y - x.sum(-1, keepdim=True) / 4) ** 2).mean() * self.scale


def train(
    settings: dict[str, object],
    steps: int,
    *,
    model: torch.nn.Module | None = None,
    spikes: tuple[int, ...] = (),
    spike: float = float("inf"),
    norms: bool = False,
    every: int = 1,
) -> None:
    model = model or Net()
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    dtype = next(engine.module.parameters()).dtype
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        if isinstance(model, Net):
            model.spike = spike if step in spikes else 1.0
        loss = engine(torch.randn(4, WIDTH, dtype=dtype))
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and (step + 1) % every == 0:
            norm = f" grad norm {float(engine.get_global_grad_norm())}" if norms else ""
            print(f"step {step + 1} loss {loss.item():.4f}{norm} lr {engine.get_lr()[0]:.2e}", flush=True)


def warmup() -> None:
    train(config(fp16=FP16), 40, model=Net(scale=64.0))


def periodic() -> None:
    train(config(fp16={**FP16, "loss_scale_window": 20, "initial_scale_power": 12}), 120, model=Net(scale=64.0))


def collapse() -> None:
    train(config(fp16=FP16), 60, spikes=tuple(range(3, 60)))


def thrash() -> None:
    train(config(fp16=FP16), 120, model=Net(), spikes=tuple(range(30, 120, 9)))


def static() -> None:
    train(config(fp16={**FP16, "loss_scale": 2.0**30}), 30, model=Net(scale=64.0))


def no_zero_collapse() -> None:
    train(config(stage=0, fp16=FP16), 60, spikes=tuple(range(60)))


def hidden() -> None:
    settings = config(fp16=FP16)
    del settings["log_level"]
    print(f"deepspeed=={deepspeed.__version__} fp16=True", flush=True)
    train(settings, 40, model=Net(scale=64.0))


def exploding() -> None:
    train(config(stage=1, bf16={"enabled": True, "check_grad_overflow": False}), 40, spikes=tuple(range(20, 40)))


def bf16_skips() -> None:
    train(config(bf16={"enabled": True}), 40, spikes=(10, 20, 30))


def bf16_silent() -> None:
    settings = config(stage=1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    train(settings, 40, spikes=(10, 20, 30))


def underflow() -> None:
    train(config(fp16=FP16), 30, spikes=tuple(range(30)), spike=1e-14, norms=True)


def offload() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    settings = config(zero_optimization=zero, zero_force_ds_cpu_optimizer=False, wall_clock_breakdown=True)
    train(settings, 12, model=Net(hidden=200_000))


def no_fp16() -> None:
    train(config(fp16=FP16), 3)


def healthy() -> None:
    train(config(bf16={"enabled": True}, wall_clock_breakdown=True), 30)


def healthy_zero3() -> None:
    train(config(stage=3, bf16={"enabled": True}), 30)


def batch_size() -> None:
    train(config(train_batch_size=50, gradient_accumulation_steps=3), 3)


def unknown_key() -> None:
    train(config(zero_optimization={"stage": 2, "reduce_buckt_size": 1000}), 3)


def wrong_type() -> None:
    train(config(fp16={**FP16, "loss_scale_window": "often"}), 3)


def both_precisions() -> None:
    train(config(fp16=FP16, bf16={"enabled": True}), 3)


def auto_clipping() -> None:
    train(config(gradient_clipping="auto"), 3)


def auto_batch() -> None:
    train(config(train_batch_size="auto", train_micro_batch_size_per_gpu="auto"), 3)


def no_config() -> None:
    deepspeed.initialize(model=Net(), config="no/such/ds_config.json")


def untested_optimizer() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = Net()
    settings = config()
    del settings["optimizer"]
    deepspeed.initialize(model=model, optimizer=Mine(model.parameters(), lr=0.1), config=settings)


def own_exception() -> None:
    train(config(), 5)
    if dist.get_rank() == 1:
        raise KeyError("label")
    dist.barrier()


def bogus_size() -> None:
    train(config(), 2)
    torch.empty(2**60, 4)


def kill_with(number: int) -> None:
    train(config(), 5)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    time.sleep(3)
    dist.barrier()


def short_group() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))


def stuck() -> None:
    short_group()
    for step in range(5):
        dist.all_reduce(torch.ones(4))
        print(f"step {step + 1} loss {1 / (step + 1):.3f}", flush=True)
    if dist.get_rank() == 1:
        time.sleep(40)
    dist.all_reduce(torch.ones(4))


def uneven() -> None:
    short_group()
    batches = 12 - 4 * dist.get_rank()
    print(f"rank {dist.get_rank()} has {batches} batches", flush=True)
    dist.barrier()
    for step in range(batches):
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {1 / (step + 1):.3f}", flush=True)
    if dist.get_rank() == 1:
        time.sleep(40)


def mismatch() -> None:
    short_group()
    for step in range(3):
        dist.all_reduce(torch.ones(4))
        print(f"step {step + 1} loss {1 / (step + 1):.3f}", flush=True)
    dist.all_reduce(torch.ones(16 + dist.get_rank()))


def alone() -> None:
    dist.init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=4))


def client() -> None:
    dist.init_process_group("gloo", rank=1, world_size=2, timeout=datetime.timedelta(seconds=4))


def weight_outside() -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=config(stage=3))
    x = torch.randn(4, WIDTH)
    loss = engine(x) + torch.nn.functional.linear(x, engine.module.first.weight).mean()
    engine.backward(loss)


def second_model() -> None:
    with deepspeed.zero.Init(config_dict_or_path=config(stage=3)):
        teacher = torch.nn.Sequential(torch.nn.Embedding(32, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    deepspeed.initialize(model=Net(), config=config(stage=3))
    teacher(torch.zeros(4, dtype=torch.long))


def empty_file() -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=config(stage=3))
    saved = {name: value.clone() for name, value in engine.module.state_dict().items()}
    dist.barrier()
    Net().load_state_dict(saved)


def no_grad() -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(torch.randn(4, WIDTH)).backward()


def reduced_twice() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_(True)
            y = checkpoint(self.first, checkpoint(self.first, x, use_reentrant=True), use_reentrant=True)
            return self.second(y).mean()

    train(config(), 3, model=Twice())


def recompute() -> None:
    from torch.utils.checkpoint import checkpoint

    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    sizes = iter((4, 3))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x[: next(sizes)] @ weight) ** 2

    checkpoint(forward, torch.randn(4, WIDTH), use_reentrant=False).sum().backward()


def save(folder: str) -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=config())
    engine.save_checkpoint(folder, tag="step1")


def load(folder: str, tag: str) -> None:
    engine, *_ = deepspeed.initialize(model=Net(), config=config())
    engine.load_checkpoint(folder, tag=tag)


def full_disk() -> None:
    torch.save({"weights": torch.zeros(1 << 20)}, "/dev/full")


def no_device() -> None:
    torch.zeros(1).cuda()


def offline() -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained("no-such-owner/no-such-model")


def trainer(**arguments: object) -> None:
    """The Trainer on a tiny GPT-2, with a DeepSpeed config."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Spiking(GPT2LMHeadModel):
        count = 0

        def forward(self, *args: object, **kwargs: object) -> object:
            result = super().forward(*args, **kwargs)
            Spiking.count += 1
            if "nan" in sys.argv[1] and Spiking.count > 8:
                result.loss = result.loss * float("nan")
            return result

    data = [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(64)]
    settings = config(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    settings.update(arguments.pop("settings", {}))
    options = {
        "output_dir": "out",
        "max_steps": 20,
        "logging_steps": 1,
        "report_to": [],
        "remove_unused_columns": False,
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "deepspeed": settings,
    }
    model = Spiking(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    Trainer(model=model, args=TrainingArguments(**{**options, **arguments}), train_dataset=data).train()


HOW = {
    "trainer": lambda: trainer(bf16=True, settings={"bf16": {"enabled": "auto"}}),
    "trainer-nan": lambda: trainer(bf16=True, settings={"bf16": {"enabled": "auto"}}),
    "trainer-nan-shown": lambda: trainer(
        bf16=True, logging_nan_inf_filter=False, settings={"bf16": {"enabled": "auto", "check_grad_overflow": False}}
    ),
    "trainer-mismatch": lambda: trainer(settings={"train_micro_batch_size_per_gpu": 7}),
    "segfault": lambda: kill_with(signal.SIGSEGV),
    "kill": lambda: kill_with(signal.SIGKILL),
    "bus": lambda: kill_with(signal.SIGBUS),
    "save": lambda: save("ckpt"),
    "load": lambda: load("ckpt", "step1"),
    "load-nothing": lambda: load("ckpt", "step9"),
    "long": lambda: train(config(), 4000),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    if not any(word.startswith("strict") for word in sys.argv):
        parser.add_argument("--local_rank", type=int)
    how = parser.parse_args().how
    if how != "no-fp16":
        type(get_accelerator()).is_fp16_supported = lambda self: True
    HOW.get(how, globals().get(how.replace("-", "_"), healthy))()


if __name__ == "__main__":
    main()
