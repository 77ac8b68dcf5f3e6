"""Scripts that give DeepSpeed nothing to do, and scripts that never do the same twice."""

import pytest

from dsdoctor.case import Case
from dsdoctor.runs.facts import Failure, RankRun, Run
from tests.diagnoses.examples import found
from tests.diagnoses.making import NAN, run, steps


def case(outcome, *, leg="probe", **rank):
    ranks = tuple(RankRun(rank=number, **rank) for number in range(2))
    observed = Run(
        leg=leg,
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome,
        ranks=ranks,
        seconds=2.0,
        folder="",
        world_size=2,
    )
    return Case(runs=(observed,))


def twice(first, second):
    """The leg without DeepSpeed, and its repetition."""
    return Case(runs=(run(leg="without-deepspeed", steps=steps(first)), run(leg="repeat", steps=steps(second))))


FALLS = (2.0, 1.9, 1.8, 1.7, 1.6)
OTHERWISE = (2.0, 1.7, 1.3, 1.0, 0.8)
ROUNDED = (2.0, 1.9001, 1.8002, 1.7001, 1.6)
RAISED = Failure(rank=0, type="KeyError", message="'x'")
POSITIVE = {
    "script/no-engine": [case("finished", completed=True, exit_code=0)],
    "script/exited": [case("exited", exit_code=2), case("exited", leg="with-deepspeed", exit_code=3)],
    "script/nondeterministic": [twice(FALLS, OTHERWISE), twice(FALLS, (2.0, 1.9, NAN))],
}
NEGATIVE = {
    "script/no-engine": [
        case("finished", completed=True, called_engine=True),
        case("raised", failure=RAISED),
        case("exited", exit_code=2),
        Case(),
    ],
    "script/exited": [case("raised", failure=RAISED), case("finished", completed=True, exit_code=0), Case()],
    "script/nondeterministic": [
        twice(FALLS, ROUNDED),
        twice((2.0, NAN), (2.0, NAN)),
        Case(runs=(run(steps=steps(FALLS)), run(leg="without-deepspeed", steps=steps(OTHERWISE)))),
        Case(),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert found(case, identifier)


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_exit_code_2_is_explained_as_a_usage_error():
    (finding,) = found(case("exited", exit_code=2), "script/exited")
    assert "argparse" in finding.cause


def test_only_a_code_of_argparse_is_about_arguments():
    (refused,) = found(case("exited", exit_code=2), "script/exited")
    (chosen,) = found(case("exited", exit_code=3), "script/exited")
    assert "after --" in refused.fixes[0].text
    assert "sys.exit" in chosen.fixes[0].text


def test_where_two_runs_move_apart_is_told():
    (finding,) = found(twice(FALLS, OTHERWISE), "script/nondeterministic")
    assert "from step 1 on" in finding.cause
    assert finding.evidence[0].step == 4
    assert "50.0%" in finding.evidence[0].text
