"""The batch triangle of the ds_config against the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import RESOLVERS, at_key, matching, raised
from dsdoctor.dsconfig import batch, elastic, parallel
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.finding import Evidence, Finding, Fix

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_PRODUCT = (
    r"train_batch_size is not equal\s*to micro_batch_per_gpu \* gradient_acc_step \* world_size\s*"
    rf"{_NUMBER} != {_NUMBER} \* {_NUMBER} \* {_NUMBER}"
)
_OTHERS = (
    r"(?:Train batch size|Micro batch size per gpu|Gradient accumulation steps): -?[\d.]+ has to be greater than 0"
    r"|Either train_batch_size or (?:train_)?micro_batch(?:_size)?_per_gpu needs to be provided"
)
_GIVE_MICRO = Fix(text=f"give {batch.MICRO}, and leave {batch.TRAIN} to DeepSpeed")
_HF_NAMES = {batch.MICRO: "per_device_train_batch_size", batch.STEPS: "gradient_accumulation_steps"}


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The three sizes as given, None where they are not, for a number of data-parallel ranks."""

    train: float | None
    micro: float | None
    steps: float | None
    ranks: int

    def triples(self) -> tuple[batch.BatchTriple, ...]:
        return batch.nearest_triples(self.train, self.micro, self.steps, self.ranks)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """What is wrong with the sizes, the keys that it shows in, and what ends it. `world` says for how many ranks."""

    cause: str
    keys: tuple[str, ...]
    fixes: tuple[Fix, ...]
    caveat: str | None = None
    world: str | None = None


class BatchSize(Diagnosis):
    """train_batch_size is not train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks.

    What proves it: the three values of the config with the number of ranks, by the arithmetic that DeepSpeed itself
    does (a missing value is worked out by whole division), or the assertion that DeepSpeed raises, with its numbers.
    With an `elasticity` section (up to 0.19.7) the batch size and the allowed numbers of ranks come from that.

    When it could be wrong: the number of ranks. Where the assertion ends in `* 1` although the job has several, the
    config was read before the process group was up, or the script was started without a launcher. A model-parallel unit
    that the script passes makes the data-parallel number smaller than the world, which a config does not show; pipeline
    stages are seen only where the script writes their number into its call of PipelineModule.

    What to do: leave one of the three out, and DeepSpeed works it out; or take one of the triples that are offered.
    """

    id = "config/batch-size"
    severity = "error"
    title = "the batch sizes do not multiply up"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = list(matching(case, _PRODUCT))
        if exceptions:
            failure, match = exceptions[0]
            train, micro, steps, ranks = (int(float(number)) for number in match.groups())
            given = _Given(train=train, micro=micro, steps=steps, ranks=max(ranks, 1))
            problem = _product(f"{train} is not {micro} x {steps} x {ranks}", given, config)
            yield self._finding(config, problem, (raised(failure),), confidence=1.0)
            return
        others = tuple(raised(failure) for failure, _ in matching(case, _OTHERS))
        if config is not None and _is_elastic(config):
            yield from self._elastic(config)
            return
        found = _lint(config, _stages(case)) if config is not None else None
        if found is not None:
            yield self._finding(config, found, others, confidence=1.0 if others else 0.95)
        elif others:
            yield self.finding(
                cause=others[0].text.partition(": ")[2],
                evidence=others,
                confidence=0.95,
                fixes=(_GIVE_MICRO,),
                keys=batch.KEYS,
            )

    def _elastic(self, config: ConfigFacts) -> Iterator[Finding]:
        """What elastic training, which takes the batch sizes over, refuses."""
        ranks = config.world_size
        try:
            planned = elastic.plan(config.value("elasticity"), ranks or 1)
        except elastic.NotElastic as error:
            yield self.finding(
                title="the elasticity section cannot be used",
                cause=f"elasticity: {error}",
                evidence=(at_key(config, "elasticity"),),
                confidence=0.95,
                fixes=(Fix(text="mend the section, or switch it off", patch={"elasticity": {"enabled": False}}),),
                keys=("elasticity",),
            )
            return
        if ranks is not None and planned.micro is None:
            counts = ", ".join(map(str, planned.counts[:12])) + (", ..." if len(planned.counts) > 12 else "")
            yield self.finding(
                title="elastic training does not allow this number of ranks",
                cause=f"with {planned.train} samples a step elastic training runs on {counts} ranks, not on {ranks}",
                evidence=(at_key(config, "elasticity"), Evidence(source="world", text=f"{ranks} ranks")),
                confidence=0.95,
                fixes=(Fix(text="start one of these numbers of ranks, or give other micro_batch_sizes"),),
                keys=("elasticity",),
            )

    def _finding(
        self, config: ConfigFacts | None, problem: _Problem, exceptions: tuple[Evidence, ...], *, confidence: float
    ) -> Finding:
        written = [key for key in problem.keys if config is not None and config.has(key)] or [batch.MICRO]
        world = (Evidence(source="world", text=problem.world),) if problem.world is not None else ()
        return self.finding(
            cause=problem.cause,
            evidence=(*exceptions, *(at_key(config, key) for key in written if config is not None), *world),
            confidence=confidence,
            caveat=problem.caveat,
            fixes=problem.fixes,
            keys=problem.keys,
        )


