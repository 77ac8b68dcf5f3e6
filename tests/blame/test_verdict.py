"""The rows of the verdict, in their order of precedence, from hand-made cases."""

import math
from dataclasses import replace

from dsdoctor.blame.facts import Bisection, Rate, Trial
from dsdoctor.blame.verdict import decide
from dsdoctor.case import Case
from dsdoctor.finding import Evidence, Finding, FirstBad
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, RankRun, Run, Step

NAN = math.nan
FINE = (Step(index=0, losses=(1.0,)), Step(index=1, losses=(0.9,)))
BAD = (Step(index=0, losses=(1.0,)), Step(index=1, losses=(NAN,)))


def leg(name, steps=FINE, *, outcome="stopped", precision="bf16", failure=None, **values):
    facts = EngineFacts(framework="deepspeed", config={}, precision=precision, zero_stage=2, optimizer="AdamW")
    values.setdefault("engine", "deepspeed")
    ranks = tuple(
        RankRun(
            rank=r,
            steps=steps,
            called_engine=True,
            completed=outcome == "stopped",
            failure=failure if r == 1 else None,
        )
        for r in range(2)
    )
    return Run(
        leg=name,
        precision="as-configured",
        outcome=outcome,
        ranks=ranks,
        seconds=1.0,
        folder="",
        world_size=2,
        facts=facts,
        **values,
    )


def finding(identifier, *, severity="error", role="root", keys=()):
    return Finding(
        id=identifier,
        severity=severity,
        role=role,
        confidence=0.9,
        title="t",
        cause="the cause",
        evidence=(),
        keys=keys,
    )


def blame(*runs, findings=(), bisection=None):
    return decide(Case(runs=runs, bisection=bisection), findings)


def proof(*keys, verified=True):
    return Bisection(keys=keys, patch={"changed": None}, verified=verified, minimal=True)


def raised(name, kind="KeyError", message="'unknown'"):
    failure = Failure(rank=1, type=kind, message=message, time=1.0)
    return leg(name, outcome="raised", failure=failure)


RAISED = (raised("with-deepspeed"), raised("without-deepspeed"))
EARLY = tuple(replace(run, ranks=tuple(replace(rank, steps=()) for rank in run.ranks)) for run in RAISED)
"""The same before the first step."""


def test_healthy_needs_steps_and_no_error():
    assert blame(leg("with-deepspeed"), leg("without-deepspeed")).blame == "healthy"
    assert blame(leg("with-deepspeed", steps=())).blame == "inconclusive"


def test_a_warning_does_not_make_a_healthy_run_sick():
    warning = finding("config/ineffective", severity="warning")
    assert blame(leg("with-deepspeed"), leg("without-deepspeed"), findings=[warning]).blame == "healthy"


def test_precision_fails_low_with_and_without_and_passes_in_fp32():
    runs = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), leg("control-fp32"))
    assert blame(*runs).blame == "precision"


def test_without_the_control_precision_is_not_claimed():
    runs = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD))
    assert blame(*runs).blame == "inconclusive"


def test_the_script_fails_in_fp32_too():
    runs = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), leg("control-fp32", BAD))
    assert blame(*runs).blame == "script"


def test_a_configured_fp32_needs_no_control():
    runs = (leg("with-deepspeed", BAD, precision="fp32"), leg("without-deepspeed", BAD, precision="fp32"))
    assert blame(*runs).blame == "script"


def test_the_same_exception_with_and_without_is_the_scripts():
    assert blame(raised("with-deepspeed"), raised("without-deepspeed")).blame == "script"


def test_which_of_the_ranks_is_the_first_to_raise_is_chance():
    failure = Failure(rank=0, type="KeyError", message="'unknown'", time=0.5)
    plain = raised("without-deepspeed")
    plain = replace(plain, ranks=(replace(plain.ranks[0], failure=failure), plain.ranks[1]))
    assert blame(raised("with-deepspeed"), plain).blame == "script"


