# ruff: noqa: E501
"""Logs about software: configs, ZeRO-3, autograd, builds, versions, checkpoints, disks, hardware."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    ds,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
)

INITIALIZE = (f"{SITE}/deepspeed/__init__.py", 171, "initialize", "config_class = DeepSpeedConfig(config, mpu)")


def failed(kind: str, message: str, *frames: tuple[str, int, str, str]) -> str:
    """Both ranks raise the same; torch puts the rank in front."""
    both = [traceback(kind, message, *frames, prefix=f"[rank{rank}]: ") for rank in range(2)]
    return log(launched(), [line for one in both for line in one], stopped(1))


def batch_size() -> str:
    message = ("Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step "
               "* world_size 64 != 4 * 8 * 1")  # fmt: skip
    return failed("AssertionError", message, INITIALIZE)


def unknown_key() -> str:
    message = """1 validation error for DeepSpeedZeroConfig
stage3_prefetch_buckt_size
  Extra inputs are not permitted [type=extra_forbidden, input_value=500000, input_type=int]
    For further information visit https://errors.pydantic.dev/2.8/v/extra_forbidden"""
    return failed("pydantic_core._pydantic_core.ValidationError", message, INITIALIZE)


def wrong_type() -> str:
    message = """1 validation error for DeepSpeedFP16Config
loss_scale_window
  Input should be a valid integer, unable to parse string as an integer [type=int_parsing, input_value='1e3', input_type=str]
    For further information visit https://errors.pydantic.dev/2.8/v/int_parsing"""
    return failed("pydantic_core._pydantic_core.ValidationError", message, INITIALIZE)


def hf_mismatch() -> str:
    message = """Please correct the following DeepSpeed config values that mismatch TrainingArguments values:
- ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=8
- ds optimizer.params.lr=3e-05 vs hf learning_rate=5e-05
The easiest method is to set these DeepSpeed config values to 'auto'."""
    where = (f"{SITE}/transformers/integrations/deepspeed.py", 268, "trainer_config_finalize", "raise ValueError(")
    return failed("ValueError", message, where)


def auto_unresolved() -> str:
    message = "unsupported operand type(s) for //: 'str' and 'str'"
    where = (
        f"{SITE}/deepspeed/runtime/config.py",
        951,
        "_set_batch_related_parameters",
        "grad_acc = train_batch // micro_batch",
    )
    return failed("TypeError", message, INITIALIZE, where)


def both_precisions() -> str:
    message = "bfloat16 and fp16 modes cannot be simultaneously enabled"
    where = (f"{SITE}/deepspeed/runtime/config.py", 868, "_initialize_params", "assert not (fp16 and bf16), (")
    return failed("AssertionError", message, INITIALIZE, where)


def no_such_config() -> str:
    message = (
        "Expected a string path to an existing deepspeed config, or a dictionary or a valid base64. Received: ds.json"
    )
    return failed("ValueError", message, INITIALIZE)


def untested_optimizer() -> str:
    message = 'You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true> in the configuration file to use it.'
    where = (
        f"{SITE}/deepspeed/runtime/engine.py",
        1284,
        "_do_optimizer_sanity_check",
        "assert (self.zero_allow_untested_optimizer()",
    )
    return failed("AssertionError", message, INITIALIZE, where)


def empty_embedding() -> str:
    where = (f"{SITE}/torch/nn/functional.py", 2237, "embedding", "return torch.embedding(weight, input, padding_idx)")
    call = (f"{SITE}/torch/nn/modules/module.py", 1532, "_call_impl", "return forward_call(*args, **kwargs)")
    return failed("RuntimeError", "'weight' must be 2-D", ("train.py", 61, "reference_logits", "ref(ids)"), call, where)


def empty_in_file() -> str:
    message = """Error(s) in loading state_dict for LlamaForCausalLM:
\tsize mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is torch.Size([32000, 4096]).
\tsize mismatch for model.layers.0.self_attn.q_proj.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model is torch.Size([4096, 4096])."""
    where = (f"{SITE}/transformers/modeling_utils.py", 4120, "_load_pretrained_model", "raise RuntimeError(")
    return log(traceback("RuntimeError", message, where))


def inflight() -> str:
    message = (
        "still have inflight params [<bound method Init._convert_to_deepspeed_param.<locals>.ds_summary of Parameter>]"
    )
    where = (
        f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py",
        186,
        "reset_step",
        "raise RuntimeError(",
    )
    return failed("RuntimeError", message, where)


