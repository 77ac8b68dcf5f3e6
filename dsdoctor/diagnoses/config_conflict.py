"""Options of the ds_config that exclude each other, or that need another one."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import (
    before_run,
    before_run_model,
    config_conflict_experts,
    config_conflict_other,
    config_conflict_parallel,
    config_conflict_precision,
    config_conflict_zero,
)
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_conflict_entry import Conflict
from dsdoctor.diagnoses.config_evidence import RESOLVERS, at_key, matching, raised
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.release import in_range
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.facts import ScriptFacts

_ZERO = "zero_optimization"
CONFLICTS: tuple[Conflict, ...] = (
    *config_conflict_precision.CONFLICTS,
    *config_conflict_zero.CONFLICTS,
    *config_conflict_parallel.CONFLICTS,
    *config_conflict_experts.CONFLICTS,
    *config_conflict_other.CONFLICTS,
)


class ConfigConflict(Diagnosis):
    """Options of the ds_config that exclude each other, or that need another one.

    fp16 with bf16; 16-bit master weights without CPU offload; prescaled gradients with ZeRO; an old key beside its
    successor; a reduction in fp16 under a bf16 or fp32 run, which is a risk rather than an error, since only gradients
    beyond 65504 become inf in the reduction; and others, each with the keys and the change that ends it.

    What proves it: the config alone, by the checks that DeepSpeed's own code makes for the release; or its exception.

    When it could be wrong: where the script passes an optimizer or a model-parallel unit of its own, DeepSpeed may not
    come to the check. Checks that are younger than the release it is judged for are left out.

    What to do: keep one of the two.
    """

    id = "config/conflict"
    severity = "error"
    title = "options that exclude each other"

    def examine(self, case: Case) -> Iterator[Finding]:
        before = before_run.only_files(case) is not None  # a run or a log tells more than the script's text
        script, model = (case.script, case.model) if before else (None, None)
        for conflict in CONFLICTS:
            seen = tuple(raised(f) for f, _ in matching(case, conflict.message)) if conflict.message else ()
            lint = case.config is not None and _holds(conflict, case.config, script, model)
            if seen or lint:
                yield self._conflict(conflict, case.config, seen, lint)
        config = case.config
        if config is not None and config.data and config.framework in RESOLVERS and not config.has(_ZERO):
            yield self._no_zero_section(config)
        yield from before_run_model.untied_in_pipeline(self, case)
        yield from before_run_model.missing_monitors(self, case)

    def _conflict(
        self, conflict: Conflict, config: ConfigFacts | None, seen: tuple[Evidence, ...], lint: bool
    ) -> Finding:
        given = tuple(key for key in conflict.keys if config is not None and config.has(key))
        shown = tuple(at_key(config, key) for key in given or conflict.keys[:1] if config is not None and lint)
        return self.finding(
            severity="error" if seen else conflict.severity,
            cause=conflict.cause,
            evidence=(*seen, *shown),
            confidence=0.98 if seen else 0.9 if conflict.severity == "error" else 0.6,
            caveat=None if seen else conflict.caveat,
            fixes=(Fix(text=conflict.fix, patch=conflict.patch),),
            keys=given or conflict.keys,
        )

    def _no_zero_section(self, config: ConfigFacts) -> Finding:
        return self.finding(
            title="no zero_optimization section",
            cause="Accelerate, which Transformers' Trainer uses too, refuses a ds_config without zero_optimization",
            evidence=(at_key(config, _ZERO, f"keys: {', '.join(config.data)}"),),
            confidence=0.9,
            fixes=(
                Fix(
                    text="write the section, with stage 0 if ZeRO is not wanted", patch={_ZERO: {"stage": 0}}, safe=True
                ),
            ),
            keys=(_ZERO,),
        )


def _holds(conflict: Conflict, config: ConfigFacts, script: ScriptFacts | None, model: ModelConfig | None) -> bool:
    release = config.release or config.table_release
    ranged = conflict.since is None and conflict.until is None
    if not config.data or not (ranged or in_range(release, conflict.since, conflict.until)):
        return False
    effective = Effective.of(config)
    if conflict.script is not None and (script is None or not conflict.script(script)):
        return False
    if conflict.ranks is not None and (config.world_size is None or not conflict.ranks(effective, config.world_size)):
        return False
    if conflict.model is not None and (model is None or not conflict.model(effective, model)):
        return False
    return conflict.holds(effective)


DIAGNOSES: tuple[Diagnosis, ...] = (ConfigConflict(),)
