"""Our reading of a config against the installed DeepSpeed itself."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import config as rules
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.batch import complete
from dsdoctor.dsconfig.load import with_text
from dsdoctor.dsconfig.schema import releases, schema_for
from dsdoctor.fixing import fix
from tests.dsconfig import mutations
from tests.dsconfig.real import INSTALLED, ask

ROOT = Path(__file__).parents[2]

in_table = pytest.mark.skipif(INSTALLED not in releases(), reason="the table does not hold the installed release")
pytestmark = in_table


def test_the_table_is_what_the_installed_release_accepts():
    reader = [sys.executable, "-m", "dsdoctor.dsconfig.introspect"]
    done = subprocess.run(reader, capture_output=True, text=True, timeout=180, cwd=ROOT)
    line = next(line for line in done.stdout.splitlines() if line.startswith("TABLE "))
    table = json.loads(line.removeprefix("TABLE "))
    schema = schema_for(INSTALLED)
    assert set(schema.sections) == set(table["sections"])
    for path, section in table["sections"].items():
        assert {name: key.default for name, key in schema.sections[path].keys.items()} == {
            name: entry.get("default") for name, entry in section["keys"].items()
        }, path
    assert dict(schema.removed) == table["removed"]
    assert list(schema.optimizer_names) == table["optimizers"]["names"]


@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_batch_arithmetic_is_deepspeeds(ranks):
    values = [None, 1, 2, 3, 8, 12, 48]
    triples = list(itertools.product(values, repeat=3))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    configs = [{n: v for n, v in zip(names, triple, strict=True) if v is not None} for triple in triples]
    for triple, answer in zip(triples, ask(configs, world_size=ranks), strict=True):
        ours = complete(*triple, ranks=ranks)
        assert (ours.problem is None) == (answer.error is None), (triple, ours, answer)
        if ours.problem is None:
            assert (ours.train, ours.micro, ours.steps) == (answer.train, answer.micro, answer.steps)


BASE = {"train_micro_batch_size_per_gpu": 1}
ZERO = "zero_optimization"
ODD = [
    # values in typed sections, as pydantic converts or refuses them
    {ZERO: {"stage": "3"}},
    {ZERO: {"stage": 4}},
    {ZERO: {"stage": 2.0}},
    {ZERO: {"stage": "two"}},
    {ZERO: {"stage": None}},
    {ZERO: {"reduce_bucket_size": 1e8}},
    {ZERO: {"reduce_bucket_size": 0.5}},
    {ZERO: {"reduce_bucket_size": 0}},
    {ZERO: {"reduce_bucket_size": "5e8"}},
    {ZERO: {"reduce_bucket_size": "500000"}},
    {ZERO: {"overlap_comm": "true"}},
    {ZERO: {"overlap_comm": "maybe"}},
    {ZERO: {"overlap_comm": 1}},
    {ZERO: {"overlap_comm": 2}},
    {ZERO: {"overlap_comm": None}},
    {ZERO: {"stage": 3, "offload_param": "cpu"}},
    {ZERO: {"stage": 3, "offload_param": {"device": "CPU"}}},
    {ZERO: {"stage": 3, "offload_param": {"device": "cpu", "nvme_path": 3}}},
    {ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}},
    {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    {ZERO: True},
    {ZERO: 2},
    {ZERO: {"leaf_module": {"classes": "Block"}}},
    {"fp16": {"enabled": "yes"}},
    {"fp16": {"enabled": "True,"}},
    {"fp16": {"enabled": True, "min_loss_scale": 0.5}},
    {"fp16": {"enabled": True, "loss_scale_window": 0}},
    {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 0}},
    {"fp16": {"enabled": True, "loss_scale": "128"}},
    {"fp16": True},
    {"bf16": {"enabled": True, "loss_scale": 0}},
    {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    # plain sections
    {"train_micro_batch_size_per_gpu": "2"},
    {"wall_clock_breakdown": "true"},
    {"communication_data_type": "float32"},
    {"communication_data_type": "FP32"},
    {"communication_data_type": 16},
    {"gradient_allreduce_op": "sum"},
    {"gradient_allreduce_op": "sum", ZERO: {"stage": 3}},
    {"checkpoint": {"tag_validation": "fail"}},
    {"checkpoint": {"tag_validation": "never"}},
    {"optimizer": "AdamW"},
    # keys
    {ZERO: {"stage": 1, "algather_bucket_size": 5}},
    {ZERO: {"stage": 3, "prefetch_bucket_size": 5}},
    {ZERO: {"stage": 2, "cpu_offload": True}},
    {ZERO: {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
    {ZERO: {"stage": 3, "mics_shard_size": 2}},
    {"amp": {"enabled": False}},
    {"bfloat16": {"enabled": True}},
    {"activation_checkpointing": {"partition_activation": True}},
    {"flops_profiler": {"enabled": True, "depth": 2}},
    {"bf16": {"bf16_optimizer_states": True}},
    {"bf16": {"bf16_master_weights_and_grads": True}, ZERO: {"stage": 0}},
    {ZERO: {"stage": 0, "compute_grad_norm": False}},
    # data
    {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
    {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": False, "x": 1}}}},
    {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
    {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 8}}}},
    {"expert_parallel": {"enabled": True, "autoep_size": 1, "no_such_key": 1}},
]


def findings(config):
    facts = load_config(config, release=INSTALLED, world_size=1, framework="deepspeed")
    return [finding for rule in rules.DIAGNOSES for finding in rule.examine(Case(config=facts))]


def test_an_error_exactly_where_deepspeed_refuses_the_config():
    configs = [BASE | extra for extra in ODD]
    for config, answer in zip(configs, ask(configs), strict=True):
        errors = [finding for finding in findings(config) if finding.severity == "error"]
        assert bool(errors) == (answer.error is not None), (config, errors, answer.error)


READY = sorted((ROOT / "configs").glob("*.json"))


def test_deepspeed_takes_the_ready_configs():
    plain = [path for path in READY if not path.name.startswith("hf_") and "nvme" not in path.name]
    assert len(plain) >= 6
    for path, answer in zip(plain, ask([json.loads(path.read_text()) for path in plain]), strict=True):
        assert answer.error is None, path


def test_fixes_of_refused_configs_make_them_acceptable():
    """Every patch that is offered for a config that DeepSpeed refuses leads to one that it takes."""
    from dsdoctor.dsconfig import patch

    fixed = []
    for extra in ODD:
        for finding in findings(BASE | extra):
            if finding.severity == "error":
                fixed += [(finding, patch.apply(BASE | extra, fix.patch)) for fix in finding.fixes if fix.patch]
    assert len(fixed) > 10
    for (finding, config), answer in zip(fixed, ask([config for _, config in fixed]), strict=True):
        assert answer.error is None, (finding, config)


def test_what_safe_fixes_leave_without_an_error_loads():
    """Configs that DeepSpeed refuses, of every kind, after the fixes that are applied unasked."""
    tried = [config for config in random.Random(3).sample(mutations.configs(INSTALLED), 250) if findings(config)]
    fixed = []
    for config in tried:
        text = json.dumps(config)
        facts = with_text(load_config({}, release=INSTALLED, world_size=1, framework="deepspeed"), text)
        done = fix(Case(config=facts), text)
        if done.applied and not [f for f in findings(json.loads(done.text)) if f.severity == "error"]:
            fixed.append(json.loads(done.text))
    assert len(fixed) > 5
    for config, answer in zip(fixed, ask(fixed), strict=True):
        assert answer.error is None, config