def test_the_same_line_of_the_script_at_the_same_step_is_the_same_failure():
    def at(line):
        frames = (Frame(file="/home/u/train.py", line=line, function="main", text="engine.backward(loss)"),)
        deepspeed = Failure(rank=1, type="AssertionError", message="loss must be a scalar", frames=frames, step=0)
        frames = (replace(frames[0], line=12),)
        torch = Failure(rank=1, type="RuntimeError", message="grad can be created", frames=frames, step=0)
        runs = [leg(name, outcome="raised", failure=failure)
                for name, failure in (("with-deepspeed", deepspeed), ("without-deepspeed", torch))]  # fmt: skip
        return blame(*runs).blame

    assert (at(12), at(13)) == ("script", "inconclusive")


def test_a_run_that_only_ran_out_of_time_proves_nothing():
    slow, plain = leg("with-deepspeed", outcome="timeout"), leg("without-deepspeed", outcome="timeout")
    verdict = blame(slow, plain)
    assert verdict.blame == blame(slow, leg("without-deepspeed")).blame == "inconclusive"
    assert "--timeout" in verdict.summary
    assert blame(slow, plain, findings=[finding("hang/uneven-batches")]).blame == "script"


def test_a_script_that_starts_ranks_of_its_own_was_not_run_as_the_user_does():
    runs = leg("with-deepspeed", outcome="hung"), leg("without-deepspeed", outcome="hung")
    verdict = blame(*runs, findings=[finding("launch/own-ranks")])
    assert verdict.blame == "inconclusive"
    assert blame(*runs, findings=[finding("hang/stalled-rank")]).blame == "script"


def test_exceptions_for_lost_peers_are_not_what_two_runs_have_in_common():
    lost = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
    peer = Failure(rank=0, type="RuntimeError", message=lost, time=2.0)
    runs = [raised("with-deepspeed"), raised("without-deepspeed", kind="AttributeError")]
    runs = [replace(run, ranks=(replace(run.ranks[0], failure=peer), run.ranks[1])) for run in runs]
    assert blame(*runs).blame == "inconclusive"


def test_a_local_rank_that_the_script_gets_wrong_is_the_scripts_although_the_plain_run_passes():
    found = [finding("launch/local-rank-mismatch")]
    assert blame(raised("with-deepspeed"), leg("without-deepspeed"), findings=found).blame == "script"


def test_a_backward_around_the_engine_that_stage_0_refuses_is_the_configs():
    found = [finding("autograd/direct-backward", keys=("zero_optimization.stage",))]
    verdict = blame(raised("with-deepspeed"), leg("without-deepspeed"), findings=found)
    assert (verdict.blame, verdict.culprit) == ("config", ("zero_optimization.stage",))


def test_a_proof_comes_before_the_error_that_follows_from_the_key():
    lint = finding("config/conflict", keys=("zero_optimization.stage",))
    verdict = blame(raised("with-deepspeed"), findings=[lint], bisection=proof("optimzer"))
    assert (verdict.blame, verdict.culprit) == ("config", ("optimzer",))


def test_another_exception_without_proves_nothing():
    runs = (raised("with-deepspeed"), raised("without-deepspeed", kind="AttributeError"))
    assert blame(*runs).blame == "inconclusive"


def test_deepspeed_fails_alone():
    assert blame(leg("with-deepspeed", BAD), leg("without-deepspeed")).blame == "deepspeed"


def test_config_proved_by_lint_names_the_keys():
    lint = finding("config/batch-size", keys=("train_batch_size",))
    verdict = blame(raised("with-deepspeed", kind="AssertionError"), findings=[lint])
    assert (verdict.blame, verdict.culprit) == ("config", ("train_batch_size",))


def test_config_proved_by_a_run_that_passes_once_the_key_is_changed():
    proved = proof("communication_data_type")
    verdict = blame(leg("with-deepspeed", BAD), leg("without-deepspeed"), bisection=proved)
    assert (verdict.blame, verdict.culprit) == ("config", ("communication_data_type",))


def test_a_change_that_passed_once_and_failed_once_proves_nothing():
    doubtful = proof("communication_data_type", verified=False)
    assert blame(leg("with-deepspeed", BAD), leg("without-deepspeed"), bisection=doubtful).blame == "deepspeed"


def test_a_search_that_found_nothing_makes_deepspeed_the_surer():
    legs = (leg("with-deepspeed", BAD), leg("without-deepspeed"))
    nothing = Bisection(searched=True, trials=(Trial(changed=("zero_optimization.stage",), kind="fails"),))
    alone, tried = blame(*legs), blame(*legs, bisection=nothing)
    assert alone.blame == tried.blame == "deepspeed"
    assert tried.confidence > alone.confidence


