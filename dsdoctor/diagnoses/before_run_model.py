"""What the model's config.json and the machine prove together with the ds_config, before anything runs.

Each function yields the findings of one diagnosis, which lives with its family; they hold back where a log or a run is
at hand, as in `before_run`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.before_run import at_call, only_files
from dsdoctor.diagnoses.config_evidence import at_key
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.machine.facts import Limit
from dsdoctor.units import size

_MONITORS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet-ml"}
"""Sections of the config, and the package that DeepSpeed imports for each on rank 0."""
_STAGE = "zero_optimization.stage"
_LEAVES = "zero_optimization.leaf_module"
_PARAM = "zero_optimization.offload_param"
_BY_HIDDEN_SIZE = tuple(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
)
_DEFAULT_BUCKETS = {"zero_optimization": dict.fromkeys(key.partition(".")[2] for key in _BY_HIDDEN_SIZE)}


def experts_without_leaves(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A model with experts at stage 3, and nobody makes the blocks of experts leaf modules."""
    known, model = only_files(case), case.model
    if known is None or model is None or not model.experts or known[1].stage != 3:
        return
    config, effective = known
    script = case.script
    if config.has(_LEAVES) or (script is not None and script.calls_any("set_z3_leaf_modules", "set_z3_leaf_module")):
        return
    if model.model_type in _leaves_by_default(effective):
        return
    yield diagnosis.finding(
        severity="warning",
        cause=f"{model.model_type or 'the model'} has {model.experts} experts a layer, and no block of them is a leaf "
        "module: ranks that route to different experts wait for each other for ever",
        evidence=(
            Evidence(source=model.path, text=f"{model.experts} experts, model_type {model.model_type}"),
            at_key(config, _STAGE),
        ),
        confidence=0.7,
        caveat="Not if the script makes them leaf modules, or every rank runs every expert.",
        fixes=(Fix(text="make the block of experts a leaf module: set_z3_leaf_modules(model, [MoeBlock])"),),
        keys=(_STAGE, _LEAVES),
    )


def _leaves_by_default(effective: Effective) -> set[str]:
    """Model types whose blocks of experts the release makes leaf modules by itself."""
    classes = effective.schema.default(f"{_LEAVES}.classes") or ()
    return {name.split(".")[2] for name in classes if name.count(".") > 2}


def trained_in_bf16(diagnosis: Diagnosis, case: Case, families: re.Pattern[str]) -> Iterator[Finding]:
    """The weights were saved in bf16, or are of a family that was trained so, and the config trains in fp16."""
    known, model = only_files(case), case.model
    family = model is not None and families.match(model.model_type or "") is not None
    if known is None or model is None or (model.dtype != "bfloat16" and not family):
        return
    config, effective = known
    if effective.precision != "fp16" and (config.hf_arguments or {}).get("fp16") is not True:
        return
    saved = model.dtype == "bfloat16"
    told = "the weights were saved in bf16" if saved else f"{model.model_type} is a family that was trained in bf16"
    yield diagnosis.finding(
        severity="warning",
        cause=f"{told}, whose range is that of fp32; fp16 may not hold the model's activations",
        evidence=(
            Evidence(source=model.path, text=f"model_type: {model.model_type}, dtype: {model.dtype or 'not named'}"),
            at_key(config, "fp16.enabled"),
        ),
        confidence=0.6,
        caveat="Many such models train in fp16 all the same; the families known to fail are T5, Gemma and BLOOM.",
        fixes=(
            Fix(
                text="train in bf16, where the GPU has it",
                patch={"fp16": {"enabled": False}, "bf16": {"enabled": True}},
            ),
        ),
        keys=("fp16.enabled",),
    )


