"""Scripts that ask for input, or for a step without gradients."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.runs.facts import Failure, Frame, RankRun
from tests.diagnoses.examples import found
from tests.diagnoses.making import run

SCRIPT = Frame(file="train.py", line=12, function="main", text="engine.step()")
DEEPSPEED = Frame(file="/x/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line=9, function="step")
ASKS = Failure(rank=0, type="EOFError", message="EOF when reading a line", frames=(SCRIPT,))
CUT_OFF = Failure(rank=0, type="EOFError", message="Ran out of input", frames=(SCRIPT,))
NO_GRADIENTS = Failure(rank=0, type="KeyError", message="0", frames=(SCRIPT, DEEPSPEED))


def raised(failure, **values):
    return Case(runs=(replace(run(outcome="raised"), ranks=(RankRun(rank=0, failure=failure, **values),)),))


POSITIVE = {
    "script/reads-input": [raised(ASKS)],
    "script/step-before-backward": [raised(NO_GRADIENTS, misuse=("step-before-backward",))],
}
NEGATIVE = {
    "script/reads-input": [raised(CUT_OFF), Case()],
    "script/step-before-backward": [raised(NO_GRADIENTS), Case()],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert found(case, identifier)
    roots = [finding.id for finding in diagnose(case).findings if finding.role == "root"]
    assert roots == [identifier], "and nothing more general beside it"


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)
