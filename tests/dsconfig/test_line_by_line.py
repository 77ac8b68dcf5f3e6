"""What is known of DeepSpeed's config, line by line: each fact that a config can meet is a check, or has a reason.

The facts were read in DeepSpeed's code or seen by running it; the configs here are the smallest that meet them.
"""

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.read import parse

Z = "zero_optimization"
MICRO = {"train_micro_batch_size_per_gpu": 1}
FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
HALF = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
CPU = {"offload_optimizer": {"device": "cpu"}}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
PIPE = "net = PipelineModule(layers)\n"
TIED_TO_4 = ModelConfig(path="config.json", heads=6, kv_heads=6)


def stage(number, **more):
    return {Z: {"stage": number, **more}}


def optimizer(name, **params):
    return {"optimizer": {"type": name, "params": params}}


def found(config, *, release="0.19.8", script=None, framework="deepspeed", ranks=2, model=None):
    facts = load_config(MICRO | config, release=release, world_size=ranks, framework=framework)
    job = Case(config=facts, script=parse(script) if script else None, model=model)
    return [(finding.id, finding.severity) for finding in diagnose(job, strict=True).findings]


KNOWN = {  # the fact: the config, more of the job, the id, its severity
    # defects of releases
    "fp16 at stage 0 is never scaled from 0.18.3": (FP16, {}, "version/known-defect", "error"),
    "torch_autocast fp16 never leaves an overflow in 0.19.8": (HALF | stage(2), {}, "version/known-defect", "error"),
    "torch_autocast fp16 hides skipped steps before": (
        HALF | stage(2),
        {"release": "0.18.2"},
        "version/known-defect",
        "warning",
    ),
    "bf16 is not checked to 0.17.0": (BF16 | stage(2), {"release": "0.16.4"}, "version/known-defect", "info"),
    "bf16 is not checked by default to 0.19.2": (
        BF16 | stage(1),
        {"release": "0.18.2"},
        "version/known-defect",
        "info",
    ),
    "bf16 is not checked at stage 3 to 0.19.6": (
        BF16 | stage(3),
        {"release": "0.19.6"},
        "version/known-defect",
        "info",
    ),
    "the scale starts at 2^32 to 0.17.0": (FP16 | stage(1), {"release": "0.16.4"}, "version/known-defect", "info"),
    # removed
    **{
        f"{key} is refused, even switched off": ({key: {"enabled": False}}, {}, "config/removed", "error")
        for key in (
            *("amp", "elasticity", "sparse_attention", "curriculum_learning", "progressive_layer_drop", "eigenvalue"),
            *("quantize_training", "compression_training", "nebula"),
        )
    },
    "sparse_gradients is refused": ({"sparse_gradients": False}, {}, "config/removed", "error"),
    "graph_harvesting is refused": ({"graph_harvesting": False}, {}, "config/removed", "error"),
    "mics_shard_size is refused": (stage(3, mics_shard_size=2), {}, "config/removed", "error"),
    "1-bit Adam is gone": (optimizer("OneBitAdam", lr=1e-3), {}, "config/removed", "error"),
    # how a config is read
    "an unknown top-level key is ignored": ({"zero_optimisation": {}}, {}, "config/unknown-key", "warning"),
    "an unknown key of a typed section is refused": (stage(1, overlap_com=True), {}, "config/unknown-key", "error"),
    "an unknown key of a plain section is ignored": (
        {"activation_checkpointing": {"partition_activation": True}},
        {},
        "config/unknown-key",
        "warning",
    ),
    "bf16 has no loss_scale": ({"bf16": {"enabled": True, "loss_scale": 0}}, {}, "config/unknown-key", "error"),
    "auto in a typed section counts as not given": (
        {"bf16": {"enabled": "auto"}},
        {},
        "config/auto-unresolved",
        "error",
    ),
    "stage auto is stage 0": (stage("auto"), {}, "config/auto-unresolved", "error"),
    "auto clipping fails at the first step": ({"gradient_clipping": "auto"}, {}, "config/auto-unresolved", "error"),
    "a number in quotes fails in plain sections": (
        {"train_micro_batch_size_per_gpu": "2"},
        {},
        "config/wrong-type",
        "error",
    ),
    "a number in quotes is converted in typed ones": (stage("2"), {}, "config/wrong-type", "warning"),
    # loss scale
    "min_loss_scale is a whole number": (
        {"fp16": {"enabled": True, "min_loss_scale": 0.5}},
        {},
        "config/wrong-type",
        "error",
    ),
    "loss_scale is not negative": ({"fp16": {"enabled": True, "loss_scale": -1}}, {}, "config/wrong-type", "error"),
    "hysteresis 0 never lowers the scale": (
        {"fp16": {"enabled": True, "hysteresis": 0}} | stage(1),
        {},
        "config/ineffective",
        "warning",
    ),
    "window 0 is refused from 0.19.3": (
        {"fp16": {"enabled": True, "loss_scale_window": 0}} | stage(1),
        {},
        "config/conflict",
        "error",
    ),
    "a static scale cannot fall": (
        {"fp16": {"enabled": True, "loss_scale": 64}} | stage(1),
        {},
        "loss-scale/static",
        "error",
    ),
    "a static scale leaves the other keys idle": (
        {"fp16": {"enabled": True, "loss_scale": 64, "hysteresis": 2}} | stage(1),
        {},
        "config/ineffective",
        "info",
    ),
    "2^32 costs skipped steps": (
        {"fp16": {"enabled": True, "initial_scale_power": 32}} | stage(1),
        {},
        "config/ineffective",
        "info",
    ),
    "fp16 masters need a stage": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        {},
        "config/conflict",
        "error",
    ),
    "16-bit masters need the CPU": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}} | stage(2),
        {},
        "config/conflict",
        "error",
    ),
    # keys and choices
    "float32 is no communication type": ({"communication_data_type": "float32"}, {}, "config/wrong-type", "error"),
    "tag_validation has three values": ({"checkpoint": {"tag_validation": "never"}}, {}, "config/wrong-type", "error"),
    "0.5 is no whole number": (stage(3, sub_group_size=0.5), {}, "config/wrong-type", "error"),
    "an odd all-gather bucket": (stage(1, allgather_bucket_size=5), {}, "config/conflict", "error"),
    "legacy_stage1 raises": (stage(1, legacy_stage1=True), {}, "config/conflict", "error"),
    "sum does not go with stage 3": ({"gradient_allreduce_op": "sum"} | stage(3), {}, "config/conflict", "error"),
    "compute_grad_norm false needs no clipping": (stage(1, compute_grad_norm=False), {}, "config/conflict", "error"),
    "max_grad_norm is no parameter": (
        optimizer("AdamW", lr=1e-3, max_grad_norm=1.0),
        {},
        "config/unknown-key",
        "error",
    ),
    "log_level is newer than 0.19.2": ({"log_level": "info"}, {"release": "0.19.2"}, "config/unknown-key", "warning"),
    # deprecated
    **{
        f"{key} has a successor": (stage(3, **{key: True}), {}, "config/deprecated", "warning")
        for key in (
            *("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"),
            "stage3_gather_fp16_weights_on_model_save",
        )
    },
    "zero_optimization true": ({Z: True}, {}, "config/deprecated", "warning"),
    "bfloat16": ({"bfloat16": {"enabled": True}}, {}, "config/deprecated", "warning"),
    "old and new together": (stage(2, cpu_offload=True, **CPU), {}, "config/conflict", "error"),
    # combinations
    "fp16 and bf16": (FP16 | BF16, {}, "config/conflict", "error"),
    "fp16 and torch_autocast": (FP16 | stage(1) | HALF, {}, "config/ineffective", "info"),
    "offload_param below stage 3": (stage(2, offload_param={"device": "cpu"}), {}, "config/ineffective", "warning"),
    "offload_optimizer at stage 0": (stage(0, **CPU), {}, "config/ineffective", "warning"),
    "nvme below stage 3 is the CPU": (stage(1, offload_optimizer=NVME), {}, "config/ineffective", "warning"),
    "nvme without a path": (stage(3, offload_optimizer={"device": "nvme"}), {}, "config/ineffective", "error"),
    "a ratio below stage 3": (
        stage(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        {},
        "config/conflict",
        "error",
    ),
    "a client optimizer and offload": (
        stage(2, **CPU),
        {"script": "import deepspeed\ndeepspeed.initialize(model=net, optimizer=opt)\n"},
        "config/conflict",
        "error",
    ),
    "an untested optimizer": (optimizer("SGD", lr=0.1) | stage(1), {}, "config/untested-optimizer", "error"),
    "no optimizer at stage 1": (
        stage(1),
        {"script": "import deepspeed\ndeepspeed.initialize(model=net)\n"},
        "config/conflict",
        "error",
    ),
    "lamb and a static scale": (
        optimizer("Lamb", lr=0.1) | {"fp16": {"enabled": True, "loss_scale": 8}},
        {},
        "config/conflict",
        "error",
    ),
    "other accumulation at stage 0": (
        BF16 | {"data_types": {"grad_accum_dtype": "fp32"}},
        {},
        "config/conflict",
        "error",
    ),
    "param_dtype against the precision": ({"data_types": {"param_dtype": "bf16"}}, {}, "config/conflict", "error"),
    "prescaling with ZeRO": ({"prescale_gradients": True} | stage(2), {}, "config/conflict", "error"),
    "a pipeline and stage 2": (stage(2), {"script": PIPE}, "config/conflict", "error"),
    "a pipeline, the breakdown and no steps_per_print": (
        {"wall_clock_breakdown": True},
        {"script": PIPE},
        "config/conflict",
        "error",
    ),
    "a pipeline overlaps nothing": (stage(1, overlap_comm=True), {"script": PIPE}, "config/conflict", "info"),
    "quantized weights and torch_autocast": (
        {"torch_autocast": {"enabled": True}} | stage(3, zero_quantized_weights=True),
        {},
        "config/conflict",
        "error",
    ),
    "quantized gradients without reduce_scatter": (
        stage(3, zero_quantized_gradients=True, reduce_scatter=False),
        {},
        "config/conflict",
        "error",
    ),
    "hpz that does not divide": (stage(3, zero_hpz_partition_size=2), {"ranks": 3}, "config/conflict", "error"),
    "super_offload below stage 3": (
        stage(2, offload_optimizer={"device": "cpu", "super_offload": True}),
        {},
        "config/ineffective",
        "warning",
    ),
    "zenflow without offload": (stage(2, zenflow={}), {}, "config/conflict", "error"),
    "muon and reduce_scatter at stage 3": (optimizer("Muon", lr=0.1) | stage(3), {}, "config/conflict", "error"),
    "muon offloaded in 0.19.5": (
        optimizer("Muon", lr=0.1) | stage(2, **CPU),
        {"release": "0.19.5"},
        "config/conflict",
        "error",
    ),
    "two tensor-parallel sizes": (
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}},
        {"ranks": 4},
        "config/conflict",
        "error",
    ),
    "heads that a sequence group cannot share": (
        {"sequence_parallel_size": 4},
        {"ranks": 4, "model": TIED_TO_4},
        "config/conflict",
        "error",
    ),
    "DeepCompile without engine.compile": (
        {"compile": {"deepcompile": True}},
        {"script": "import deepspeed\ndeepspeed.initialize(model=net, optimizer=o)\n"},
        "config/ineffective",
        "warning",
    ),
    "both offloads of DeepCompile": (
        {"compile": {"deepcompile": True, "offload_activation": True, "offload_parameters": True}} | stage(3),
        {},
        "config/conflict",
        "error",
    ),
    "elastic_checkpoint at stage 3": (stage(3, elastic_checkpoint=True), {}, "config/conflict", "warning"),
    "nothing gathered for save_16bit_model": (
        stage(3),
        {"script": "import deepspeed\ne, *_ = deepspeed.initialize(model=n, optimizer=o)\ne.save_16bit_model('x')\n"},
        "zero3/empty-weights-in-checkpoint",
        "error",
    ),
    "own boundary with overlap at stage 1": (
        {"managed_gradient_accumulation": False} | stage(1, overlap_comm=True),
        {},
        "config/conflict",
        "error",
    ),
    "experts need reduce_scatter": (
        stage(2, reduce_scatter=False),
        {"script": "from deepspeed.moe.layer import MoE\nMoE(8)\n"},
        "config/conflict",
        "error",
    ),
    "activation_checkpointing switches nothing on": (
        {"activation_checkpointing": {"partition_activations": True}},
        {},
        "config/ineffective",
        "info",
    ),
    "contiguous activations need their number": (
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
        {},
        "config/conflict",
        "info",
    ),
    "warm-up of 0 steps from 0.19.6": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        {},
        "config/conflict",
        "error",
    ),
    "fp16 for a bf16 or fp32 run's reduction": (
        {"communication_data_type": "fp16"} | BF16,
        {},
        "config/conflict",
        "warning",
    ),
    "loss.backward at stage 0": (
        {},
        {"script": "import deepspeed\ne, *_ = deepspeed.initialize(model=n, optimizer=o)\nloss.backward()\n"},
        "autograd/direct-backward",
        "error",
    ),
    "Accelerate wants a zero_optimization": (BF16, {"framework": "accelerate"}, "config/conflict", "error"),
    # experts over the ranks
    "AutoEP that does not divide the ranks": (
        {"expert_parallel": {"enabled": True, "autoep_size": 8}},
        {"ranks": 4},
        "config/conflict",
        "error",
    ),
    "AutoEP at stage 3 and hpZ": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}} | stage(3, zero_hpz_partition_size=2),
        {},
        "config/conflict",
        "error",
    ),
    "single experts are not split": (
        {"expert_parallel": {"enabled": True, "autoep_size": 1, "expert_tensor_parallel_size": 2}},
        {},
        "config/conflict",
        "error",
    ),
    "AutoTP needs more than one group of experts": (
        {"expert_parallel": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}},
        {},
        "config/conflict",
        "error",
    ),
    "AutoEP, AutoTP and offload": (
        {"expert_parallel": {"enabled": True, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}}
        | stage(2, **CPU),
        {},
        "config/conflict",
        "error",
    ),
    "1-bit Adam and ZeRO in an older release": (
        optimizer("OneBitAdam", lr=1e-3) | stage(1),
        {"release": "0.16.4"},
        "config/conflict",
        "error",
    ),
    # batch
    "sizes that do not multiply up": ({"train_batch_size": 3}, {}, "config/batch-size", "error"),
    "less than one sample a rank": (
        {"train_batch_size": 1, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": None},
        {},
        "config/batch-size",
        "error",
    ),
}
NOT_JUDGED = {
    "gradient_clipping is 1.0 by default from 0.19.3": "a default; a max_grad_norm that differs is told",
    "pin_memory is on by default from 0.19.5": "a default; what it takes of the host is the memory model's",
    "steps_per_print is off by default from 0.15.2": "a default: nothing in the config is wrong",
    "overflow lines are hidden from 0.17.6": "told where a log is read (loss-scale/hidden)",
    "adam means AdamW unless adam_w_mode is false": "in nearly every config, and mostly what is meant",
    "zero_allow_untested_optimizer with a tested one": "harmless, and in most published configs",
    "bf16 with fp32 accumulation at stage 1 is another optimizer": "works; its memory is the memory model's",
    "a resumed loss scale wins over the config": "what a checkpoint holds is not seen before a run",
    "zero_quantized_weights without its op": "asked of the op's builder, with --machine (build/...)",
    "universal checkpoints need latest_universal": "the folder is the script's",
    "hidden size squared is a small bucket": "speed only, and Hugging Face's own choice",
    "an all-reduce at stage 0 sums before it divides": "costs powers of the scale, which the scaler pays by itself",
    "DEEPSPEED_TIMEOUT is 10 minutes from 0.19.6": "no key of the config",
    "a vocabulary that is not a multiple of 8": "DeepSpeed's own warning; speed only",
}


@pytest.mark.parametrize("fact", KNOWN)
def test_each_fact_is_a_check(fact):
    config, more, identifier, severity = KNOWN[fact]
    assert (identifier, severity) in found({k: v for k, v in config.items() if v is not None}, **more)


def test_facts_that_are_not_judged_have_a_reason():
    assert all(reason for reason in NOT_JUDGED.values())
    assert not set(NOT_JUDGED) & set(KNOWN)


def test_every_key_that_is_refused_by_name_is_here():
    named = {key.rpartition(".")[2] for key in schema_for("0.19.8").removed}
    told = " ".join(KNOWN)
    assert {key for key in named if key not in told} <= {"mics_hierarchical_params_gather", "zeropp_loco_param"}