def static_scale(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A loss scale that the config holds still."""
    known = only_files(case)
    if known is None:
        return
    config, effective = known
    scale = effective.get("fp16.loss_scale")
    on = effective.precision == "fp16" or (config.hf_arguments or {}).get("fp16") is True
    if not on or isinstance(scale, bool) or not isinstance(scale, (int, float)) or scale <= 0:
        return
    yield diagnosis.finding(
        title="a static loss scale",
        cause=f"the loss scale is held at {scale:g}: an overflow does not lower it, so that every later step may be "
        "skipped, and nothing raises it where small gradients become zero",
        evidence=(at_key(config, "fp16.loss_scale"),),
        confidence=0.8,
        caveat="Fine for a scale that is known to hold for this model and these data.",
        fixes=(Fix(text="use a dynamic loss scale", patch={"fp16": {"loss_scale": 0}}),),
        keys=("fp16.loss_scale",),
    )


def untied_in_pipeline(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A model that ties its embeddings, cut into pipeline stages that do not know it."""
    known, model, script = only_files(case), case.model, case.script
    if known is None or script is None or model is None or model.tied is not True:
        return
    for call in script.named("PipelineModule"):
        if not script.calls_any("TiedLayerSpec"):
            yield diagnosis.finding(
                title="tied embeddings in a pipeline",
                severity="warning",
                cause="the model ties its embeddings, and no layer of the pipeline is a TiedLayerSpec: the first and "
                "the last stage then train copies that drift apart",
                evidence=(at_call(script, call), Evidence(source=model.path, text="tie_word_embeddings: true")),
                confidence=0.6,
                caveat="Not if the layers are given by a function elsewhere, or the model is untied before.",
                fixes=(Fix(text="give both layers as TiedLayerSpec with the same key"),),
            )
            return


def no_hidden_size(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """ "auto" that Transformers works out from the model's hidden size, for a model that names none."""
    known, model = only_files(case), case.model
    if known is None or model is None or model.hidden_size is not None or known[0].framework != "transformers":
        return
    autos = [key for key in _BY_HIDDEN_SIZE if known[0].value(key) == "auto"]
    if autos:
        yield diagnosis.finding(
            title='"auto" that needs a hidden size',
            cause="Transformers works this out from the model's hidden_size, and its config.json has none: it raises",
            evidence=(*(at_key(known[0], key) for key in autos), Evidence(source=model.path, text="no hidden_size")),
            confidence=0.85,
            caveat="A class of its own may have a hidden_size that is not in its config.json.",
            fixes=(Fix(text="leave them out, for DeepSpeed's defaults", patch=_DEFAULT_BUCKETS),),
            keys=tuple(autos),
        )


def pinned_buffers(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """The pinned buffers that swapping parameters to NVMe takes at once, against what this host has."""
    known, machine = only_files(case), case.machine
    if known is None or machine is None or known[1].stage != 3 or known[1].offload("param") != "nvme":
        return
    config, effective = known
    count, elements = (effective.get(f"{_PARAM}.{name}") for name in ("buffer_count", "buffer_size"))
    if not isinstance(count, int) or not isinstance(elements, int):
        return
    ranks = min(config.world_size or len(machine.devices) or 1, len(machine.devices) or config.world_size or 1)
    each = 1 << max(0, 2 * count * elements - 1).bit_length()  # torch pins blocks of a power of two
    native = machine.environment.get("DS_PIN_MEMORY_BACKEND") == "native"
    limits: list[tuple[str, Limit]] = [("the host has free", machine.host_available)]
    limits += [("ulimit -l allows", machine.memlock)] if native else []
    for what, room in limits:
        if isinstance(room, int) and ranks * each > room:
            yield diagnosis.finding(
                cause=f"the buffers of offload_param pin {size(ranks * each)} on this host ({ranks} x {size(each)}), "
                f"{what} {size(room)}",
                evidence=(
                    at_key(config, f"{_PARAM}.buffer_size"),
                    at_key(config, f"{_PARAM}.buffer_count"),
                    Evidence(source="environment", text=f"{what} {size(room)}"),
                ),
                confidence=0.9,
                fixes=(Fix(text="a smaller buffer_size: at least the largest parameter of the model, in elements"),),
                keys=(f"{_PARAM}.buffer_size", f"{_PARAM}.buffer_count"),
            )
            return


def missing_monitors(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """A monitor that is switched on, and whose package is not installed here."""
    known, machine = only_files(case), case.machine
    if known is None or machine is None or "deepspeed" not in machine.versions:
        return
    for section, package in _MONITORS.items():
        if known[1].get(f"{section}.enabled") is True and package not in machine.versions:
            yield diagnosis.finding(
                title="a monitor without its package",
                cause=f"{section} is switched on, and {package} is not installed here: DeepSpeed raises on rank 0 when "
                "it builds the engine",
                evidence=(
                    at_key(known[0], f"{section}.enabled"),
                    Evidence(source="environment", text=f"{package}: not installed"),
                ),
                confidence=0.9,
                fixes=(
                    Fix(text=f"pip install {package}"),
                    Fix(text=f"or switch {section} off", patch={section: {"enabled": False}}),
                ),
                keys=(f"{section}.enabled",),
            )