def test_a_failure_that_did_not_come_again_blames_nobody():
    legs = (leg("with-deepspeed", BAD), leg("without-deepspeed"))
    chance = Bisection(keys=("k",), searched=True, given=Rate(failed=1, runs=3))
    verdict = blame(*legs, bisection=chance)
    assert verdict.blame == "inconclusive"
    assert "1 of 3 runs" in verdict.summary


def test_an_error_inside_deepspeed_that_a_key_avoids_is_deepspeeds_and_names_the_key():
    inside = [finding("deepspeed/internal-error")]
    legs = (raised("with-deepspeed", kind="RuntimeError"), leg("without-deepspeed"))
    verdict = blame(*legs, findings=inside, bisection=proof("zero_optimization.stage"))
    assert (verdict.blame, verdict.culprit) == ("deepspeed", ("zero_optimization.stage",))


def test_a_refusal_with_a_message_is_an_answer_to_the_key_that_avoids_it():
    inside = [finding("deepspeed/internal-error")]
    legs = (raised("with-deepspeed", kind="ValueError", message="buffer_count must be"), leg("without-deepspeed"))
    verdict = blame(*legs, findings=inside, bisection=proof("zero_optimization.offload_optimizer"))
    assert (verdict.blame, verdict.culprit) == ("config", ("zero_optimization.offload_optimizer",))


AWAY = tuple(Step(index=i, losses=(1.0 if i < 2 else 0.5,)) for i in range(8))
STEADY = tuple(Step(index=i, losses=(1.0,)) for i in range(8))


def test_losses_that_move_away_from_a_steady_control_are_a_failure():
    legs = (leg("with-deepspeed", AWAY), leg("without-deepspeed", STEADY), leg("repeat", STEADY))
    verdict = blame(*legs)
    assert verdict.blame == "deepspeed"
    assert "from step 2 on" in verdict.summary
    assert blame(*legs[:2]).blame == "healthy"  # without the repetition it could be the script's own disorder
    named = blame(*legs, bisection=proof("zero_optimization.overlap_comm"))
    assert (named.blame, named.culprit) == ("config", ("zero_optimization.overlap_comm",))


def test_losses_of_a_script_that_does_not_repeat_its_own_prove_nothing():
    verdict = blame(leg("with-deepspeed", STEADY), leg("without-deepspeed", AWAY), leg("repeat", STEADY))
    assert (verdict.blame, verdict.confidence < 0.9) == ("healthy", True)
    verdict = blame(leg("with-deepspeed", BAD), leg("without-deepspeed", AWAY), leg("repeat", STEADY))
    assert verdict.blame == "inconclusive"
    assert "--seed" in verdict.summary


def test_a_model_that_does_not_fit_without_zero_is_no_fault_of_deepspeed():
    plain = raised("without-deepspeed", kind="torch.OutOfMemoryError", message="CUDA out of memory.")
    verdict = blame(leg("with-deepspeed", BAD), plain)
    assert verdict.blame == "inconclusive"
    assert "--shrink" in verdict.summary
    assert blame(leg("with-deepspeed"), plain).blame == "healthy"


def test_the_environment_comes_before_the_config():
    found = [finding("launch/port-in-use"), finding("config/batch-size", keys=("train_batch_size",))]
    assert blame(raised("with-deepspeed"), findings=found).blame == "environment"


def test_ranks_that_call_different_collectives_are_no_fault_of_the_network():
    found = [finding("comm/collective-mismatch")]
    runs = (leg("with-deepspeed", outcome="hung"), leg("without-deepspeed", outcome="hung"))
    assert blame(*runs, findings=found).blame == "script"
    assert blame(*runs, findings=[finding("comm/unreachable")]).blame == "environment"


def test_a_prediction_about_the_machine_yields_to_what_the_run_raised_for_the_config():
    predicted = replace(finding("build/compiler"), evidence=(Evidence(source="environment", text="no libaio"),))
    found = [predicted, finding("config/ineffective", keys=("zero_optimization.offload_param.nvme_path",))]
    assert blame(raised("with-deepspeed", kind="AssertionError"), findings=found).blame == "config"
    assert blame(leg("with-deepspeed", outcome="killed"), findings=found).blame == "environment"
    assert blame(raised("with-deepspeed"), findings=[predicted]).blame == "environment"


