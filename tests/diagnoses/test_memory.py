"""Memory that ran out, on the device and on the host."""

import pytest

from dsdoctor.case import Case
from dsdoctor.runs.facts import Frame, MemorySample
from tests.diagnoses.examples import found
from tests.diagnoses.making import (
    BACKWARD,
    INITIALIZE,
    USER,
    event,
    failed,
    healthy,
    log,
    log_failure,
    process_exit,
    run,
)

GIB = 2**30
OOM = (
    "CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 has a total capacity of 79.15 GiB of which 2.08 GiB is free."
)
STATES = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/zero/stage_1_and_2.py",
    line=647,
    function="initialize_optimizer_states",
)
ADAM = Frame(
    file="/env/lib/python3.11/site-packages/torch/optim/adamw.py",
    line=1,
    function="_init_group",
    text='state["exp_avg"] = torch.zeros_like(p)',
)
STEP = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=9, function="step")
BOGUS = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
)
GATHER = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/runtime/zero/partition_parameters.py",
    line=1,
    function="_allgather_params",
)
SAVE = Frame(file="/env/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line=7, function="save_16bit_model")
EVALUATE = Frame(file="/env/lib/python3.11/site-packages/transformers/trainer.py", line=7, function="evaluation_loop")
PIN = Frame(
    file="/env/lib/python3.11/site-packages/deepspeed/accelerator/cuda_accelerator.py",
    line=7,
    function="pin_memory",
)
NOT_PINNED = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"
PLENTY = (MemorySample(seconds=1.0, ranks_bytes=4 * GIB, available_bytes=60 * GIB),)
SCARCE = (MemorySample(seconds=1.0, ranks_bytes=60 * GIB, available_bytes=1 * GIB),)


def killed(**values):
    return Case(runs=(run(exits=((1, -9),), outcome="killed", **values),))


POSITIVE = {
    "memory/gpu-oom-init": [
        failed("torch.cuda.OutOfMemoryError", OOM, USER, INITIALIZE, STATES),
        log_failure("torch.cuda.OutOfMemoryError", OOM, USER, INITIALIZE, STATES),
    ],
    "memory/gpu-oom-step": [
        failed("torch.OutOfMemoryError", OOM, USER, BACKWARD),
        log_failure("RuntimeError", OOM, USER, BACKWARD),
        log_failure("RuntimeError", OOM, USER, steps_seen=12),
        failed("torch.OutOfMemoryError", OOM, USER, STEP, ADAM),
        log_failure("torch.OutOfMemoryError", OOM, USER, SAVE, GATHER, steps_seen=50),
        failed("RuntimeError", "Triton Error [CUDA]: out of memory", USER, BACKWARD),
    ],
    "memory/bogus-allocation": [
        failed("RuntimeError", BOGUS.format(4611685606110536704), USER),
        failed("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.00 EiB.", USER, BACKWARD),
        failed("RuntimeError", "CUDA out of memory. Tried to allocate more than 1EB memory.", USER, BACKWARD),
    ],
    "memory/host-oom-kill": [
        killed(oom_kills=1),
        killed(memory=SCARCE),
        log(exits=(process_exit(-9, rank=1),)),
        log(event("oom-kill"), exits=(process_exit(137),)),
        failed("RuntimeError", BOGUS.format(2**34), USER),
        failed("numpy.core._exceptions._ArrayMemoryError", "Unable to allocate 12.0 GiB for an array", USER),
        failed("RuntimeError", NOT_PINNED, USER, INITIALIZE, PIN),
        log(event("host-allocation", "what():  std::bad_alloc"), end="failed"),
    ],
    "memory/allocator-pressure": [log(event("cache-flush", count=9))],
}
NEGATIVE = {
    "memory/gpu-oom-init": [
        failed("torch.OutOfMemoryError", OOM, USER, BACKWARD),
        failed("ValueError", "x", INITIALIZE),
        failed("RuntimeError", NOT_PINNED, USER, INITIALIZE, PIN),
        log_failure("torch.OutOfMemoryError", OOM, USER, SAVE, GATHER, steps_seen=50),
    ],
    "memory/gpu-oom-step": [
        failed("torch.OutOfMemoryError", OOM, USER, INITIALIZE),
        failed("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.00 EiB.", USER, BACKWARD),
    ],
    "memory/bogus-allocation": [
        failed("torch.OutOfMemoryError", OOM, USER, BACKWARD),
        failed("RuntimeError", BOGUS.format(2**34), USER),
    ],
    "memory/host-oom-kill": [
        killed(memory=PLENTY),
        healthy(),
        failed("RuntimeError", BOGUS.format(4611685606110536704), USER),
        log_failure("ValueError", "x", USER, exits=(process_exit(-9),)),
        failed("RuntimeError", NOT_PINNED, USER, INITIALIZE),
        log(event("host-allocation", "what():  std::bad_alloc")),
    ],
    "memory/allocator-pressure": [log(event("cache-flush")), log()],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_a_bare_exit_code_leaves_a_caveat():
    (bare,) = found(log(exits=(process_exit(-9),)), "memory/host-oom-kill")
    (counted,) = found(killed(oom_kills=1), "memory/host-oom-kill")
    assert bare.caveat is not None
    assert bare.confidence < counted.confidence
    assert counted.caveat is None


def test_states_of_the_first_step_are_not_blamed_on_the_batch():
    (finding,) = found(failed("torch.OutOfMemoryError", OOM, USER, STEP, ADAM), "memory/gpu-oom-step")
    assert "optimizer states" in finding.cause
    assert all("micro_batch" not in fix.text for fix in finding.fixes)


@pytest.mark.parametrize(
    ("frames", "told", "first_fix"),
    [
        ((BACKWARD,), "in the backward pass", "micro_batch"),
        ((EVALUATE,), "in an evaluation", "per_device_eval_batch_size"),
        ((SAVE, GATHER), "while a checkpoint was written", "zero_to_fp32"),
        ((), "in a training step", "micro_batch"),
    ],
)
def test_the_part_of_the_program_is_told(frames, told, first_fix):
    case = log_failure("torch.OutOfMemoryError", OOM, USER, *frames, steps_seen=50)
    (finding,) = found(case, "memory/gpu-oom-step")
    assert told in finding.cause
    assert first_fix in finding.fixes[0].text


def test_what_was_asked_of_the_host_is_told():
    (refused,) = found(failed("RuntimeError", BOGUS.format(2**34), USER), "memory/host-oom-kill")
    (unpinned,) = found(failed("RuntimeError", NOT_PINNED, USER, INITIALIZE, PIN), "memory/host-oom-kill")
    assert "16.0 GiB" in refused.cause
    assert "pin_memory" in unpinned.fixes[0].text


def test_without_a_traceback_set_up_is_an_assumption():
    """A last line that was pasted alone shows no step because it shows nothing else either."""
    (finding,) = found(log_failure("torch.OutOfMemoryError", OOM), "memory/gpu-oom-init")
    assert finding.confidence <= 0.5
    assert finding.caveat is not None
    assert "plays no part" not in finding.cause
    assert any("micro-batch" in fix.text for fix in finding.fixes)
