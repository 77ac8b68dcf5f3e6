"""Scripts that give DeepSpeed nothing to do."""

import pytest

from dsdoctor.case import Case
from dsdoctor.runs.facts import Failure, RankRun, Run
from tests.diagnoses.examples import found


def case(outcome, *, leg="probe", **rank):
    ranks = tuple(RankRun(rank=number, **rank) for number in range(2))
    run = Run(
        leg=leg,
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome,
        ranks=ranks,
        seconds=2.0,
        folder="",
        world_size=2,
    )
    return Case(runs=(run,))


RAISED = Failure(rank=0, type="KeyError", message="'x'")
POSITIVE = {
    "script/no-engine": [case("finished", completed=True, exit_code=0)],
    "script/exited": [case("exited", exit_code=2), case("exited", leg="with-deepspeed", exit_code=3)],
}
NEGATIVE = {
    "script/no-engine": [
        case("finished", completed=True, called_engine=True),
        case("raised", failure=RAISED),
        case("exited", exit_code=2),
        Case(),
    ],
    "script/exited": [case("raised", failure=RAISED), case("finished", completed=True, exit_code=0), Case()],
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
