"""The families that are recognised by what an exception says: builds, versions, checkpoints, storage, hardware."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.finding import Evidence
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import LIBRARY, MODULE, TORCH, USER, event, failed, failure, healthy, log, log_failure, run

IMPORTED = Frame(file="/env/lib/python3.11/site-packages/deepspeed/elasticity/agent.py", line=8, function="<module>")
LOADER = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/state_dict_factory.py",
    line=8,
    function="check_ckpt_list",
)
CONVERTER = Frame(file="/data/ckpt/zero_to_fp32.py", line=8, function="parse_model_states")
SWAPPER = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/swap_tensor/partitioned_param_swapper.py",
    line=8,
    function="_configure_aio",
)
CUDA_PAIR = (
    ">- DeepSpeed Op Builder: Installed CUDA version 12.1 does not match the version torch was compiled with 11.8, "
    "unable to compile cuda/cpp extensions without a matching cuda version."
)
BATON = Frame(file="/env/lib/python3.11/site-packages/torch/utils/file_baton.py", line=42, function="wait")
ENGINE_LOADS = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=8, function="load_checkpoint"
)
UNDEFINED = "undefined symbol: _ZN3c105ErrorC2E"
CUT_OFF = "PytorchStreamReader failed reading zip archive: failed finding central directory"
BUILD = "Error building extension 'fused_adam'"
FINISHED = {"end": "finished"}
ROOT = event("extensions-root", folder="/root/.cache/torch_extensions", line=90)


def stopped_after(last_line, *events):
    return log(*events, last_line=Evidence(source="train.log", line=last_line, text="x"))


POSITIVE = {
    "build/cuda-mismatch": [
        failed("deepspeed.ops.op_builder.builder.CUDAMismatchException", CUDA_PAIR, USER),
        failed("RuntimeError", "The detected CUDA version (12.1) mismatches the version that was used to compile\n"
               "PyTorch (11.8). Please make sure to use the same CUDA versions.", USER),
    ],
    "build/cuda-home": [
        failed("deepspeed.ops.op_builder.builder.MissingCUDAException", "CUDA_HOME does not exist", USER),
        failed("OSError", "CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", USER),
    ],
    "build/compiler": [
        failed("RuntimeError", BUILD, USER),
        log_failure("RuntimeError", "Ninja is required to load C++ extensions", USER),
        log_failure("subprocess.CalledProcessError", "Command '['ninja', '-v']' returned non-zero", USER),
        log_failure("subprocess.CalledProcessError", "Command '['which', 'c++']' returned non-zero", USER),
    ],
    "build/op-attribute": [log(event("op-attribute"))],
    "build/stale-extension": [
        failed("AttributeError", "module 'deepspeed_shm_comm' has no attribute 'initialize'", USER),
        failed("ImportError", f"/root/.cache/torch_extensions/py311/cpu_adam.so: {UNDEFINED}", USER, LIBRARY),
        failed("ImportError", "/opt/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by "
               "/root/.cache/torch_extensions/py310/cpu_adam/cpu_adam.so)", USER),
    ],
    "build/jit-lock": [
        stopped_after(91, ROOT),
        log(event("waits-for-lock", "wait (torch/utils/file_baton.py:42)")),
        log_failure("KeyboardInterrupt", "", USER, BATON),
    ],
    "version/incompatible": [
        failed("ImportError", "cannot import name 'log' from 'torch.distributed.elastic.agent'", USER, IMPORTED),
        failed("RuntimeError", "Failed to import trl because of the following error (look up to see its traceback):\n"
               "cannot import name 'log' from 'torch.distributed.elastic.agent'", USER, LIBRARY),
        failed("AttributeError", "module 'numpy' has no attribute 'float_'", USER, LIBRARY),
        failed("AttributeError", "`np.float_` was removed in the NumPy 2.0 release. Use `np.float64`.", USER, LIBRARY),
        failed("ImportError", "deepspeed>=0.9.3 is required for a normal functioning of this module", USER, LIBRARY),
        failed("ImportError", "Using the `Trainer` with `PyTorch` requires `accelerate>=0.26.0`: Please run", LIBRARY),
        failed("ImportError", f"/env/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: {UNDEFINED}", USER, LIBRARY),
        failed("RuntimeError", "operator torchvision::nms does not exist", USER, LIBRARY),
        failed("RuntimeError", "CUDA error: no kernel image is available for execution on the device", USER, TORCH),
        failed("pydantic.errors.PydanticUserError", "If you use `@root_validator` with pre=False", USER, IMPORTED),
        failed("TypeError", "Accelerator.__init__() got an unexpected keyword argument 'dispatch_batches'", LIBRARY),
        failed("_pickle.UnpicklingError", "Weights only load failed. This file can still", ENGINE_LOADS, TORCH),
    ],
    "checkpoint/world-size": [
        failed("ZeRORuntimeException", "The checkpoint being loaded used a DP world size of 8 but the current world "
               "size is 4. Automatic adjustment is not supported.", USER),
    ],
    "checkpoint/missing-shards": [
        failed("FileNotFoundError", "[Errno 2] No such file: 'ckpt/zero_pp_rank_3_mp_rank_00_optim_states.pt'", USER),
        failed("AssertionError", "", USER, LOADER),
        failed("RuntimeError", CUT_OFF, USER, ENGINE_LOADS, TORCH),
        log_failure("ValueError", "Expected 2 of '*_optim_states.pt' under 'ckpt' but found 1 files", CONVERTER),
    ],
    "checkpoint/zero-to-fp32": [
        log_failure("ValueError", "consumed 100 numels out of 200 - something is wrong", CONVERTER),
        log_failure("KeyError", "'buffer_names'", CONVERTER),
    ],
    "disk/full": [
        failed("RuntimeError", "[enforce fail at inline_container.cc:672] . unexpected pos 3520 vs 3412", USER),
        failed("OSError", "[Errno 28] No space left on device: '/data/ckpt'", USER),
        failed("RuntimeError", "PytorchStreamWriter failed writing file data/5: file write failed", USER),
    ],
    "nvme/swap": [
        failed("TypeError", "expected str, bytes or os.PathLike object, not NoneType", USER, SWAPPER),
        failed("RuntimeError", "Unable to JIT load the async_io op due to it not being compatible", USER),
        failed("AssertionError", '"nvme_path" in DeepSpeed Config cannot be None if remote device is nvme', USER),
        log(event("swap-failed", "rank6/1.tensor.swp: buffer nbytes != file bytes 4001366016 != 3426746368")),
    ],
    "hardware/gpu-fault": [
        failed("RuntimeError", "CUDA error: uncorrectable ECC error encountered", USER),
        log(event("gpu-fault")),
    ],
    "cuda/device-assert": [
        failed("RuntimeError", "CUDA error: device-side assert triggered", USER),
        log(event("device-assert")),
    ],
    "cuda/illegal-access": [
        failed("RuntimeError", "CUDA error: an illegal memory access was encountered", USER),
        log(event("native-error", error="CUDA error: unspecified launch failure")),
    ],
}  # fmt: skip
NEGATIVE = {
    "build/cuda-mismatch": [failed("RuntimeError", BUILD, USER), healthy()],
    "build/cuda-home": [failed("RuntimeError", BUILD, USER), healthy()],
    "build/compiler": [
        Case(runs=(run(failure("RuntimeError", BUILD, USER, rank=0), failure("X", CUDA_PAIR, USER, rank=1)),)),
        log(event("compile-error")),
    ],
    "build/op-attribute": [
        failed("AttributeError", "'Model' object has no attribute 'optim'", USER),
        log(event("op-attribute"), **FINISHED),
        log(),
    ],
    "build/stale-extension": [
        failed("AttributeError", "module 'data' has no attribute 'load'", USER),
        failed("ImportError", f"/env/site-packages/flash_attn_2_cuda.so: {UNDEFINED}", USER, LIBRARY),
    ],
    "build/jit-lock": [
        stopped_after(91, ROOT, event("extension-loaded")),
        stopped_after(500, ROOT),
        log(ROOT, last_line=Evidence(source="train.log", line=91, text="x"), **FINISHED),
        log_failure("KeyboardInterrupt", "", USER, TORCH),
    ],
    "version/incompatible": [
        failed("ImportError", "cannot import name 'build' from 'models'", USER),
        failed("AttributeError", "module 'torch' has no attribute 'flaot32'", USER),
        failed("TypeError", "AdamW.__init__() got an unexpected keyword argument 'lrr'", USER, ENGINE_LOADS),
        failed("TypeError", "Net.forward() got an unexpected keyword argument 'labels'", USER, MODULE),
        failed("ImportError", f"/root/.cache/torch_extensions/py311/cpu_adam.so: {UNDEFINED}", USER, LIBRARY),
        failed("_pickle.UnpicklingError", "Weights only load failed. This file can still", USER, TORCH),
    ],
    "checkpoint/world-size": [failed("RuntimeError", "world size 8", USER)],
    "checkpoint/missing-shards": [
        failed("FileNotFoundError", "[Errno 2] No such file: 'data/train.json'", USER),
        failed("AssertionError", "", USER),
        failed("RuntimeError", CUT_OFF, USER, TORCH),
    ],
    "checkpoint/zero-to-fp32": [
        failed("KeyError", "'buffer_names'", USER),
        log_failure("ValueError", "Expected 2 of '*_optim_states.pt' under 'ckpt' but found 1 files", CONVERTER),
        log_failure("RuntimeError", CUT_OFF, CONVERTER, TORCH),
    ],
    "disk/full": [
        failed("RuntimeError", "NCCL WARN Error while creating shared memory: No space left on device", USER),
        failed("OSError", "[Errno 28] No space left on device: '/dev/shm/torch_1'", USER),
    ],
    "nvme/swap": [failed("TypeError", "expected str, bytes or os.PathLike object, not NoneType", USER)],
    "hardware/gpu-fault": [failed("RuntimeError", "CUDA error: device-side assert triggered", USER), log()],
    "cuda/device-assert": [failed("RuntimeError", "CUDA error: an illegal memory access was encountered", USER), log()],
    "cuda/illegal-access": [
        failed("RuntimeError", "CUDA error: device-side assert triggered", USER, TORCH),
        log(event("gpu-fault"), event("native-error", error="CUDA error: unspecified launch failure")),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1
    assert not found(case, "launch/user-exception")


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_the_first_error_of_a_build_is_the_one_that_counts():
    first = event("compile-error", "nvcc fatal   : Value 'c++17' is not defined for option 'std'", line=32)
    case = log_failure("RuntimeError", BUILD, USER, line=77)
    case = Case(logs=type(case.logs)(events=(first,), failures=case.logs.failures))
    (finding,) = found(case, "build/compiler")
    assert finding.evidence[0].line == 32
    assert "c++17" in finding.cause


def test_the_first_error_may_stand_in_the_message_that_a_later_one_was_raised_from():
    text = f"{BUILD}: [1/3] c++ -c cpu_adam.cpp\nFAILED: cpu_adam.o\nx.h:13:10: fatal error: Python.h: No such file"
    built = replace(failure("RuntimeError", text, USER), source="train.log", line=30, message_lines=(30, 31, 32))
    outer = "DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load."
    (finding,) = found(Case(runs=(run(failure("RuntimeError", outer, USER, chain=(built,))),)), "build/compiler")
    assert finding.evidence[0].line == 32
    assert "Python.h" in finding.cause


def test_what_is_missing_for_a_build_is_told():
    ninja = failure("RuntimeError", "Unable to JIT load the cpu_adam op due to ninja not being installed.", USER)
    (finding,) = found(
        Case(runs=(run(failure("RuntimeError", "failed to build/load.", USER, chain=(ninja,))),)), "build/compiler"
    )
    assert "ninja not being installed" in finding.cause
    assert "ninja" in finding.evidence[0].text


def test_both_versions_are_named():
    (finding,) = found(POSITIVE["build/cuda-mismatch"][0], "build/cuda-mismatch")
    assert "12.1" in finding.cause
    assert "11.8" in finding.cause


def test_swapping_without_a_folder():
    """What is missing is the key; the disk and libaio come after."""
    case = failed("AssertionError", '"nvme_path" in DeepSpeed Config cannot be None if remote device is nvme', USER)
    (finding,) = found(case, "nvme/swap")
    assert "without a folder" in finding.cause
    assert "nvme_path" in finding.fixes[0].text
