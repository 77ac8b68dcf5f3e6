"""Builds, checkpoints, disks, memory and settings that go wrong under real DeepSpeed: `software.py HOW`.

Like job.py it is run, by `produce_software.py`, and never imported.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).parent))
from job import FP16, Net, config, train

EXTENSIONS = Path("extensions").absolute()
NO_HEADERS = """#!/bin/sh
for word in "$@"; do
    shift
    case "$word" in */include/python3*) set -- "$@" /no/such/folder ;; *) set -- "$@" "$word" ;; esac
done
exec g++ "$@"
"""
"""A compiler that does not find Python's headers, as where the development package is missing."""


def periodic_long() -> None:
    """A window of 100 over 2,400 steps; the loss is printed now and then."""
    settings = config(fp16={**FP16, "loss_scale_window": 100, "initial_scale_power": 10}, steps_per_print=100)
    train(settings, 2400, model=Net(scale=64.0), every=50)


def t5() -> None:
    """T5 in fp16: gradients beyond fp16 at every scale."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))
    print(model.config, flush=True)
    engine, *_ = deepspeed.initialize(model=model, config=config(fp16=FP16))
    ids = torch.arange(8).view(1, 8)
    for step in range(30):
        loss = engine(input_ids=ids, labels=ids).loss
        loss.register_hook(lambda gradient: gradient * float("inf"))
        engine.backward(loss)
        engine.step()
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def stage_zero() -> None:
    """fp16 without ZeRO, which this release does not scale."""
    print(f"deepspeed=={deepspeed.__version__}", flush=True)
    train(config(stage=0, fp16=FP16), 20)


def autocast() -> None:
    """torch_autocast in fp16 under ZeRO, with one overflow."""
    print(f"deepspeed=={deepspeed.__version__}", flush=True)
    train(config(torch_autocast={"enabled": True, "dtype": "float16"}), 40, spikes=(3,))


def host_limit() -> None:
    """Less address space than the model needs, as under a batch system that sets `ulimit -v`."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
    train(config(), 3, model=Net(hidden=1 << 26))


def removed_section() -> None:
    """A section that DeepSpeed has taken out, switched off."""
    train(config(amp={"enabled": False}), 3)


def refused_value() -> None:
    """A beta that Adam does not take."""
    train(config(optimizer={"type": "AdamW", "params": {"betas": [1.5, 0.999], "torch_adam": True}}), 3)


def key_twice() -> None:
    text = json.dumps(config())
    Path("ds_config.json").write_text(text[:-1] + ', "steps_per_print": 5}')
    deepspeed.initialize(model=Net(), config="ds_config.json")


def two_optimizers() -> None:
    """An optimizer in the ds_config and one in the code, under Accelerate."""
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config()))
    model = Net()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def asks() -> None:
    """A question to the user of a job that has no terminal."""
    if input("a run of that name exists, overwrite it? [y/n] ") == "y":
        train(config(), 3)


def cpu_adam() -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(EXTENSIONS)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam(Net().parameters())


def no_headers() -> None:
    Path("g++-bare").write_text(NO_HEADERS)
    Path("g++-bare").chmod(0o755)
    os.environ["CXX"] = str(Path("g++-bare").absolute())
    cpu_adam()


def no_ninja() -> None:
    os.environ["PATH"] = "/usr/sbin"
    cpu_adam()


def stale_lock() -> None:
    """A build was killed here; the next process waits for its lock, until Ctrl-C."""
    folder = EXTENSIONS / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    threading.Thread(target=_interrupt_the_waiting, args=(threading.get_ident(),), daemon=True).start()
    cpu_adam()


def _interrupt_the_waiting(thread: int) -> None:
    while "file_baton.py" not in "".join(traceback.format_stack(sys._current_frames()[thread])):
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGINT)


def no_toolkit() -> None:
    """A CUDA source to be compiled on a machine where torch finds no toolkit."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = "8.0"
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = None
    Path("kernel.cu").write_text("int main() { return 0; }\n")
    cpp_extension.load("kernel", ["kernel.cu"], build_directory=".", with_cuda=True)


def save(hidden: int = 16) -> None:
    engine, *_ = deepspeed.initialize(model=Net(hidden=hidden), config=config())
    engine.save_checkpoint(f"ckpt{hidden}", tag="step1")


def shard(rank: int, hidden: int = 16) -> Path:
    """The file of the optimizer states of one rank."""
    return Path(f"ckpt{hidden}/step1/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def load_cut_off() -> None:
    """A shard whose save was interrupted."""
    if torch.distributed.is_initialized() is False:
        deepspeed.init_distributed()
    if torch.distributed.get_rank() == 0:
        whole = shard(1).read_bytes()
        shard(1).write_bytes(whole[: len(whole) // 2])
    torch.distributed.barrier()
    engine, *_ = deepspeed.initialize(model=Net(), config=config())
    engine.load_checkpoint("ckpt16", tag="step1")


def convert() -> None:
    """The converter that DeepSpeed puts beside a checkpoint, as a process of its own."""
    done = subprocess.run([sys.executable, "ckpt16/zero_to_fp32.py", "ckpt16", "weights"], check=False)
    sys.exit(done.returncode)


def convert_incomplete() -> None:
    shard(1).unlink()
    convert()


def convert_mixed(hidden: int) -> None:
    """The shards of another model, which is smaller or larger, lie in the folder."""
    for rank in range(2):
        shutil.copy(shard(rank, hidden), shard(rank))
    convert()


def small_file_limit() -> None:
    """A checkpoint that may not grow as large as it has to, as at a quota."""
    engine, *_ = deepspeed.initialize(model=Net(hidden=4096), config=config())
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    engine.save_checkpoint("ckpt", tag="step1")


def no_nvme_path() -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme"}}
    train(config(zero_optimization=zero), 3)


def main() -> None:
    type(get_accelerator()).is_fp16_supported = lambda self: True
    ways = {
        "save-small": lambda: save(8),
        "save-large": lambda: save(32),
        "convert-small": lambda: convert_mixed(8),
        "convert-large": lambda: convert_mixed(32),
    }
    how = next(word for word in sys.argv[1:] if not word.startswith("--"))
    ways.get(how, globals().get(how.replace("-", "_")))()


if __name__ == "__main__":
    main()
