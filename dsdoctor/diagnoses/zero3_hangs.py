"""Ranks that wait for each other for ever under ZeRO-3, because they do not run the same modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses import before_run_model, context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.explained import holds
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, Form, TextDiagnosis
from dsdoctor.diagnoses.peers import is_peer_failure
from dsdoctor.diagnoses.standing import apart_in_engine, standing, where
from dsdoctor.diagnoses.timeouts import gather_timeouts, other_cause
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.runs.facts import Failure

STAGE = "zero_optimization.stage"


class MoeHang(Diagnosis):
    """ZeRO-3 with experts hangs because ranks route tokens to different experts.

    What it is: ZeRO-3 gathers the parameters of a module when it runs. If a rank has no token for an expert, it does
    not run it, and the others wait in the gather for ever.

    What proves it: stage 3, a model with experts, no leaf modules, and a timeout in a gather; before a run the config
    and the model's config.json, as a warning.

    When it could be wrong: any other branch that depends on the data hangs alike.

    What to do: make the whole block of experts a leaf module, so that all its parameters are gathered together: in the
    ds_config `"zero_optimization": {"leaf_module": {"classes": ["MixtralSparseMoeBlock"]}}` (releases that know the
    key), or `deepspeed.utils.set_z3_leaf_modules(model, [MixtralSparseMoeBlock])` before `deepspeed.initialize`.
    """

    id = "zero3/moe-hang"
    severity = "error"
    title = "experts under ZeRO-3 without leaf modules"

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from before_run_model.experts_without_leaves(self, case)
        logs = case.logs
        experts = [event.evidence() for event in logs.of_kind("experts")] if logs is not None else []
        if logs is None or not experts or any(logs.of_kind("leaf-modules")):
            return
        late = [event.evidence() for event in gather_timeouts(case)]
        parted = late or _other_lengths(case) or _parted(case)
        if not parted:
            return
        changed = [event.evidence() for event in logs.of_kind("trace-invalidated")]
        yield self.finding(
            cause="a model with experts under ZeRO-3 and no leaf modules "
            + ("timed out in a gather of parameters" if late else "has its ranks in different gathers of parameters"),
            evidence=(*changed, *parted[:2], *experts[:1])[:MAX_EVIDENCE],
            confidence=0.85,
            fixes=(Fix(text="make the block of experts a leaf module: set_z3_leaf_modules(model, [MoeBlock])"),),
            keys=("zero_optimization.stage", "zero_optimization.leaf_module"),
        )


class BranchHang(TextDiagnosis):
    """Ranks ran different modules under ZeRO-3.

    What it is: every rank must gather the same parameters in the same order. A branch that depends on the data (a
    vision tower for some samples only, early exit) makes ranks disagree, which newer releases notice and
    older ones hang on.

    What proves it: DeepSpeed's message of a disagreement between rank 0 and another one; a run under stage 3 that
    stands still with its ranks in collectives at different places of the same step; or a timeout in a gather there
    after DeepSpeed had said that its trace of the modules was invalidated.

    When it could be wrong: ranks that built different models are meant as well; a network that lost a message would
    look the same, though not at the same step in each run.

    What to do: run the branch on every rank, with a weight of zero where it is not wanted (feed the tower a dummy image
    and multiply its output by 0), or declare the module that holds the branch a leaf
    (`deepspeed.utils.set_z3_leaf_modules`). Stage 2 has no such condition.
    """

    id = "zero3/branch-hang"
    severity = "error"
    title = "ranks ran different modules under ZeRO-3"
    forms = (
        Form(message=r"(?i)disagreement (?:on list (?:length|contents) )?between rank0 and rank(?P<other>\d+)"),
        Form(message=r"disagreement error: rank0 has \d+"),
    )
    fixes = (Fix(text="run the branch on every rank, multiplied by zero where it is not wanted"),)
    keys = (STAGE,)

    def tell(self, groups: Mapping[str, str]) -> str:
        other = f"rank {groups['other']}" if groups.get("other", "?") != "?" else "another rank"
        return f"rank 0 and {other} ran or built different modules under ZeRO-3"

    def examine(self, case: Case) -> Iterator[Finding]:
        """The message; or stacks apart; or, in the log of a hang, a timeout in a gather after the order had changed."""
        yield from super().examine(case)
        yield from self._in_stacks(case)
        if holds(case, "zero3/moe-hang"):
            return
        yield from self._in_tracebacks(case)
        late = gather_timeouts(case)
        changed = list(case.logs.of_kind("trace-invalidated")) if case.logs is not None and late else []
        if changed:
            yield self.finding(
                cause="the order of modules changed between steps, then a gather of parameters timed out",
                evidence=tuple(event.evidence() for event in (*changed, *late)[:MAX_EVIDENCE]),
                confidence=0.75,
                caveat="A rank that stopped for another reason looks the same if the order also changes.",
                fixes=self.fixes,
                keys=self.keys,
            )

    def _in_tracebacks(self, case: Case) -> Iterator[Finding]:
        parted = _parted(case)
        if parted:
            yield self.finding(
                cause="ranks gave up waiting at different places of ZeRO-3's code: they ran different modules",
                evidence=tuple(parted[:MAX_EVIDENCE]),
                confidence=0.75,
                fixes=self.fixes,
                keys=self.keys,
            )

    def _in_stacks(self, case: Case) -> Iterator[Finding]:
        """Every rank waits inside the engine, and not at the same place of the model."""
        run = standing(case)
        pair = apart_in_engine(run) if run is not None else None
        if run is None or pair is None or context.stage(case) != 3:
            return
        one, other = pair
        yield self.finding(
            cause=f"rank {one.rank} is in the {one.last_phase} and rank {other.rank} in the {other.last_phase} of step "
            f"{other.last_step}, at different places, and each waits for the other: under ZeRO-3 every rank has to run "
            "the same modules; the script is what to mend",
            evidence=tuple(where(run, rank) for rank in run.ranks),
            confidence=0.85,
            fixes=self.fixes,
            keys=self.keys,
        )


def _parted(case: Case) -> list[Evidence]:
    """Ranks that stood at different places of ZeRO-3's code when the patience of one ended, as their tracebacks show.

    The others may have lost the connection to it by then. Such a rank may also have come later to the same gather, by
    another function, so of it only counts whether it was at the gathers of weights or at the reduction of gradients.
    """
    if case.logs is None or context.stage(case) != 3 or other_cause(case):
        return []
    waited = [f for f in context.failures(case) if _place(f) and is_peer_failure(f)]
    late = [f for f in waited if "Timed out waiting" in f.message]
    if not late or any(_generates(f) for f in waited):
        return []
    if len({_place(f) for f in late}) > 1:
        return [context.evidence(f) for f in late]
    return [context.evidence(f) for f in waited] if len({_reduces(f) for f in waited}) > 1 else []


def _other_lengths(case: Case) -> list[Evidence]:
    """gloo's message of a length that was not expected, while a rank is inside ZeRO-3's code."""
    raised = list(context.failures(case))
    if context.stage(case) != 3 or not any(_place(failure) for failure in raised):
        return []
    return [context.evidence(failure) for failure in raised if "op.preamble.length" in failure.message]


def _place(failure: Failure) -> str:
    """The innermost function of ZeRO that a traceback goes through; empty if there is none."""
    inside = [f.function for f in failure.frames if re.search(r"deepspeed[/\\]runtime[/\\]zero[/\\]", f.file)]
    return inside[-1] if inside else ""


def _reduces(failure: Failure) -> bool:
    return passes_through(failure.frames, r"zero[/\\]stage3\.py:\w*(?:reduce|scatter)")


def _generates(failure: Failure) -> bool:
    return passes_through(failure.frames, r":generate:|generation[/\\]utils\.py")


DIAGNOSES: tuple[Diagnosis, ...] = (MoeHang(), BranchHang())
