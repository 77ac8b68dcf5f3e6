"""How processes were started and ended, and the exception of the first of them."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogFacts
from dsdoctor.runs.facts import Failure, MemorySample
from tests.diagnoses.examples import found
from tests.diagnoses.making import (
    BACKWARD,
    ENGINE,
    INITIALIZE,
    TORCH,
    USER,
    event,
    failed,
    failure,
    healthy,
    log,
    log_failure,
    process_exit,
    run,
)

GIB = 2**30
PLENTY = (MemorySample(seconds=1.0, ranks_bytes=4 * GIB, available_bytes=60 * GIB),)
SCARCE = (MemorySample(seconds=1.0, ranks_bytes=60 * GIB, available_bytes=1 * GIB),)
LOST = failure(
    "RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4504", TORCH, rank=0
)
KEY = failure("KeyError", "'label'", USER, rank=1)


def killed(code, **values):
    return Case(runs=(run(LOST, exits=((1, code),), outcome="killed", **values),))


POSITIVE = {
    "launch/user-exception": [
        failed("KeyError", "'label'", USER),
        Case(runs=(run(LOST, KEY),)),
        log_failure("ValueError", "sample 48113: 2047 labels for 2048 tokens", TORCH, USER),
        log(exits=(process_exit(1, rank=0),)),
    ],
    "launch/peer-failure": [
        Case(runs=(run(LOST, KEY),)),
        Case(runs=(run(KEY, exits=((0, -15), (1, 1))),)),
        log(event("closing-signal"), exits=(process_exit(-9, rank=1),)),
    ],
    "launch/killed": [killed(-9, memory=PLENTY), killed(137, memory=PLENTY)],
    "launch/segfault": [killed(-11), log(exits=(process_exit(-11, rank=2),)), log(exits=(process_exit(245),))],
    "launch/launcher-missing": [
        failed("ModuleNotFoundError", "No module named 'mpi4py'", USER, INITIALIZE),
        log_failure("ValueError", "Error initializing torch.distributed using env:// rendezvous: "
                    "environment variable RANK expected, but not set", USER),
        failed("KeyError", "'LOCAL_RANK'", USER),
    ],
    "launch/local-rank-mismatch": [
        failed("AssertionError", "Mismatch in local rank setting, args.local_rank=0", INITIALIZE),
        log(event("local-rank-refused"), exits=(process_exit(2),)),
    ],
    "launch/sighup": [log(event("sighup")), log_failure("SignalException", "Process 7740 got signal: 1")],
    "launch/cancelled": [log(event("cancelled")), log_failure("SignalException", "Process 7740 got signal: 15")],
    "launch/ssh-or-hostfile": [
        log_failure("RuntimeError", "Using hostfile at h but host=n1 was not reachable via ssh."),
        log_failure("ValueError", "Hostfile hosts.txt is not formatted correctly, unable to proceed with training."),
        log_failure("ValueError", "Hostfile contains a bad entry: worker-0:4, unable to proceed with launching"),
        log_failure("ValueError", "Hostname 'worker-7' not found in hostfile"),
        log_failure("RuntimeError", "launcher 'pdsh' not installed."),
        log(event("ssh-failed")),
    ],
}  # fmt: skip
NEGATIVE = {
    "launch/user-exception": [
        healthy(),
        Case(runs=(run(LOST),)),
        failed("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", USER, BACKWARD),
        failed("AssertionError", "Check batch related parameters. train_batch_size is not equal to "
               "micro_batch_per_gpu * gradient_acc_step * world_size 50 != 4 * 3 * 2", INITIALIZE),
        Case(runs=(run(), run(KEY, leg="without-deepspeed"))),
        Case(runs=(run(exits=((1, 3),), outcome="exited"),)),
        log(event("local-rank-refused"), exits=(process_exit(2),)),
        log(exits=(process_exit(1, rank=0), process_exit(-9, rank=1))),
    ],
    "launch/peer-failure": [failed("KeyError", "'label'", USER), healthy(), log(event("peer-lost")),
        log_failure("BrokenPipeError", "[Errno 32] Broken pipe", TORCH)],
    "launch/killed": [
        killed(-9, memory=PLENTY, oom_kills=1),
        killed(-9, memory=SCARCE),
        Case(runs=(run(KEY, exits=((0, -9), (1, 1)), memory=PLENTY),)),
        log(exits=(process_exit(-9),)),
    ],
    "launch/segfault": [killed(-9), Case(runs=(run(KEY, exits=((0, -11), (1, 1))),)), healthy()],
    "launch/launcher-missing": [failed("ModuleNotFoundError", "No module named 'datasets'", USER), healthy()],
    "launch/local-rank-mismatch": [failed("ValueError", "local rank", USER), log()],
    "launch/sighup": [log(event("cancelled")), log_failure("SignalException", "Process 7740 got signal: 15")],
    "launch/cancelled": [
        log_failure("SignalException", "Process 7740 got signal: 1"),
        Case(logs=LogFacts(failures=(
            Failure(rank=0, type="KeyError", message="'x'", source="a", line=3, frames=(USER,)),
            Failure(rank=None, type="KeyboardInterrupt", message="", source="a", line=9),
        ))),
    ],
    "launch/ssh-or-hostfile": [failed("RuntimeError", "no host given", USER), log()],
}  # fmt: skip


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert len(found(case, identifier)) == 1


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_the_first_rank_that_raised_itself_is_named_with_its_line():
    (finding,) = found(Case(runs=(run(LOST, KEY),)), "launch/user-exception")
    assert "rank 1 raised KeyError: 'label' at /home/u/train.py:72 in main" in finding.cause
    assert finding.evidence[0] == Evidence(source="with-deepspeed", rank=1, text="KeyError: 'label'")


def test_the_root_stands_before_its_consequences():
    first = diagnose(Case(runs=(run(LOST, KEY),)), strict=True).findings[0]
    assert first.id == "launch/user-exception"


def test_an_exception_that_passes_through_the_engine_is_still_the_users():
    (finding,) = found(failed("ValueError", "bad", USER, ENGINE, USER), "launch/user-exception")
    assert "train.py:72" in finding.cause


def test_a_local_rank_that_no_launcher_passed_is_told_as_the_default_that_it_is():
    text = "Mismatch in local rank setting, args.local_rank=0 but env['LOCAL_RANK']=1."
    (finding,) = found(failed("AssertionError", text, INITIALIZE), "launch/local-rank-mismatch")
    assert "LOCAL_RANK is 1" in finding.cause
    assert "default" in finding.cause


def test_a_rank_that_torchrun_killed_was_not_killed_for_memory():
    def printed(code, rank, text, line):
        return replace(process_exit(code, rank=rank), evidence=Evidence(source="train.log", line=line, text=text))

    listed = printed(-9, 1, "  exitcode  : -9 (pid: 7)  (SIGKILL)", 60)
    assert not found(log(exits=(printed(-6, 0, "failed (exitcode: -6)", 50), listed)), "memory/host-oom-kill")
    assert found(log(exits=(printed(1, 0, "failed (exitcode: 1)", 50), listed)), "memory/host-oom-kill")
