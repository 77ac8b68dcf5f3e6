"""Who stopped a job: somebody outside, or the scheduler because a process had failed."""

import pytest

from tests.diagnoses.examples import found
from tests.diagnoses.making import USER, event, failure, log, process_exit

STEP = event("cancelled", "slurmstepd: error: *** STEP 884211.0 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 ***", line=60,
             order=60)  # fmt: skip
LIMIT = event(
    "cancelled", "*** JOB 7 ON gpu07 CANCELLED AT 2024-05-11T10:20:12 DUE TO TIME LIMIT ***", line=60, order=60
)
OWN = failure("KeyError", "'x'", USER)

STOPPED = [
    log(STEP),
    log(LIMIT),
    log(LIMIT, exits=(process_exit(1, line=50),)),  # the limit is a reason of its own
    log(STEP, exits=(process_exit(1, line=70),)),  # the process ended because it was cancelled
    log(exits=(process_exit(-15), process_exit(-15, rank=1))),
    log(exits=(process_exit(143),)),
]
FAILED = [
    log(STEP, exits=(process_exit(1, rank=3, line=50),)),
    log(STEP, exits=(process_exit(-11, rank=3, line=50),)),
    log(STEP, event("oom-kill", order=50)),
    log(exits=(process_exit(-15), process_exit(1, rank=1))),
    log(exits=(process_exit(-15),), failures=(OWN,)),
    log(event("closing-signal"), exits=(process_exit(-15),)),
]


@pytest.mark.parametrize("case", STOPPED)
def test_stopped_from_outside(case):
    assert found(case, "launch/cancelled")[0].role == "root"


@pytest.mark.parametrize("case", FAILED)
def test_the_answer_to_a_process_that_failed(case):
    assert not found(case, "launch/cancelled")
