"""Sections of the ds_config that nothing reads here, or that wait for a switch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsdoctor.diagnoses.config_idle import Idle
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Fix
from dsdoctor.scripts.facts import ScriptFacts

_SAMPLING = "data_efficiency.data_sampling.curriculum_learning"
_DROPPING = "data_efficiency.data_routing.random_ltd"
_SWITCHED_TOO = (
    *("amp", "autotuning", "elasticity", "progressive_layer_drop", "eigenvalue", "curriculum_learning"),
    *("expert_parallel", _SAMPLING, _DROPPING),
)
"""Sections with a switch that is off by default, beside those whose keys the schema holds."""
_PIPELINE = (
    *("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned"),
    "use_reentrant",
)
_CHECKPOINTING_CALLS = ("configure", "checkpoint", "CheckpointFunction", "non_reentrant_checkpoint")


def idle(config: ConfigFacts, effective: Effective, script: ScriptFacts | None) -> Iterator[Idle]:
    """All of them."""
    yield from _switch_forgotten(config, effective)
    yield from _unused(config, effective)
    yield from _activations(config, script)
    yield from _profilers(config, effective)
    yield from _pipeline(config, script)
    yield from _only_with_the_api(config, effective, script)


def _switch_forgotten(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    """Settings without the switch that they belong to, which is off by default."""
    for path in _switched(effective):
        section = config.value(path)
        if isinstance(section, Mapping) and section and "enabled" not in section:
            yield Idle(
                keys=(path,),
                why=f'{path} has no "enabled", which is false by default, so that the whole section does nothing',
                fixes=(Fix(text='write "enabled": true in it, or drop the section'),),
            )


def _switched(effective: Effective) -> Iterator[str]:
    schema = effective.schema
    for path, section in schema.sections.items():
        switch = section.keys.get("enabled")
        if switch is not None and switch.kind == "bool" and switch.default is False:
            yield path
    for path in _SWITCHED_TOO:
        top = path.partition(".")[0]
        if path not in schema.sections and schema.key(top) is not None and top not in schema.removed:
            yield path


def _unused(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    nvme = "nvme" in (effective.offload("optimizer"), effective.offload("param"))
    if config.value("aio") and not (nvme and effective.stage == 3):
        yield Idle(keys=("aio",), why="aio is for swapping to NVMe, which this config does not do", severity="info")
    if effective.get("torch_autocast.enabled") is True and effective.precision != "fp32":
        yield Idle(
            keys=("torch_autocast.enabled",),
            why=f"{effective.precision} casts the whole model, so that torch_autocast finds nothing left to cast",
            severity="info",
        )
    if config.has("data_parallel_size") and not config.has("sequence_parallel_size"):
        yield Idle(
            keys=("data_parallel_size",),
            why="data_parallel_size is read together with sequence_parallel_size only",
            severity="info",
        )
    if config.has("gradient_predivide_factor") and effective.get("prescale_gradients") is True:
        yield Idle(
            keys=("gradient_predivide_factor",),
            why="with prescale_gradients the gradients are divided by the number of ranks, not by this factor",
            severity="info",
        )


def _activations(config: ConfigFacts, script: ScriptFacts | None) -> Iterator[Idle]:
    """The section is read by `deepspeed.checkpointing`, which the script has to call."""
    calls = script.named(*_CHECKPOINTING_CALLS) if script is not None else ()
    if config.value("activation_checkpointing") and not any("checkpointing" in call.owner for call in calls):
        yield Idle(
            keys=("activation_checkpointing",),
            why="activation_checkpointing switches nothing on: it is read by deepspeed.checkpointing only",
            severity="info",
        )


def _profilers(config: ConfigFacts, effective: Effective) -> Iterator[Idle]:
    step = effective.get("flops_profiler.profile_step")
    if effective.get("flops_profiler.enabled") is True and isinstance(step, int) and step < 0:
        yield Idle(
            keys=("flops_profiler.profile_step",),
            why=f"the profiler runs in one step alone, and step {step} never comes",
            fixes=(Fix(text="profile the second step", patch=keys.as_patch("flops_profiler.profile_step", 1)),),
        )
    if config.value("comms_logger.prof_ops") and effective.get("comms_logger.prof_all") is True:
        yield Idle(
            keys=("comms_logger.prof_ops",),
            why="prof_all is on (its default), so that prof_ops chooses nothing",
            severity="info",
            fixes=(Fix(text="switch prof_all off", patch=keys.as_patch("comms_logger.prof_all", False)),),
        )
    if effective.get("autotuning.enabled") is True:
        yield Idle(
            keys=("autotuning.enabled",),
            why="autotuning begins only under `deepspeed --autotuning`; a plain start profiles a few steps and ends",
            severity="info",
        )


def _pipeline(config: ConfigFacts, script: ScriptFacts | None) -> Iterator[Idle]:
    section = config.value("pipeline")
    if not isinstance(section, Mapping) or not section:
        return
    unknown = tuple(f"pipeline.{name}" for name in section if name not in _PIPELINE)
    if unknown:
        yield Idle(keys=unknown, why=f"DeepSpeed reads no {unknown[0]}; pipelines are laid out by PipelineModule")
    elif script is None or not script.calls_any("PipelineModule"):
        yield Idle(
            keys=("pipeline",), why="the pipeline section is read where the model is a PipelineModule", severity="info"
        )


def _only_with_the_api(config: ConfigFacts, effective: Effective, script: ScriptFacts | None) -> Iterator[Idle]:
    """Sections that prepare something which the script has to ask for; known only where there is a script."""
    if script is None:
        return
    compresses = effective.schema.key("compression_training") is not None and bool(config.value("compression_training"))
    if compresses and not script.calls_any("init_compression"):
        yield Idle(
            keys=("compression_training",),
            why="compression_training compresses nothing until the script calls init_compression, which it does not",
            fixes=(Fix(text="call deepspeed.compression.compress.init_compression on the model"),),
        )
    if effective.get("compile.deepcompile") is True and not script.calls_any("compile"):
        yield Idle(
            keys=("compile.deepcompile",),
            why="DeepCompile begins with engine.compile(), which the script does not call",
            fixes=(Fix(text="call engine.compile() after deepspeed.initialize"),),
        )
    starts = [call for call in script.named("initialize") if call.owner == "deepspeed"]
    given = any(call.open or "training_data" in call.given or len(call.arguments) > 4 for call in starts)
    if effective.get(f"{_SAMPLING}.enabled") is True and starts and not given:
        yield Idle(
            keys=(f"{_SAMPLING}.enabled",),
            why="curriculum learning samples DeepSpeed's own data loader, and the script passes no training_data to it",
            fixes=(Fix(text="pass training_data to deepspeed.initialize and train on the loader that it returns"),),
        )
