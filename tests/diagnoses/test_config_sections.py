"""Sections that wait for a switch or for the script, elastic training, and what script and config exclude together."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses.config import DIAGNOSES
from dsdoctor.dsconfig import load_config
from dsdoctor.logs.facts import LogFacts
from dsdoctor.model_config import ModelConfig
from dsdoctor.scripts.read import parse
from tests.diagnoses.examples import found as found_by_all

ZERO = "zero_optimization"
OFFLOADED = {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ELASTIC = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}
CURRICULUM = {
    "data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True, "curriculum_metrics": {}}}}
}
STARTS = "engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config='ds.json'%s)\n"
COMPRESSES = {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}
DROPS = {"enabled": True, "random_ltd_layer_id": [1, 2], "random_ltd_layer_num": 3}
TIED = ModelConfig(path="config.json", model_type="gpt2", tied=True)


GQA = ModelConfig(path="config.json", heads=12, kv_heads=2)
NO_SIZE = ModelConfig(path="config.json", model_type="mine")
SIZED = ModelConfig(path="config.json", hidden_size=64)
PIPES = "net = PipelineModule(layers)\n"
MOE = "from deepspeed.moe.layer import MoE\nlayer = MoE(8, expert)\n"
ACCUMULATES = STARTS % ", optimizer=opt" + "with engine.no_sync():\n    engine.backward(loss)\n"
BARE = STARTS % ", optimizer=opt" + "loss.backward()\n"


def hf(data, *words, release="0.19.8", **more):
    full = {"train_micro_batch_size_per_gpu": "auto"} | data
    return Case(config=load_config(full, release=release, framework="transformers", script_args=words), **more)


def job(data, script=None, *, release="0.19.8", ranks=4, batch=True, **more):
    full = ({"train_micro_batch_size_per_gpu": 2} if batch else {}) | data
    facts = load_config(full, release=release, world_size=ranks, framework="deepspeed")
    return Case(config=facts, script=parse(script, "train.py") if script is not None else None, **more)


METRIC = {"curriculum_metrics": {"seqlen": {"schedule_type": "fixed_lnear"}}}


def sampling(**values):
    return {"data_efficiency": {"data_sampling": values}}


def zenflow(**values):
    return {ZERO: OFFLOADED[ZERO] | {"zenflow": values}}


FOUND = [  # id, job, a word of the cause
    ("config/ineffective", job({"tensorboard": {"output_path": "logs"}}), "tensorboard has no"),
    ("config/ineffective", job({"wandb": {"project": "p"}}), "wandb has no"),
    ("config/ineffective", job({"csv_monitor": {"job_name": "j"}}), "csv_monitor has no"),
    ("config/ineffective", job({"comet": {"project": "p"}}), "comet has no"),
    ("config/ineffective", job({"fp16": {"loss_scale": 0}}), "fp16 has no"),
    ("config/ineffective", job({"flops_profiler": {"profile_step": 5}}), "flops_profiler has no"),
    ("config/ineffective", job({"comms_logger": {"verbose": True}}), "comms_logger has no"),
    ("config/ineffective", job({"torch_autocast": {"dtype": "bfloat16"}}), "torch_autocast has no"),
    ("config/ineffective", job({"hybrid_engine": {"max_out_tokens": 64}}), "hybrid_engine has no"),
    ("config/ineffective", job({"expert_parallel": {"autoep_size": 2}}), "expert_parallel has no"),
    ("config/ineffective", job({"curriculum_learning": {"min_difficulty": 8}}, release="0.18.2"), "has no"),
    ("config/ineffective", job({"flops_profiler": {"enabled": True, "profile_step": -1}}), "never comes"),
    ("config/ineffective", job({ZERO: {"stage": 2, "reduce_bucket_size": 5e9}}), "20 GB"),
    ("config/ineffective", job({ZERO: {"stage": 2, "reduce_bucket_size": 5_000_000_000, "overlap_comm": True}}), "two"),
    ("config/ineffective", job({"pipeline": {"pipeline_parallel_size": 4}}), "pipeline_parallel_size"),
    ("config/ineffective", job(COMPRESSES, STARTS % "", release="0.18.2"), "init_compression"),
    ("config/ineffective", job(CURRICULUM, STARTS % ""), "training_data"),
    ("config/batch-size", job({"elasticity": ELASTIC}, release="0.16.4", ranks=11, batch=False), "not on 11"),
    ("config/batch-size", job({"elasticity": {"enabled": True}}, release="0.16.4", batch=False), "have to be given"),
    (
        "config/batch-size",
        job({"train_batch_size": 8, "data_parallel_size": 2, "sequence_parallel_size": 4}),
        "not the 4",
    ),
    ("config/batch-size", job({"train_batch_size": 8}, "net = PipelineModule(layers, num_stages=3)"), "3 pipeline"),
    ("config/batch-size", job({"train_batch_size": 8}, "net = PipelineModule(layers, num_stages=2)", ranks=6), "8"),
    ("config/conflict", job({"elasticity": ELASTIC}, release="0.16.4"), "by hand"),
    ("config/conflict", job({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}), "above 0"),
    ("config/conflict", job({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 9}}}), "no default"),
    ("config/conflict", job({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}}}), "no default"),
    (
        "config/conflict",
        job({"amp": {"enabled": True}, "zero_optimization": {"stage": 1}}, release="0.16.4"),
        "amp and ZeRO",
    ),
    (
        "config/unknown-key",
        job({"optimizer": {"type": "AdamW", "params": {"eps": 1e-8}}, "lr": 1e-5}),
        "does not know lr",
    ),
    ("config/conflict", job({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 0.5}}}), "whole"),
    ("config/conflict", job({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}}), "two sizes"),
    ("config/conflict", job({"data_efficiency": {"data_routing": {"random_ltd": DROPS}}}), "random_ltd_layer_num"),
    ("config/conflict", job({ZERO: {"stage": 3, "zero_quantized_gradients": True, "reduce_scatter": False}}), "reduce"),
    ("config/conflict", job({ZERO: {"stage": 2, "zenflow": {}}}), "on the CPU"),
    ("config/conflict", job(sampling(curriculum_learning={"enabled": True})), "without curriculum_metrics"),
    ("config/conflict", job(sampling(curriculum_learning=METRIC | {"enabled": True})), "schedule_type"),
    ("config/conflict", job(sampling(dynamic_batching={"enabled": True})), "max_tokens"),
    ("config/conflict", job(COMPRESSES, release="0.16.4"), "different_groups"),
    ("config/conflict", job(zenflow(select_interval=2, update_interval=4)), "select_interval"),
    ("config/conflict", job(zenflow(offload=True)), "overlap_comm"),
    ("config/conflict", job(OFFLOADED, STARTS % ", optimizer=AdamW(net.parameters())"), "its own optimizer"),
    ("config/conflict", job(OFFLOADED, "deepspeed.initialize(args, net, opt)"), "its own optimizer"),
    ("config/conflict", job({ZERO: {"stage": 1}}, STARTS % ""), "needs an optimizer"),
    ("config/conflict", job({ZERO: {"stage": 2}}, ACCUMULATES), "no_sync"),
    ("config/conflict", job({}, "net = PipelineModule(layers)", model=TIED), "TiedLayerSpec"),
    ("config/conflict", job({ZERO: {"stage": 3}}, PIPES), "stage 0 and 1 only"),
    ("config/conflict", job({"managed_gradient_accumulation": False}, PIPES), "boundary"),
    ("config/conflict", job({"wall_clock_breakdown": True}, PIPES), "steps_per_print"),
    ("config/conflict", job({ZERO: {"stage": 2, "reduce_scatter": False}}, MOE), "experts need"),
    ("config/conflict", job({ZERO: {"stage": 3}}, MOE), "MoE layer"),
    ("config/conflict", job({ZERO: {"stage": 3, "zero_hpz_partition_size": 3}}), "does not divide the number of ranks"),
    ("config/conflict", job({"sequence_parallel_size": 8}, model=GQA, ranks=8), "heads"),
    ("config/conflict", job({"sequence_parallel_size": 3}, model=GQA, ranks=3), "heads"),
    ("config/ineffective", job({"compile": {"deepcompile": True}}, STARTS % ""), "engine.compile()"),
    ("config/auto-unresolved", hf({ZERO: {"stage": 2, "reduce_bucket_size": "auto"}}, model=NO_SIZE), "hidden_size"),
    ("config/hf-mismatch", hf({ZERO: {"stage": 2}}, "--max_grad_norm", "0.5"), "clips at its default 1"),
    ("config/hf-mismatch", hf({ZERO: {"stage": 2}}, "--max_grad_norm", "0.5", release="0.16.4"), "does not clip"),
    ("autograd/direct-backward", job({}, STARTS % "" + "loss.backward()\n"), "refuses it"),
    ("autograd/direct-backward", job({"fp16": {"enabled": True}, ZERO: {"stage": 2}}, BARE), "refuses it"),
    ("autograd/direct-backward", job({"fp16": {"enabled": True, "loss_scale": 8}, ZERO: {"stage": 2}}, BARE), "never"),
    ("loss-scale/static", job({"fp16": {"enabled": True, "loss_scale": 128}, ZERO: {"stage": 1}}), "held at 128"),
]
NOT_FOUND = [
    ("config/conflict", job({ZERO: {"stage": 1}}, ACCUMULATES)),
    ("config/conflict", job({ZERO: {"stage": 2}}, ACCUMULATES.replace("engine.no_sync", "accelerator.no_sync"))),
    ("config/ineffective", job({"tensorboard": {"enabled": False, "output_path": "logs"}})),
    ("config/ineffective", job({"tensorboard": {}, "fp16": {}})),
    ("config/ineffective", job({"data_efficiency": {"seed": 3, "data_sampling": {"num_workers": 0}}})),
    ("config/ineffective", job({"curriculum_learning": {"min_difficulty": 8}})),
    ("config/ineffective", job({"flops_profiler": {"enabled": True, "profile_step": 0}})),
    ("config/ineffective", job({ZERO: {"stage": 2, "reduce_bucket_size": 2e9}})),
    ("config/ineffective", job({"pipeline": {"stages": 2}}, "net = PipelineModule(layers)")),
    ("config/ineffective", job(COMPRESSES, "init_compression(net, 'ds.json')\n" + STARTS % "", release="0.18.2")),
    ("config/ineffective", job(CURRICULUM, STARTS % ", training_data=rows")),
    ("config/ineffective", job(CURRICULUM)),
    ("config/batch-size", job({"elasticity": ELASTIC}, release="0.16.4", ranks=8, batch=False)),
    ("config/batch-size", job({"elasticity": ELASTIC, "train_batch_size": 3}, release="0.16.4", ranks=8)),
    ("config/batch-size", job({"elasticity": ELASTIC, "train_batch_size": 8}, release="0.19.8")),
    ("config/batch-size", job({"train_batch_size": 8}, "net = PipelineModule(layers, num_stages=2)")),
    ("config/batch-size", job({"train_batch_size": 4, "tensor_parallel": {"autotp_size": 2}})),
    ("config/batch-size", job({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}})),
    ("config/conflict", job({"elasticity": ELASTIC | {"ignore_non_elastic_batch_info": True}}, release="0.16.4")),
    ("config/conflict", job({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, release="0.18.2")),
    (
        "config/conflict",
        job({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 0, "total_num_steps": 9}}}),
    ),
    ("config/conflict", job({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})),
    ("config/conflict", job({"scheduler": {"type": "WarmupLR", "params": {}}})),
    ("config/conflict", job({"amp": {"enabled": True}}, release="0.16.4")),
    ("config/conflict", job({"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}})),
    ("config/conflict", job(zenflow(select_interval=4, update_interval=2))),
    ("config/conflict", job(sampling(curriculum_learning=METRIC | {"enabled": False}))),
    ("config/conflict", job(sampling(dynamic_batching={"enabled": True, "max_tokens": 100}))),
    ("config/conflict", job(OFFLOADED, "opt = DeepSpeedCPUAdam(ps)\n" + STARTS % ", optimizer=opt")),
    ("config/conflict", job(OFFLOADED | {"zero_force_ds_cpu_optimizer": False}, STARTS % ", optimizer=opt")),
    ("config/conflict", job({ZERO: {"stage": 1}}, STARTS % ", **more")),
    ("config/conflict", job({ZERO: {"stage": 1}}, STARTS % ", optimizer=opt")),
    ("config/conflict", job({ZERO: {"stage": 1}}, STARTS % "", logs=LogFacts(sources=("train.log",)))),
    ("config/conflict", job({}, "net = PipelineModule([TiedLayerSpec('e', E)])", model=TIED)),
    ("config/conflict", job({}, "net = PipelineModule(layers)", model=replace(TIED, tied=False))),
    ("config/conflict", job({"wall_clock_breakdown": True, "steps_per_print": 10}, PIPES)),
    ("config/conflict", job({"wall_clock_breakdown": True})),
    ("config/conflict", job({ZERO: {"stage": 3}}, "from mine import MoE\nMoE(8)\n")),
    ("config/conflict", job({ZERO: {"stage": 3, "zero_hpz_partition_size": 2}})),
    ("config/conflict", job({ZERO: {"stage": 3, "zero_hpz_partition_size": 8}})),
    ("config/conflict", job({"sequence_parallel_size": 2}, model=GQA)),
    ("config/ineffective", job({"compile": {"deepcompile": True}}, STARTS % "" + "engine.compile()\n")),
    ("config/auto-unresolved", hf({ZERO: {"stage": 2, "reduce_bucket_size": "auto"}}, model=SIZED)),
    ("config/hf-mismatch", hf({ZERO: {"stage": 2}}, "--max_grad_norm", "1.0")),
    ("config/hf-mismatch", hf({ZERO: {"stage": 2}, "gradient_clipping": "auto"}, "--max_grad_norm", "0.5")),
    ("autograd/direct-backward", job({}, STARTS % "" + "engine.backward(loss)\n")),
    ("autograd/direct-backward", job({ZERO: {"stage": 2}, "bf16": {"enabled": True}}, BARE)),
    ("autograd/direct-backward", job({}, BARE, release="0.18.2")),
    ("autograd/direct-backward", job({}, "loss.backward()\n")),
    ("loss-scale/static", job({"fp16": {"enabled": True, "loss_scale": 0}, ZERO: {"stage": 1}})),
    ("loss-scale/static", job({"fp16": {"enabled": False, "loss_scale": 128}, ZERO: {"stage": 1}})),
]


@pytest.mark.parametrize(("identifier", "case", "word"), FOUND)
def test_found(identifier, case, word):
    assert any(word in finding.cause and finding.evidence for finding in found_by_all(case, identifier))


@pytest.mark.parametrize(("identifier", "case"), NOT_FOUND)
def test_not_found(identifier, case):
    assert not [finding for finding in found_by_all(case, identifier) if finding.severity != "info"]


@pytest.mark.parametrize(
    "data",
    [
        {"zero_force_ds_cpu_optimizer": False},
        {"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}},
        {"data_parallel_size": 4},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"autotuning": {"enabled": True}},
        {"pipeline": {"stages": 2}},
        {"activation_checkpointing": {"partition_activations": True}},
        {"aio": {"block_size": 1048576}},
    ],
)
def test_what_is_only_noted(data):
    (finding,) = [f for rule in DIAGNOSES for f in rule.examine(job(data)) if f.id == "config/ineffective"]
    assert finding.severity == "info"


def test_a_script_that_checkpoints_by_deepspeed_reads_the_section():
    data = {"activation_checkpointing": {"partition_activations": True}}
    assert not found_by_all(job(data, "deepspeed.checkpointing.configure(None, 'ds.json')"), "config/ineffective")
