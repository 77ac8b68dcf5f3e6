"""What script and model prove together with the config, before a run; each beside what looks alike and is well."""

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.logs.facts import LogFacts
from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.read import parse

ZERO = "zero_optimization"
NATIVE = {"DS_PIN_MEMORY_BACKEND": "native"}
STAGE_3 = {"train_micro_batch_size_per_gpu": 1, ZERO: {"stage": 3}, "bf16": {"enabled": True}}
STAGE_2 = STAGE_3 | {ZERO: {"stage": 2}}
GATHERS = STAGE_3 | {ZERO: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
FP16 = {"train_micro_batch_size_per_gpu": 1, ZERO: {"stage": 1}, "fp16": {"enabled": True}}
ARGS = "args = TrainingArguments(output_dir='o', deepspeed='ds.json')\n"
LOADS = "model = AutoModelForCausalLM.from_pretrained('m')\n"
PLACES = "model = AutoModelForCausalLM.from_pretrained('m', device_map='auto')\n"
STARTS = "engine, *_ = deepspeed.initialize(model=net, config='ds.json')\n"
STARTS_4 = "engine, opt, _, _ = deepspeed.initialize(model=net, config='ds.json')\n"
LORA = "model = get_peft_model(base, LoraConfig(r=8))\n"
CHECKPOINTS = "model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': %s})\n"
MOE = ModelConfig(path="config.json", model_type="deepseek_v3", experts=256)
MIXTRAL = ModelConfig(path="config.json", model_type="mixtral", experts=8)
BF16 = ModelConfig(path="config.json", model_type="gemma", dtype="bfloat16")
MT5 = ModelConfig(path="config.json", model_type="mt5")
FP32 = ModelConfig(path="config.json", model_type="gpt2", dtype="float32")


def case(config, script=None, model=None, release="0.19.8", **more):
    facts = load_config(config, release=release, world_size=2, framework="deepspeed")
    return Case(config=facts, script=parse(script, "train.py") if script is not None else None, model=model, **more)


SWAPS = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "buffer_size": 100_000_000}
SWAPPED = STAGE_3 | {ZERO: {"stage": 3, "offload_param": SWAPS}}
GIB = 2**30


def host(free, **more):
    return MachineFacts(
        memory_available=free, devices=(Device(index=0, name="GPU"), Device(index=1, name="GPU")), **more
    )


