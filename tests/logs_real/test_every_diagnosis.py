"""Each diagnosis there is: the produced log that shows it, or the reason why no log made on a CPU can."""

from dsdoctor.diagnoses import ALL
from tests.logs_real import test_produced, test_produced_ranks, test_produced_software, test_written

CONSEQUENCES = ("launch/peer-failure",)
"""In many of the produced logs, and never the root."""
NOT_IN_A_LOG = {
    "build/op-unavailable": "the facts of the machine say it",
    "comm/failed-step": "the communication check says it",
    "comm/slow-link": "the communication check measures it",
    "comm/slow-rank": "the communication check measures it",
    "comm/wrong-value": "the communication check says it",
    "config/deprecated": "the lint of the config says it; DeepSpeed goes on with the old key",
    "config/guilty-key": "the bisection of the config says it",
    "config/ineffective": "the lint of the config says it; such a key does nothing",
    "config/suspicious-value": "the lint of the config says it",
    "environment/cannot-import": "the facts of the machine say it",
    "environment/cpu-only": "the facts of the machine say it",
    "environment/low-memlock": "the facts of the machine say it",
    "environment/small-shm": "the facts of the machine say it",
    "hang/stalled-rank": "the stacks of an observed run say it",
    "launch/killed": "the counters of an observed run tell it from a lack of memory",
    "memory/gpu-occupied": "the driver and the communication check say it",
    "memory/will-not-fit": "the memory model says it",
    "numerics/bad-input": "the detector says it",
    "numerics/gradient-underflow": "the detector measures it",
    "numerics/headroom": "the detector measures it",
    "numerics/reduction-overflow": "the detector says it",
    "launch/own-ranks": "an observed run says it",
    "script/exited": "an observed run says it",
    "script/no-engine": "an observed run says it",
    "script/nondeterministic": "a second run of the plain leg says it",
    "script/step-before-backward": "an observed run says it",
    "speed/out-of-time": "a run that dsdoctor ended says it",
}
"""The other commands prove these; what proves them does not stand in a log."""
NOT_ON_A_CPU = {
    "autograd/attention-dtype": "flash attention runs on GPUs only",
    "build/cuda-mismatch": "torch compares the toolkit only where it was itself built for CUDA",
    "build/op-attribute": "the destructor of the tested release has that fault no more",
    "build/stale-extension": "needs two releases of DeepSpeed or torch that share a cache",
    "comm/ib-error": "needs InfiniBand",
    "comm/nccl-error": "needs a GPU",
    "comm/p2p-hang": "needs two GPUs of one machine",
    "cuda/device-assert": "needs a GPU",
    "cuda/illegal-access": "needs a GPU",
    "hang/slow-not-hung": "every step takes more than a minute, which on a CPU only a job that sleeps would show",
    "hardware/gpu-fault": "needs a GPU that fails",
    "memory/allocator-pressure": "only the allocator of a GPU warns so",
    "memory/gpu-oom-init": "needs a GPU",
    "memory/gpu-oom-step": "needs a GPU",
    "numerics/overlap-comm-race": "a race between two streams of a GPU",
    "numerics/zero-gradients": "the tested release skips such a step; 0.19.6 and older assert",
    "speed/offload-bound": "forward and backward have to run on a GPU while Adam runs on the CPU",
    "version/incompatible": "needs two installed libraries that do not go together",
    "version/rank-mismatch": "needs nodes on which two releases of torch or NCCL are installed",
}
"""A log can show these, but none that was made on a CPU with the tested releases; written ones stand for them."""


def test_each_diagnosis_has_a_produced_log_or_a_reason():
    produced = {*test_produced.ROOTS.values(), *test_produced.NOTED.values(), *CONSEQUENCES}
    produced |= {*test_produced_ranks.ROOTS.values(), *test_produced_software.ROOTS.values()}
    reasons = {**NOT_IN_A_LOG, **NOT_ON_A_CPU}
    known = {diagnosis.id for diagnosis in ALL}
    assert not known - produced - set(reasons), "neither a produced log nor a reason"
    assert not produced & set(reasons), "a log of it was produced after all"
    assert not set(reasons) - known, "no such diagnosis"
    assert not set(NOT_IN_A_LOG) & set(NOT_ON_A_CPU)


def test_what_a_cpu_cannot_show_has_a_written_log():
    shown = {identifier for case in test_written.LOGS for identifier in (case.primary, *case.also)}
    assert not set(NOT_ON_A_CPU) - shown
