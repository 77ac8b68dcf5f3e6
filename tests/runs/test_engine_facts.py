"""What is known of a model before DeepSpeed touches it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from dsdoctor.runs.engine_facts import engine_facts, model_facts


class Tied(nn.Module):
    """Embedding 10 x 4 shared with the output, a frozen bias-free Linear 4 x 4, and one bf16 parameter of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight
        self.extra = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))


def test_tied_parameters_count_once() -> None:
    facts = model_facts(Tied(), None, None)
    assert (facts.class_name, facts.parameters, facts.trainable) == ("Tied", 40 + 16 + 3, 40 + 3)
    assert facts.largest_layer == 40
    assert facts.dtypes == (("bfloat16", 3), ("float32", 56))
    assert (facts.model_type, facts.trained_in, facts.parameter_groups) == (None, None, 1)


def test_partitioned_parameters_count_in_full() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.data = torch.empty(0)
    model.weight.ds_numel = 16  # as zero.Init leaves them
    facts = model_facts(model, None, None)
    assert (facts.parameters, facts.trainable, facts.largest_layer) == (16, 16, 16)
    assert facts.partitioned
    assert not model_facts(nn.Linear(4, 4), None, None).partitioned


def test_hugging_face_config_and_parameter_groups() -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(model_type="t5", torch_dtype=torch.bfloat16)  # type: ignore[assignment]
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    facts = model_facts(model, groups, None)
    assert (facts.model_type, facts.trained_in, facts.parameter_groups) == ("t5", "bfloat16", 2)
    assert model_facts(model, None, torch.optim.SGD(groups, lr=1)).parameter_groups == 2


def test_optimizer_is_the_scripts_or_the_configs() -> None:
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    named = engine_facts(config, framework="deepspeed", optimizer=None, world_size=1)
    passed = engine_facts(
        config, framework="deepspeed", optimizer=torch.optim.SGD([torch.zeros(1)], lr=1), world_size=1
    )
    assert (named.optimizer, passed.optimizer, named.zero_stage) == ("AdamW", "SGD", 2)
