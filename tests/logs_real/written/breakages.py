# ruff: noqa: E501
"""Builds, versions, checkpoints, disks and memory in the words of the field, and what only looks like them."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    falling,
    log,
    stopped,
    traceback,
    trainer,
)

INITIALIZE = (f"{SITE}/deepspeed/__init__.py", 181, "initialize", "engine = DeepSpeedEngine(args=args,")
NINJA = (f"{SITE}/torch/utils/cpp_extension.py", 2104, "_run_ninja_build", "subprocess.run(")
LOAD = (f"{SITE}/deepspeed/runtime/engine.py", 2769, "load_checkpoint", "success = self._load_zero_checkpoint(")
FORWARD = (f"{SITE}/torch/nn/modules/module.py", 1501, "_call_impl", "return forward_call(*args, **kwargs)")
END = "{'train_runtime': 812.4, 'train_loss': 1.61, 'epoch': 1.0}"


def raised(kind: str, message: str, *frames: tuple[str, int, str, str], prefix: str = "[rank0]: ") -> str:
    return log(traceback(kind, message, *frames, prefix=prefix), stopped(1))


def linker() -> str:
    """The linker lacks a library; ninja, CalledProcessError and the destructor only follow."""
    lines = ["[3/3] c++ cpu_adam.o -shared -lcurand -o cpu_adam.so", "/usr/bin/ld: cannot find -lcurand: No such file",
             "collect2: error: ld returned 1 exit status", "ninja: build stopped: subcommand failed."]  # fmt: skip
    chained = traceback(
        "subprocess.CalledProcessError", "Command '['ninja', '-v']' returned non-zero exit status 1.", NINJA
    )
    ignored = [
        "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x77ba>",
        *traceback("AttributeError", "'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
    ]
    return log(lines, chained, "The above exception was the direct cause of the following exception:",
               traceback("RuntimeError", "Error building extension 'cpu_adam'", INITIALIZE, NINJA), ignored, stopped(1))  # fmt: skip


def no_compiler() -> str:
    message = "Command '['which', 'c++']' returned non-zero exit status 1."
    return raised("subprocess.CalledProcessError", message, INITIALIZE, NINJA)


def other_torch() -> str:
    text = "/root/.cache/torch_extensions/py310_cu117/fused_adam/fused_adam.so: undefined symbol: _ZN3c104cuda20CUDACachingA"
    return raised("ImportError", text, INITIALIZE)


def other_flash() -> str:
    text = f"{SITE}/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c105ErrorC2E"
    flash = (
        f"{SITE}/flash_attn/flash_attn_interface.py",
        10,
        "<module>",
        "import flash_attn_2_cuda as flash_attn_cuda",
    )
    return raised("ImportError", text, flash)


def stopped_at_the_lock() -> str:
    """Ctrl-C after half an hour: the stack stands in torch's waiting for a lock."""
    wait = (f"{SITE}/torch/utils/file_baton.py", 42, "wait", "time.sleep(self.wait_seconds)")
    return log("Using /home/u/.cache/torch_extensions/py311_cu117 as PyTorch extensions root...",
               traceback("KeyboardInterrupt", "", NINJA, wait))  # fmt: skip


