"""What the script's text proves together with the ds_config, before anything runs.

Each function yields the findings of one diagnosis, which lives with its family. They hold back where a log or a run is
at hand: that tells more. Calls are compared by name and, for their order, only within one function, since who calls
whom is not known. What model and machine prove is in `before_run_model`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import at_key
from dsdoctor.dsconfig import keys
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.dsconfig.release import at_least
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.scripts.facts import Call, ScriptFacts

_STAGE = "zero_optimization.stage"
_GATHER = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_BEGINS_SHARDED_LOADING = ("HfDeepSpeedConfig", "parse_args_into_dataclasses", "parse_dict", "parse_json_file")
_BACKWARD_IS_WATCHED_SINCE = "0.18.3"
_LORA = ("get_peft_model", "PeftModel", "LoraConfig")
_LETS_GRADIENTS_IN = ("enable_input_require_grads", "prepare_model_for_kbit_training", "register_forward_hook")


def only_files(case: Case) -> tuple[ConfigFacts, Effective] | None:
    """The config, where nothing but files is known of the job."""
    if case.config is None or not case.config.data or case.logs is not None or case.runs:
        return None
    return case.config, Effective.of(case.config)


def at_call(script: ScriptFacts, call: Call) -> Evidence:
    return Evidence(source=script.path, line=call.line, column=call.column, text=call.text)


def load_conflict(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """`device_map` or `low_cpu_mem_usage` at stage 3; the arguments built after the model is loaded."""
    known, script = only_files(case), case.script
    if known is None or script is None or known[1].stage != 3:
        return
    loads = [call for call in script.named("from_pretrained") if _loads_model(call)]
    for call in list(loads):
        placed = [key for key in ("device_map", "low_cpu_mem_usage") if call.literals.get(key)]
        if placed and _is_hugging_face(script):
            loads.remove(call)
            yield diagnosis.finding(
                cause=f"{' and '.join(placed)} in from_pretrained places whole weights, which ZeRO-3 excludes",
                evidence=(at_call(script, call), at_key(known[0], _STAGE)),
                confidence=0.85,
                caveat="Transformers raises only if the DeepSpeed config is active by then.",
                fixes=(Fix(text=f"leave {' and '.join(placed)} out of from_pretrained"),),
                keys=(_STAGE,),
            )
    yield from _late_arguments(diagnosis, known[0], script, loads)


def _late_arguments(
    diagnosis: Diagnosis, config: ConfigFacts, script: ScriptFacts, loads: list[Call]
) -> Iterator[Finding]:
    begins = [call for call in script.calls if _begins_sharded_loading(call)]
    for load in loads:
        later = [call for call in begins if call.scope == load.scope and call.line > load.line]
        if later and len(later) == len(begins):
            yield diagnosis.finding(
                title="the model is loaded before ZeRO-3 is known",
                severity="warning",
                cause="from_pretrained runs before the arguments switch ZeRO-3 on, so that every rank loads it whole",
                evidence=(at_call(script, load), at_call(script, later[0]), at_key(config, _STAGE)),
                confidence=0.8,
                fixes=(Fix(text="build TrainingArguments (or HfDeepSpeedConfig) first, and keep it alive"),),
                keys=(_STAGE,),
            )
            return


def _begins_sharded_loading(call: Call) -> bool:
    if call.name in _BEGINS_SHARDED_LOADING:
        return True
    return call.name.endswith("TrainingArguments") and "deepspeed" in call.given


def _loads_model(call: Call) -> bool:
    """A model, not a tokenizer, a processor or a config."""
    return "Model" in call.owner or call.owner.endswith(("LM", "Classification", "Generation", "Answering"))


def _is_hugging_face(script: ScriptFacts) -> bool:
    return any(_begins_sharded_loading(call) or call.name.endswith("Trainer") for call in script.calls)


def saves_partitioned(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Weights are saved at stage 3 without being gathered."""
    known, script = only_files(case), case.script
    if known is None or script is None or known[1].stage != 3:
        return
    config, effective = known
    if effective.get(_GATHER) is not True:
        for call in script.named("save_16bit_model"):
            yield diagnosis.finding(
                title="save_16bit_model writes nothing",
                cause="at stage 3 save_16bit_model writes no file unless the weights are gathered on saving",
                evidence=(at_call(script, call), at_key(config, _STAGE)),
                confidence=0.9,
                fixes=(Fix(text="gather when saving", patch=keys.as_patch(_GATHER, True)),),
                keys=(_GATHER,),
            )
    models = _partitioned_models(script)
    for call in script.calls:
        saved = _saved_model(call)
        if saved in models and not any("GatheredParameters" in context for context in call.contexts):
            yield diagnosis.finding(
                title="the weights are saved partitioned",
                cause=f"{saved} is partitioned by ZeRO-3, so that its state_dict holds empty tensors",
                evidence=(at_call(script, call), at_key(config, _STAGE)),
                confidence=0.8,
                caveat="Fine if the state dict was gathered by other means.",
                fixes=(Fix(text="use engine.save_16bit_model with the key set, or save_checkpoint and zero_to_fp32"),),
                keys=(_GATHER,),
            )