def reduced_twice() -> str:
    message = (
        "The parameter 447 has already been reduced. Gradient computed twice for this partition. Multiple gradient "
        "reductions are currently not supported"
    )
    where = (
        f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py",
        928,
        "reduce_independent_p_g_buckets_and_remove_grads",
        "assert",
    )
    return failed("AssertionError", message, where)


def recompute() -> str:
    message = """torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.
tensor at position 7:
saved metadata: {'shape': torch.Size([4096]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=0)}
recomputed metadata: {'shape': torch.Size([0]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=0)}"""
    where = (f"{SITE}/torch/utils/checkpoint.py", 875, "check_recomputed_tensors_match", "raise CheckpointError(")
    return failed("torch.utils.checkpoint.CheckpointError", message, where)


def no_grad() -> str:
    message = "element 0 of tensors does not require grad and does not have a grad_fn"
    warning = ("/opt/conda/lib/python3.10/site-packages/torch/utils/checkpoint.py:91: UserWarning: None of the inputs have "
               "requires_grad=True. Gradients will be None")  # fmt: skip
    where = (f"{SITE}/torch/autograd/__init__.py", 267, "backward", "_engine_run_backward(")
    return log(warning, failed("RuntimeError", message, where).splitlines())


def cuda_pair() -> str:
    message = (
        ">- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 11.8, "
        "unable to compile cuda/cpp extensions without a matching cuda version."
    )
    where = (
        f"{SITE}/deepspeed/ops/op_builder/builder.py",
        118,
        "assert_no_cuda_mismatch",
        "raise CUDAMismatchException(",
    )
    ignored = [
        "Exception ignored in: <function DeepSpeedCPUAdam.__del__ at 0x7f0b>",
        *traceback("AttributeError", "'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
    ]
    return log(traceback("deepspeed.ops.op_builder.builder.CUDAMismatchException", message, where), ignored, stopped(1))


def no_python_headers() -> str:
    build = """
    [1/3] c++ -MMD -MF cpu_adam.o.d -DTORCH_EXTENSION_NAME=cpu_adam -c cpu_adam.cpp -o cpu_adam.o
    FAILED: cpu_adam.o
    In file included from /opt/conda/lib/python3.10/site-packages/torch/include/torch/csrc/python_headers.h:12,
                     from cpu_adam.cpp:6:
    /opt/conda/lib/python3.10/site-packages/torch/include/torch/csrc/python_headers.h:12:10: fatal error: Python.h: No such file or directory
       12 | #include <Python.h>
          |          ^~~~~~~~~~
    compilation terminated.
    ninja: build stopped: subcommand failed.
    """
    where = (f"{SITE}/torch/utils/cpp_extension.py", 2112, "_run_ninja_build", "raise RuntimeError(message) from e")
    return log("Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...", build,
               traceback("RuntimeError", "Error building extension 'cpu_adam'", where))  # fmt: skip


def waits_for_lock() -> str:
    return log(
        launched(),
        "Using /home/u/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...",
        "Using /home/u/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...",
    )


def import_fails() -> str:
    where = (
        f"{SITE}/deepspeed/elasticity/elastic_agent.py",
        9,
        "<module>",
        "from torch.distributed.elastic.agent.server.api import log",
    )
    return log(
        traceback("ImportError", "cannot import name 'log' from 'torch.distributed.elastic.agent.server.api'", where)
    )


def other_world() -> str:
    message = ("The checkpoint being loaded used a DP world size of 8 but the current world size is 4. Automatic adjustment "
               "of ZeRO's optimizer state partitioning with a new world size is not currently supported.")  # fmt: skip
    where = (
        f"{SITE}/deepspeed/runtime/engine.py",
        3157,
        "_get_all_zero_checkpoint_names",
        "raise ZeRORuntimeException(",
    )
    return failed("deepspeed.runtime.zero.utils.ZeRORuntimeException", message, where)


def shards_missing() -> str:
    message = "[Errno 2] No such file or directory: 'out/global_step500/zero_pp_rank_3_mp_rank_00_optim_states.pt'"
    where = (f"{SITE}/torch/serialization.py", 425, "__init__", "super().__init__(open(name, mode))")
    return failed("FileNotFoundError", message, where)


def disk_full() -> str:
    message = "[enforce fail at inline_container.cc:424] . unexpected pos 3842112896 vs 3842112784"
    where = (f"{SITE}/torch/serialization.py", 483, "__exit__", "self.file_like.write_end_of_file()")
    return log(trainer(falling(20)), traceback("RuntimeError", message, where), torchrun_failed(1, others=(1,)))


def quota() -> str:
    message = "[Errno 122] Disk quota exceeded"
    where = (f"{SITE}/safetensors/torch.py", 286, "save_file", "serialize_file(_flatten(tensors), filename)")
    return log(trainer(falling(20)), traceback("OSError", message, where))


def lost_gpu() -> str:
    return log(
        trainer(falling(20)),
        "[Sat May 11 10:20:11 2024] NVRM: Xid (PCI:0000:9d:00): 79, pid='<unknown>', GPU has fallen off the bus.",
        traceback("RuntimeError", "CUDA error: unspecified launch failure", ("train.py", 12, "step", "loss.item()")),
        torchrun_failed(1, others=(1,)),
    )


def bad_token() -> str:
    lines = [
        f"../aten/src/ATen/native/cuda/Indexing.cu:1292: indexSelectLargeIndex: block: [{b},0,0], thread: [64,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed."
        for b in range(20)
    ]
    message = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call."
    return log(
        trainer(falling(5)), lines, traceback("RuntimeError", message, ("train.py", 12, "step", "loss.backward()"))
    )


def hub_unreachable() -> str:
    message = (
        "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files."
    )
    where = (f"{SITE}/transformers/utils/hub.py", 540, "cached_files", "raise OSError(")
    return failed("OSError", message, where)


def no_driver() -> str:
    message = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
    where = (f"{SITE}/torch/cuda/__init__.py", 319, "_lazy_init", "torch._C._cuda_init()")
    return failed("RuntimeError", message, where)


def trace_then_hang() -> str:
    from tests.logs_real.written.parts import watchdog

    changed = "Invalidate trace cache @ step 421: expected module 421, but got module 12"
    return log(
        ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
        trainer(falling(20)),
        changed,
        [watchdog(rank, 2110, "_ALLGATHER_BASE", numel=2359296, out=18874368) for rank in (0, 1, 3)],
    )


CASES = (
    WrittenLog(name="batch-size", text=batch_size(), primary="config/batch-size", line="64 != 4"),
    WrittenLog(name="unknown-key", text=unknown_key(), primary="config/unknown-key", line="validation error"),
    WrittenLog(name="wrong-type", text=wrong_type(), primary="config/wrong-type"),
    WrittenLog(name="hf-mismatch", text=hf_mismatch(), primary="config/hf-mismatch"),
    WrittenLog(name="auto-unresolved", text=auto_unresolved(), primary="config/auto-unresolved"),
    WrittenLog(name="both-precisions", text=both_precisions(), primary="config/conflict"),
    WrittenLog(name="no-such-config", text=no_such_config(), primary="config/syntax"),
    WrittenLog(name="untested-optimizer", text=untested_optimizer(), primary="config/untested-optimizer"),
    WrittenLog(name="empty-embedding", text=empty_embedding(), primary="zero3/module-outside-engine"),
    WrittenLog(name="empty-in-file", text=empty_in_file(), primary="zero3/empty-weights-in-checkpoint"),
    WrittenLog(name="inflight", text=inflight(), primary="zero3/inflight-params"),
    WrittenLog(name="reduced-twice", text=reduced_twice(), primary="autograd/reduced-twice"),
    WrittenLog(name="recompute", text=recompute(), primary="autograd/recompute-mismatch"),
    WrittenLog(name="no-grad", text=no_grad(), primary="autograd/no-grad"),
    WrittenLog(name="cuda-pair", text=cuda_pair(), primary="build/cuda-mismatch", also=("build/op-attribute",)),
    WrittenLog(name="no-python-headers", text=no_python_headers(), primary="build/compiler", line="fatal error: Python.h"),
    WrittenLog(name="waits-for-lock", text=waits_for_lock(), primary="build/jit-lock"),
    WrittenLog(name="import-fails", text=import_fails(), primary="version/incompatible"),
    WrittenLog(name="other-world", text=other_world(), primary="checkpoint/world-size"),
    WrittenLog(name="shards-missing", text=shards_missing(), primary="checkpoint/missing-shards"),
    WrittenLog(name="disk-full", text=disk_full(), primary="disk/full"),
    WrittenLog(name="quota", text=quota(), primary="disk/full"),
    WrittenLog(name="lost-gpu", text=lost_gpu(), primary="hardware/gpu-fault", line="Xid"),
    WrittenLog(name="bad-token", text=bad_token(), primary="cuda/device-assert", line="Assertion `srcIndex"),
    WrittenLog(name="hub-unreachable", text=hub_unreachable(), primary="environment/offline"),
    WrittenLog(name="no-driver", text=no_driver(), primary="environment/no-device"),
    WrittenLog(name="trace-then-hang", text=trace_then_hang(), primary="zero3/branch-hang"),
)  # fmt: skip