def test_a_prediction_about_the_machine_does_not_explain_what_it_did_not_foresee():
    predicted = replace(finding("memory/will-not-fit"), evidence=(Evidence(source="memory", text="30 GiB of 22"),))
    bad = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), leg("control-fp32", BAD))
    assert blame(*bad, findings=[predicted]).blame == "script"
    assert blame(raised("with-deepspeed"), raised("without-deepspeed"), findings=[predicted]).blame == "script"
    assert blame(*EARLY, findings=[predicted]).blame == "script"
    assert blame(*EARLY, findings=[replace(predicted, id="version/incompatible")]).blame == "environment"
    short = {"kind": "torch.OutOfMemoryError", "message": "CUDA out of memory."}
    runs = (raised("with-deepspeed", **short), raised("without-deepspeed", **short))
    assert blame(*runs, findings=[predicted]).blame == "environment"


def test_a_run_that_passed_refutes_an_estimate_of_the_environment():
    verdict = blame(leg("with-deepspeed"), findings=[finding("memory/will-not-fit")])
    assert verdict.blame == "inconclusive"


def test_a_known_defect_comes_before_the_config():
    found = [finding("config/conflict"), finding("version/known-defect", keys=("zero_optimization.stage",))]
    verdict = blame(leg("with-deepspeed", BAD), findings=found)
    assert (verdict.blame, verdict.culprit) == ("deepspeed", ("zero_optimization.stage",))


def test_a_key_does_not_explain_what_the_script_raises_in_training():
    """An unknown key is harmless to most scripts; a KeyError in the third batch is the script's with or without it."""
    found = [finding("config/unknown-key", keys=("gradient_cliping",))]
    assert blame(*RAISED, findings=found).blame == "script"
    assert blame(leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), findings=found).blame == "config"
    assert blame(*EARLY, findings=found).blame == "config"
    seen = replace(found[0], id="config/refused-value", evidence=(Evidence(source="with-deepspeed", text="betas"),))
    assert blame(*RAISED, findings=[seen]).blame == "config"


def test_a_known_defect_does_not_explain_what_the_run_without_deepspeed_does_too():
    """fp16 without ZeRO is hurt in every step, but a script that takes the log of 0 is the script's all the same."""
    found = [finding("version/known-defect"), finding("numerics/nan-loss")]
    legs = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD))
    assert blame(*legs, leg("control-fp32", BAD), findings=found).blame == "script"
    assert blame(raised("with-deepspeed"), raised("without-deepspeed"), findings=found).blame == "script"
    assert blame(legs[0], leg("without-deepspeed"), findings=found).blame == "deepspeed"


def test_a_consequence_is_never_the_reason():
    consequence = finding("launch/port-in-use", role="consequence")
    assert blame(raised("with-deepspeed"), raised("without-deepspeed"), findings=[consequence]).blame == "script"


def test_a_script_that_the_plain_engine_cannot_play_leaves_the_question_open():
    runs = (leg("with-deepspeed", BAD), raised("without-deepspeed", kind="dsdoctor.runs.plain.NotPlayed"))
    assert blame(*runs).blame == "inconclusive"


def test_the_first_bad_value_is_the_earliest_over_the_ranks():
    def bad(rank, step, phase):
        return FirstBad(rank=rank, step=step, micro_step=0, phase=phase, module="m", tensor="output", kind="nan")

    ranks = (
        RankRun(rank=0, first_bad=bad(0, 4, "backward")),
        RankRun(rank=1, first_bad=bad(1, 4, "forward")),
    )
    numerics = Run(
        leg="numerics",
        engine="deepspeed",
        precision="as-configured",
        outcome="stopped",
        ranks=ranks,
        seconds=1.0,
        folder="",
        world_size=2,
    )
    runs = (leg("with-deepspeed", BAD), leg("without-deepspeed", BAD), leg("control-fp32"), numerics)
    verdict = blame(*runs)
    assert verdict.first_bad is not None
    assert verdict.first_bad.rank == 1