def _partitioned_models(script: ScriptFacts) -> set[str]:
    """The names of engines, and of what was passed to `deepspeed.initialize` as the model."""
    names: set[str] = set()
    for call in script.named("initialize"):
        if call.owner in ("deepspeed", "ds"):
            engine = call.targets[:1]
            names |= {*engine, *(f"{name}.module" for name in engine), call.given.get("model", "")}
    return names - {""}


def _saved_model(call: Call) -> str:
    """The model whose own weights a call writes; "" for other calls."""
    if call.name == "save" and call.owner == "torch" and call.arguments[:1]:
        model, _, last = call.arguments[0].rpartition(".")
        return model if last == "state_dict" else ""
    return call.owner if call.name == "save_pretrained" and "state_dict" not in call.given else ""


def backward_around_engine(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """`loss.backward()` in a script whose engine has to scale the loss or to reduce the gradients itself."""
    known, script = only_files(case), case.script
    if known is None or script is None or not at_least(known[0].release, _BACKWARD_IS_WATCHED_SINCE):
        return
    engines = {name for call in script.named("initialize") if call.owner == "deepspeed" for name in call.targets[:1]}
    calls = list(script.named("backward"))
    if not engines or not calls or any(call.owner in engines or call.open for call in calls):
        return
    config, effective = known
    scaled = effective.precision == "fp16"
    if effective.stage > 0 and not scaled:
        return
    static = scaled and effective.stage > 0 and effective.get("fp16.loss_scale") != 0
    effect = "divides the gradients by a loss scale that was never applied" if static else "refuses it"
    yield diagnosis.finding(
        cause=f"the script calls {calls[0].owner}.backward() and never engine.backward(); DeepSpeed {effect}",
        evidence=(at_call(script, calls[0]), at_key(config, "fp16.enabled" if scaled else _STAGE)),
        confidence=0.75,
        caveat="Not if engine.backward or engine.scale is called in another file.",
        fixes=(Fix(text="call engine.backward(loss)"),),
        keys=(_STAGE,),
    )


def recomputes_partitioned(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Non-re-entrant checkpointing of frozen parameters at stage 3."""
    known, script = only_files(case), case.script
    if known is None or script is None or known[1].stage != 3 or not script.calls_any(*_LORA):
        return
    for call in script.calls:
        if _use_reentrant(call) is False:
            yield diagnosis.finding(
                severity="warning",
                cause="non-re-entrant checkpointing recomputes frozen parameters that ZeRO-3 has partitioned again",
                evidence=(at_call(script, call), at_key(known[0], _STAGE)),
                confidence=0.6,
                caveat="Seen with LoRA on several releases, not with every model.",
                fixes=(Fix(text="under ZeRO-3 use re-entrant checkpointing: use_reentrant=True"),),
                keys=(_STAGE,),
            )
            return


def gradients_shut_out(diagnosis: Diagnosis, case: Case) -> Iterator[Finding]:
    """Re-entrant checkpointing of a model whose inputs carry no gradient (LoRA)."""
    known, script = only_files(case), case.script
    if known is None or script is None or not script.calls_any("get_peft_model"):
        return
    if script.calls_any(*_LETS_GRADIENTS_IN) or any(call.name.endswith("Trainer") for call in script.calls):
        return  # Trainers of trl and peft's own preparation see to it
    for call in script.calls:
        if _use_reentrant(call) is True:
            yield diagnosis.finding(
                severity="warning",
                cause="with LoRA the inputs of a re-entrant checkpoint need no gradient, so that none comes out of it",
                evidence=(at_call(script, call),),
                confidence=0.6,
                caveat="Not if the embeddings are trained, or gradients are let in by other means.",
                fixes=(Fix(text="call model.enable_input_require_grads() before get_peft_model"),),
            )
            return


def _use_reentrant(call: Call) -> bool | None:
    """What a call says of `use_reentrant`, None where it says nothing."""
    inner = call.literals.get("gradient_checkpointing_kwargs")
    value = inner.get("use_reentrant") if isinstance(inner, dict) else call.literals.get("use_reentrant")
    return value if isinstance(value, bool) else None
