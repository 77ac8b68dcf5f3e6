# ruff: noqa: E501
"""Logs of jobs that end while they load: checkpoints, libraries, drivers."""

from tests.logs_real.written.parts import SITE, WrittenLog, ds, log, stopped, traceback

OPENS = (f"{SITE}/transformers/modeling_utils.py", 503, "load_state_dict", "with safe_open(checkpoint_file) as f:")
FABRIC = (f"{SITE}/lightning/fabric/strategies/deepspeed.py", 880, "_validate_checkpoint_directory", "raise")
UNIVERSAL = (
    f"{SITE}/deepspeed/checkpoint/ds_to_universal.py",
    340,
    "_check_for_required_state",
    "assert info is not None",
)
LAZY = (f"{SITE}/transformers/utils/import_utils.py", 1525, "_get_module", "raise RuntimeError(")
CUDA = (f"{SITE}/torch/cuda/__init__.py", 302, "_lazy_init", "torch._C._cuda_init()")
STEP = (f"{SITE}/transformers/trainer.py", 2388, "_inner_training_loop", "tr_loss_step = self.training_step(model)")
EMPTIED = """torch.utils.checkpoint: Recomputed values for the following tensors have different metadata than during the forward pass.
tensor at position 8:
saved metadata: {'shape': torch.Size([4096]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=0)}
recomputed metadata: {'shape': torch.Size([0]), 'dtype': torch.bfloat16, 'device': device(type='cuda', index=0)}"""


def raised(
    name: str, primary: str, kind: str, message: str, frame: tuple[str, int, str, str], *before: str
) -> WrittenLog:
    text = log(before, traceback(kind, message, frame, prefix="[rank0]: "), stopped(1))
    return WrittenLog(name=name, text=text, primary=primary, absent=("launch/user-exception",))


COUNT = "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that might have already set an error? Error "

CASES = (
    *(
        raised(f"weights-{reason}", "checkpoint/missing-shards", "safetensors_rust.SafetensorError",
               f"Error while deserializing header: {reason}", OPENS)
        for reason in ("MetadataIncompleteBuffer", "HeaderTooLarge", "incomplete metadata, file not fully covered")
    ),
    raised("weights-of-pickle", "checkpoint/missing-shards", "OSError",
           "Unable to load weights from pytorch checkpoint file for '/m/pytorch_model-00003-of-00007.bin' at '/m/pytorch_model-00003-of-00007.bin'.", OPENS),
    raised("lightning-no-checkpoint", "checkpoint/missing-shards", "FileNotFoundError",
           "The provided path is not a valid DeepSpeed checkpoint: ckpts/epoch=10.ckpt", FABRIC),
    raised("lightning-not-loaded", "checkpoint/missing-shards", "lightning_fabric.utilities.exceptions.MisconfigurationException",
           "DeepSpeed was unable to load the checkpoint. Ensure you passed in a DeepSpeed compatible checkpoint or a single checkpoint file by setting `DeepSpeedStrategy(..., load_full_weights=True)`.", FABRIC),
    raised("no-universal-info", "checkpoint/zero-to-fp32", "AssertionError",
           "Required `universal_checkpoint_info` state is missing in checkpoint. Verify that client creates this state.", UNIVERSAL),
    raised("wrapped-import", "version/incompatible", "RuntimeError",
           f"Failed to import transformers.models.llama.modeling_llama because of the following error (look up to see its traceback):\n{SITE}/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", LAZY),
    raised("wrapped-missing-module", "version/incompatible", "RuntimeError",
           "Failed to import transformers.trainer because of the following error (look up to see its traceback):\nNo module named 'torch.distributed.tensor'", LAZY),
    raised("fabric-manager", "environment/no-device", "RuntimeError", f"{COUNT}802: system not yet initialized", CUDA),
    raised("container-too-new", "environment/no-device", "RuntimeError",
           f"{COUNT}804: forward compatibility was attempted on non supported HW", CUDA),
    raised("driver-insufficient", "environment/no-device", "RuntimeError",
           "CUDA error: CUDA driver version is insufficient for CUDA runtime version", CUDA),
    raised(
        "fabric-manager-in-nccl",
        "environment/no-device",
        "torch.distributed.DistBackendError",
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 802 'system not yet initialized'",
        ("train.py", 12, "main", "dist.barrier()"),
    ),
    # What the recomputed pass finds empty was whole: under ZeRO-3 that is said of checkpointing, not of the weight.
    WrittenLog(name="recomputed-empty", primary="autograd/recompute-mismatch", absent=("zero3/empty-weights-in-model",),
               text=log(ds("Creating torch.bfloat16 ZeRO stage 3 optimizer"),
                        traceback("torch.utils.checkpoint.CheckpointError", EMPTIED, STEP, prefix="[rank0]: "))),
    raised("accumulates-under-no-sync", "config/conflict", "AssertionError",
           "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 2",
           (f"{SITE}/deepspeed/runtime/engine.py", 1995, "no_sync", "assert not self.zero_optimization_partition_gradients(), \\")),
    raised("trainer-both-precisions", "config/conflict", "ValueError", "At most one of fp16 and bf16 can be True, but not both",
           (f"{SITE}/transformers/training_args.py", 1602, "__post_init__", "raise ValueError(")),
    raised("accelerate-no-config", "config/syntax", "ValueError",
           "Expected a string path to an existing deepspeed config, or a dictionary, or a base64 encoded string. Received: configs/ds_z3.json",
           (f"{SITE}/accelerate/utils/deepspeed.py", 112, "__init__", "raise ValueError(")),
    # Triton compiles its launcher with the C compiler itself, without ninja.
    WrittenLog(name="triton-without-headers", primary="build/compiler", absent=("launch/user-exception",), line="Python.h",
               text=log("/tmp/tmpx/main.c:5:10: fatal error: Python.h: No such file or directory", "compilation terminated.",
                        traceback("subprocess.CalledProcessError", "Command '['/usr/bin/gcc', '/tmp/tmpx/main.c', '-O3', '-shared', '-lcuda']' returned non-zero exit status 1.",
                                  (f"{SITE}/triton/common/build.py", 90, "_build", "ret = subprocess.check_call(cc_cmd)")))),
)  # fmt: skip