HERE = MachineFacts(versions={"deepspeed": "0.19.8", "tensorboard": "2.20"})
WATCHED = STAGE_2 | {"tensorboard": {"enabled": True}, "wandb": {"enabled": True}}
FOUND = [
    ("config/conflict", case(WATCHED, machine=HERE)),
    ("memory/will-not-fit", case(SWAPPED, machine=host(GIB))),
    ("memory/will-not-fit", case(SWAPPED, machine=host(8 * GIB, memlock=GIB, environment=NATIVE))),
    ("config/zero3-load-conflict", case(STAGE_3, ARGS + PLACES)),
    ("config/zero3-load-conflict", case(STAGE_3, "def main():\n    " + LOADS + "    " + ARGS)),
    (
        "config/zero3-load-conflict",
        case(STAGE_3, LOADS + "args, = HfArgumentParser(A).parse_args_into_dataclasses()\n"),
    ),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_3, STARTS_4 + "engine.save_16bit_model('out')\n")),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_3, STARTS_4 + "torch.save(engine.module.state_dict(), 'w.pt')\n")),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_3, STARTS + "net.save_pretrained('out')\n")),
    ("zero3/moe-hang", case(STAGE_3, model=MOE)),
    ("zero3/moe-hang", case(STAGE_3, model=MIXTRAL, release="0.14.4")),
    ("numerics/bf16-model-in-fp16", case(FP16, model=BF16)),
    ("numerics/bf16-model-in-fp16", case(FP16, model=MT5)),
    ("autograd/recompute-mismatch", case(STAGE_3, LORA + CHECKPOINTS % False)),
    ("autograd/no-grad", case(STAGE_2, LORA + CHECKPOINTS % True)),
]
NOT_FOUND = [
    ("config/conflict", case(WATCHED)),
    ("config/conflict", case(STAGE_2 | {"tensorboard": {"enabled": True}, "comet": {"enabled": False}}, machine=HERE)),
    ("memory/will-not-fit", case(SWAPPED, machine=host(8 * GIB, memlock=GIB))),
    ("memory/will-not-fit", case(SWAPPED, machine=host(8 * GIB, memlock="unlimited", environment=NATIVE))),
    ("memory/will-not-fit", case(STAGE_3, machine=host(GIB))),
    ("config/zero3-load-conflict", case(STAGE_2, ARGS + PLACES)),
    ("config/zero3-load-conflict", case(STAGE_2, LOADS + ARGS)),
    ("config/zero3-load-conflict", case(STAGE_3, ARGS + LOADS)),
    ("config/zero3-load-conflict", case(STAGE_3, ARGS + "t = AutoTokenizer.from_pretrained('m', device_map='auto')\n")),
    (
        "config/zero3-load-conflict",
        case(STAGE_3, ARGS + "m = AutoModelForCausalLM.from_pretrained('m', device_map=None)\n"),
    ),
    ("config/zero3-load-conflict", case(STAGE_3, "def load():\n    return AutoModel.from_pretrained('m')\n" + ARGS)),
    ("config/zero3-load-conflict", case(STAGE_3, "HfDeepSpeedConfig(c)\n" + LOADS + ARGS)),
    ("config/zero3-load-conflict", case(STAGE_3, LOADS + "args = TrainingArguments(output_dir='o')\n")),
    ("zero3/empty-weights-in-checkpoint", case(GATHERS, STARTS_4 + "engine.save_16bit_model('out')\n")),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_3, STARTS_4 + "torch.save(other.state_dict(), 'w.pt')\n")),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_2, STARTS_4 + "torch.save(net.state_dict(), 'w.pt')\n")),
    (
        "zero3/empty-weights-in-checkpoint",
        case(STAGE_3, STARTS_4 + "with zero.GatheredParameters(ps):\n    torch.save(net.state_dict(), 'w.pt')\n"),
    ),
    ("zero3/empty-weights-in-checkpoint", case(STAGE_3, STARTS + "net.save_pretrained('out', state_dict=whole)\n")),
    ("zero3/moe-hang", case(STAGE_2, model=MOE)),
    ("zero3/moe-hang", case(STAGE_3, model=FP32)),
    ("zero3/moe-hang", case(STAGE_3, model=MIXTRAL)),
    ("zero3/moe-hang", case(STAGE_3, "set_z3_leaf_modules(model, [Moe])\n", model=MOE)),
    ("zero3/moe-hang", case(STAGE_3 | {ZERO: {"stage": 3, "leaf_module": {"classes": ["Moe"]}}}, model=MOE)),
    ("numerics/bf16-model-in-fp16", case(FP16, model=FP32)),
    ("numerics/bf16-model-in-fp16", case(STAGE_2, model=BF16)),
    ("numerics/bf16-model-in-fp16", case(FP16, model=BF16, logs=LogFacts(sources=("train.log",)))),
    ("autograd/recompute-mismatch", case(STAGE_2, LORA + CHECKPOINTS % False)),
    ("autograd/recompute-mismatch", case(STAGE_3, CHECKPOINTS % False)),
    ("autograd/recompute-mismatch", case(STAGE_3, LORA + CHECKPOINTS % True)),
    ("autograd/no-grad", case(STAGE_2, LORA + CHECKPOINTS % False)),
    ("autograd/no-grad", case(STAGE_2, "model.enable_input_require_grads()\n" + LORA + CHECKPOINTS % True)),
    ("autograd/no-grad", case(STAGE_2, LORA + CHECKPOINTS % True + "trainer = SFTTrainer(model)\n")),
]


@pytest.mark.parametrize(("identifier", "job"), FOUND)
def test_found(identifier, job):
    findings = [f for f in diagnose(job, strict=True).findings if f.id == identifier]
    assert findings
    assert findings[0].evidence


@pytest.mark.parametrize(("identifier", "job"), NOT_FOUND)
def test_not_found(identifier, job):
    assert not [f for f in diagnose(job, strict=True).findings if f.id == identifier]


def test_the_call_is_pointed_at():
    (finding,) = [f for f in diagnose(case(STAGE_3, ARGS + PLACES)).findings if f.id == "config/zero3-load-conflict"]
    place = finding.evidence[0]
    assert (place.source, place.line, place.column) == ("train.py", 2, 9)
    assert "device_map='auto'" in place.text