def destructor_at_the_end() -> str:
    """The run did its work; an optimizer that was never used complains when Python ends."""
    ignored = [
        "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x77ba>",
        *traceback("AttributeError", "'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
    ]
    return log(trainer(falling(40)), END, ignored)


def needs_a_newer_one() -> str:
    where = (f"{SITE}/transformers/utils/versions.py", 110, "require_version", "raise ImportError(")
    return raised("ImportError", "deepspeed>=0.9.3 is required for a normal functioning of this module, but found "
                  "deepspeed==0.8.3.", where)  # fmt: skip


def argument_gone() -> str:
    where = (
        f"{SITE}/transformers/trainer.py",
        4700,
        "create_accelerator_and_postprocess",
        "self.accelerator = Accelerator(",
    )
    return raised("TypeError", "Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'", where)


def cut_off_shard() -> str:
    text = "PytorchStreamReader failed reading zip archive: failed finding central directory"
    return raised("RuntimeError", text, LOAD, (f"{SITE}/torch/serialization.py", 457, "__init__", "super().__init__("))


def swap_file_short() -> str:
    """The disk of the swap files is full: C++ asserts, and the process ends with -6."""
    lines = """
    /nvme/zero_stage_3/optimizer/rank6/139649992513552.tensor.swp: buffer nbytes != file bytes 4001366016 != 3426746368
    python: /x/deepspeed/ops/csrc/aio/py_lib/deepspeed_py_aio_handle.cpp:228: int deepspeed_aio_handle_t::pread(const at::Tensor&, const char*, bool, bool): Assertion `static_cast<long long int>(buffer.nbytes()) == num_file_bytes' failed.
    """
    return log(trainer(falling(10)), lines, stopped(-6))


def no_allocation() -> str:
    """C++ is refused memory and aborts; Python has no word in it."""
    return log(trainer(falling(10)), "terminate called after throwing an instance of 'std::bad_alloc'",
               "  what():  std::bad_alloc", stopped(-6))  # fmt: skip


def not_pinned() -> str:
    pin = (f"{SITE}/deepspeed/accelerator/cuda_accelerator.py", 296, "pin_memory", "return tensor.pin_memory()")
    return raised(
        "RuntimeError",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        INITIALIZE,
        pin,
    )


def in_an_evaluation() -> str:
    text = ("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 3 has a total capacity of 79.15 GiB of which 1.07 GiB is "
            "free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 33.00 "
            "GiB is allocated by PyTorch, and 44.10 GiB is reserved by PyTorch but unallocated.")  # fmt: skip
    loop = (f"{SITE}/transformers/trainer.py", 3400, "evaluation_loop", "logits = nested_concat(preds_host, logits)")
    return log(trainer(falling(30)), traceback("torch.OutOfMemoryError", text, loop, prefix="[rank3]: "), stopped(1))


def gathered_for_saving() -> str:
    """ZeRO-3 gathers the weights of a checkpoint on one GPU, long after set-up."""
    text = (
        "CUDA out of memory. Tried to allocate 8.32 GiB (GPU 0; 39.59 GiB total capacity; 31.2 GiB already allocated)"
    )
    save = (
        f"{SITE}/deepspeed/runtime/engine.py",
        3500,
        "save_16bit_model",
        "self._zero3_consolidated_16bit_state_dict()",
    )
    gather = (f"{SITE}/deepspeed/runtime/zero/partition_parameters.py", 1200, "_allgather_params", "torch.empty(size)")
    return log(trainer(falling(30)), traceback("torch.cuda.OutOfMemoryError", text, save, gather), stopped(1))


def retried_smaller() -> str:
    """A search for the batch size meets the limit once, and trains with half of it."""
    oom = traceback("torch.cuda.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", FORWARD)
    return log("Trying batch size 64", oom, "Batch size 64 failed, trying batch size 32", trainer(falling(80)), END)


def old_driver() -> str:
    where = (f"{SITE}/torch/cuda/__init__.py", 319, "_lazy_init", "torch._C._cuda_init()")
    return raised("RuntimeError", "The NVIDIA driver on your system is too old (found version 11040).", where)


def volta_in_bf16() -> str:
    text = "Type bf16 is not supported."
    return raised(
        "ValueError", text, INITIALIZE, (f"{SITE}/deepspeed/runtime/engine.py", 1080, "_do_sanity_check", "raise")
    )


def told_otherwise(line: str) -> str:
    """A loss that is nan from step 31 on, in the words of one framework; `line` has places for step and loss."""
    return log([line.format(step=step, loss="nan" if step > 30 else round(2 - step / 90, 3)) for step in range(1, 60)])


WORDINGS = {
    "of-batches": "Epoch: 1 | Batch: {step}/500 | Loss: {loss} | LR: 1e-5",
    "of-tensors": "2024-05-06 10:00:01,111 INFO train.py:88 iter={step} loss=tensor({loss}, device='cuda:0')",
    "of-mmengine": "05/06 10:00:00 - mmengine - INFO - Iter(train) [{step:>4}/900]  base_lr: 2.0e-04 lr: 2.0e-04  "
    "eta: 0:50:00  time: 1.1  data_time: 0.1  memory: 13000  loss: {loss}",
    "of-nanogpt": "iter {step}: loss {loss}, time 312.11ms, mfu 31.2%",
    "of-lightning": "Epoch 0: 5%|█ | {step}/100 [00:12<01:02, 1.58it/s, v_num=3, train_loss_step={loss}]",
    "of-json": '{{"step": {step}, "loss": {loss}, "lr": 1e-05, "grad_norm": {loss}}}',
}


CASES = (
    WrittenLog(name="linker", text=linker(), primary="build/compiler", line="-lcurand", also=("build/op-attribute",)),
    WrittenLog(name="no-compiler", text=no_compiler(), primary="build/compiler", line="'which', 'c++'"),
    WrittenLog(name="other-torch", text=other_torch(), primary="build/stale-extension", absent=("version/incompatible",)),
    WrittenLog(name="other-flash", text=other_flash(), primary="version/incompatible", absent=("build/stale-extension",)),
    WrittenLog(name="stopped-at-the-lock", text=stopped_at_the_lock(), primary="build/jit-lock"),
    WrittenLog(name="destructor-at-the-end", text=destructor_at_the_end(), primary=None, absent=("build/op-attribute",)),
    WrittenLog(name="needs-a-newer-one", text=needs_a_newer_one(), primary="version/incompatible"),
    WrittenLog(name="argument-gone", text=argument_gone(), primary="version/incompatible"),
    WrittenLog(name="cut-off-shard", text=cut_off_shard(), primary="checkpoint/missing-shards"),
    WrittenLog(name="swap-file-short", text=swap_file_short(), primary="nvme/swap", line="buffer nbytes"),
    WrittenLog(name="no-allocation", text=no_allocation(), primary="memory/host-oom-kill", line="bad_alloc"),
    WrittenLog(name="not-pinned", text=not_pinned(), primary="memory/host-oom-kill", absent=("memory/gpu-oom-init",)),
    WrittenLog(name="in-an-evaluation", text=in_an_evaluation(), primary="memory/gpu-oom-step"),
    WrittenLog(name="gathered-for-saving", text=gathered_for_saving(), primary="memory/gpu-oom-step",
               absent=("memory/gpu-oom-init",)),
    WrittenLog(name="retried-smaller", text=retried_smaller(), primary=None, absent=("memory/gpu-oom-step",)),
    WrittenLog(name="old-driver", text=old_driver(), primary="environment/no-device"),
    WrittenLog(name="volta-in-bf16", text=volta_in_bf16(), primary="numerics/dtype-unsupported"),
    *(WrittenLog(name=f"nan-{name}", text=told_otherwise(line), primary="numerics/nan-loss", line="nan")
      for name, line in WORDINGS.items()),
)  # fmt: skip
