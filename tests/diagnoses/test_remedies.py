"""Fixes for a non-finite value follow from its cause and from the precision of the run."""

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses.remedies import first_bad_evidence, fixes
from dsdoctor.finding import FirstBad
from dsdoctor.runs.facts import EngineFacts, RankRun, Run


def case(cause, *, precision="fp16", module="block.1.wo", op="aten.mm"):
    bad = FirstBad(
        rank=1, step=3, micro_step=0, phase="forward", module=module, tensor="output", kind="inf", op=op, cause=cause
    )
    facts = EngineFacts(framework="deepspeed", config={}, precision=precision, zero_stage=2, optimizer="AdamW")

    def run(leg, rank):
        return Run(
            leg=leg,
            engine="deepspeed",
            precision="as-configured",
            outcome="stopped",
            ranks=(rank,),
            seconds=1.0,
            folder="",
            world_size=1,
            facts=facts,
        )

    return Case(runs=(run("with-deepspeed", RankRun(rank=1)), run("numerics", RankRun(rank=1, first_bad=bad))))


def test_without_the_detector_the_way_to_run_it():
    (fix,) = fixes(Case())
    assert "dsdoctor nan" in fix.text
    assert first_bad_evidence(Case()) == ()


@pytest.mark.parametrize("cause", ["overflow", "cast-overflow"])
def test_a_value_beyond_fp16_is_answered_with_range(cause):
    whole, island = fixes(case(cause))
    assert whole.patch == {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    assert "block.1.wo" in island.text


def test_an_overflow_in_another_precision_is_not_answered_with_bf16():
    assert all(fix.patch is None for fix in fixes(case("overflow", precision="fp32")))


def test_a_bad_operand_is_answered_with_a_guard_that_names_the_operation():
    (fix,) = fixes(case("domain", op="aten.log", precision="bf16"))
    assert "aten.log" in fix.text
    assert "block.1.wo" in fix.text


def test_the_evidence_names_rank_step_module_and_operation():
    (evidence,) = first_bad_evidence(case("overflow"))
    assert (evidence.rank, evidence.step) == (1, 3)
    assert "block.1.wo" in evidence.text
    assert "aten.mm" in evidence.text