def _is_elastic(config: ConfigFacts) -> bool:
    """The release has elastic training, and the config asks for it."""
    known = "elasticity" in schema_for(config.release).sections[""].keys
    return known and elastic.enabled(config.data)


def _stages(case: Case) -> int:
    """The pipeline stages that the script gives as a number; 1 where it gives none."""
    calls = case.script.named("PipelineModule") if case.script is not None else ()
    given = (call.literals.get("num_stages") for call in calls)
    return next((number for number in given if isinstance(number, int) and number > 0), 1)


def _lint(config: ConfigFacts, stages: int) -> _Problem | None:
    """What is wrong with the config for its world size, None where nothing is or nothing can be told."""
    if config.syntax_error is not None or not config.data:
        return None
    below = next((key for key in batch.KEYS if batch.is_too_small(config.value(key))), None)
    if below is not None:
        cause = f"{below} is {config.value(below)}; it has to be more than 0"
        return _Problem(cause=cause, keys=(below,), fixes=(Fix(text=f"drop {below}, or give a whole number above 0"),))
    sizes = _sizes(config)
    if config.world_size is None:
        return _for_any_world(sizes, config) if sizes is not None else None
    grid = parallel.grid(config.data, config.world_size, release=config.release, stages=stages)
    if grid.problem is not None:
        return _Problem(
            cause=grid.problem,
            keys=tuple(key for key in parallel.KEYS if config.has(key)),
            fixes=(Fix(text="start a number of ranks that the sizes divide, or give other sizes"),),
            world=f"{config.world_size} ranks",
        )
    problems = [_for_ranks(sizes, ranks, config) for ranks in grid.ranks] if sizes is not None else [None]
    return None if None in problems else problems[0]


def _for_ranks(sizes: Mapping[str, float | None], ranks: int, config: ConfigFacts) -> _Problem | None:
    given = _Given(train=sizes[batch.TRAIN], micro=sizes[batch.MICRO], steps=sizes[batch.STEPS], ranks=ranks)
    triangle = batch.complete(given.train, given.micro, given.steps, ranks)
    return _product(triangle.problem, given, config) if triangle.problem else None


def _product(cause: str, given: _Given, config: ConfigFacts | None) -> _Problem:
    fixes = tuple(
        Fix(
            text=f"{batch.TRAIN} {t.train} = {t.micro} (micro batch) x {t.steps} (accumulation) x {given.ranks} ranks",
            patch=t.patch(),
        )
        for t in given.triples()[:4]
    )
    return _Problem(
        cause=cause,
        keys=batch.KEYS,
        fixes=fixes or (_GIVE_MICRO,),
        caveat=_caveat(given, config),
        world=f"{given.ranks} data-parallel ranks",
    )


def _sizes(config: ConfigFacts) -> dict[str, float | None] | None:
    """The three sizes as DeepSpeed will see them; None where one of them is not settled before the run.

    A framework fills in what is "auto" or missing; that counts only where its arguments are known.
    """
    sizes: dict[str, float | None] = {}
    for key in batch.KEYS:
        value = config.value(key)
        if config.framework in RESOLVERS or config.framework == "lightning":
            value = _filled_in(config, key, value)
            if value is None:
                return None
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return None
        sizes[key] = int(value) if isinstance(value, float) and value.is_integer() else value
    return sizes


def _filled_in(config: ConfigFacts, key: str, value: Any) -> Any:
    if value in (None, "auto") and config.hf_arguments is not None and key in _HF_NAMES:
        return config.hf_arguments.get(_HF_NAMES[key])
    return None if value == "auto" else value


def _for_any_world(sizes: Mapping[str, float | None], config: ConfigFacts) -> _Problem | None:
    """What no number of ranks can satisfy."""
    train, micro, steps = (sizes[key] for key in batch.KEYS)
    if train is None and micro is None:
        cause = f"neither {batch.TRAIN} nor {batch.MICRO} is given"
        return _Problem(cause=cause, keys=batch.KEYS, fixes=(_GIVE_MICRO,), caveat=_lightning(config))
    unit = (micro or 1) * (steps or 1)
    if train is None or train % unit == 0:
        return None
    left = batch.TRAIN if micro is not None else batch.STEPS
    return _Problem(
        cause=f"{batch.TRAIN} {train} is no multiple of {unit}, whatever the number of ranks",
        keys=batch.KEYS,
        fixes=(Fix(text=f"leave {left} to DeepSpeed, or give sizes that multiply up", patch={left: None}),),
    )


def _caveat(given: _Given, config: ConfigFacts | None) -> str | None:
    world = config.world_size if config is not None else None
    if given.train is None and given.micro is None:
        return _lightning(config)
    if given.ranks == 1 and world is not None and world > 1:
        return (
            f"DeepSpeed saw 1 rank where {world} were started: the config was read before the process group was up, "
            "or the script was not started by a launcher; then the sizes may be right."
        )
    if given.ranks == 1 and world is None:
        return (
            "If the job has more than one rank, the script was not started by a launcher; then the sizes may be right."
        )
    return "A model-parallel unit or pipeline stages that the script passes lower the number of data-parallel ranks."


def _lightning(config: ConfigFacts | None) -> str | None:
    """Who may yet give the sizes that are missing."""
    unknown = config is not None and config.framework is None
    return "Lightning's strategy fills the micro batch in where the config has none." if unknown else None


DIAGNOSES: tuple[Diagnosis, ...] = (BatchSize(),)
