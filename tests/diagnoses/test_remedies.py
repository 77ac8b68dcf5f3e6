"""Fixes for a non-finite value follow from its cause and from the precision of the run."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses.remedies import first_bad_evidence, fixes
from dsdoctor.finding import FirstBad
from dsdoctor.numerics.examined import Examined, Trial
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


def examined(one, **values):
    """The same case with what running the batch again showed."""
    given, seen = one.runs
    rank = replace(seen.ranks[0], examined=Examined(again="not-finite", **values))
    return replace(one, runs=(given, replace(seen, ranks=(rank,))))


def test_fixes_that_were_tried_tell_their_outcome_and_those_in_vain_are_evidence():
    bf16 = {"fp16": {"enabled": False}, "bf16": {"enabled": True}}
    one = examined(
        case("overflow"),
        in_fp32="finite",
        loss_in_fp32=2.317,
        samples=(3,),
        trials=(
            Trial(remedy="fp32-island", text="keep wo in fp32", outcome="not-finite", why="output is not finite"),
            Trial(remedy="bf16", text="train in bf16", outcome="finite", loss=2.318, config=bf16),
            Trial(remedy="clip", text="clip", outcome="not-tried", why="it acts over steps"),
        ),
    )
    whole, clip = fixes(one)
    assert (whole.text, whole.patch) == ("train in bf16 (tried: finite, loss 2.318)", bf16)
    assert clip.text == "clip (not tried: it acts over steps)"
    told = [evidence.text for evidence in first_bad_evidence(one)]
    assert "the same micro-batch run again: not finite; in fp32: finite, loss 2.317" in told
    assert "of the micro-batch only sample 3 does it" in told
    assert "keep wo in fp32: tried: still not finite; output is not finite" in told


def test_advice_that_nobody_tried_says_so():
    assert all("not tried" in fix.text for fix in fixes(case("overflow")))
    (fix,) = fixes(examined(case("exploded-weights"), why_not="the weights are partitioned"))
    assert "(not tried: the weights are partitioned)" in fix.text
