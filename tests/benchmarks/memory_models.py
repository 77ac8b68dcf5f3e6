"""The models of the memory benchmark: small, but of the shapes that count.

`mlp` is a plain stack, `gpt2` ties its embeddings, `llama` has grouped-query attention and a gated feed-forward,
`lora` is the same with everything frozen but low-rank adapters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def build(spec: dict[str, Any]) -> nn.Module:
    """A model in fp32 from its description: `kind` and the sizes."""
    kind = spec["kind"]
    if kind == "mlp":
        return Mlp(spec["hidden"], spec["layers"])
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"attn_implementation": "sdpa", **spec["config"]})
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=spec.get("attention", "sdpa"))
    if spec.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "lora":
        add_adapters(model, rank=spec["rank"])
    return model


def forward(engine: Any, spec: dict[str, Any], batch: dict[str, int]) -> tuple[Any, torch.Tensor]:
    """Output and loss on random data: `rows` x `hidden` for the stack, `rows` x `seq` tokens for a language model.

    The output is returned because training loops hold it during backward too.
    """
    if spec["kind"] == "mlp":
        dtype = next(engine.module.parameters()).dtype
        output = engine(torch.randn(batch["rows"], spec["hidden"], dtype=dtype))
        return output, output.float().pow(2).mean()
    tokens = torch.randint(0, spec["config"]["vocab_size"], (batch["rows"], batch["seq"]))
    output = engine(input_ids=tokens, labels=tokens, use_cache=False)
    return output, output.loss


class Mlp(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Adapter(nn.Module):
    """A frozen linear layer and a trainable low-rank detour around it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: nn.Module, *, rank: int) -> None:
    """Freeze everything and put adapters around the projections of queries and values."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name in ("q_proj", "v_proj"):
            if isinstance(getattr(module, name, None), nn.Linear):
                setattr(module, name, Adapter(getattr(module, name), rank))
