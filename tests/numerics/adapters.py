"""What each of two ranks runs on a frozen base with low-rank adapters: real DeepSpeed, one case after another.

    torchrun --nproc_per_node 2 -m tests.numerics.adapters FOLDER STAGE:TYPES:FAULT:MODE…

TYPES is `bf16` (DeepSpeed casts all), or `mixed`: a bf16 base with fp32 adapters, in an engine without a precision of
its own. Each rank writes FOLDER/RANK.json: by key the hits, warnings, problems, an exception, and what was trained.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from dsdoctor.numerics import attach
from tests.numerics.cases import config_for
from tests.numerics.rank_script import run_keys

NAN = float("nan")
STEPS = 3


class Adapted(nn.Module):
    """A frozen layer, and beside it a product of two small ones that is trained."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_a = nn.Linear(8, rank, bias=False)
        self.lora_b = nn.Linear(rank, 8, bias=False)
        self.act = nn.Identity()
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        low = self.act(self.lora_a(x.to(self.lora_a.weight.dtype)))
        out: Tensor = self.base(x) + self.lora_b(low).to(x.dtype)
        return out


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, *, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


class Wrapped(nn.Module):
    """The script calls a wrapper, which calls the model inside by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = Base()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_model(hidden=x)
        return out


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * 0)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * 0).pow(2)) + x


def built(fault: str) -> nn.Module:
    torch.manual_seed(0)
    model = Wrapped()
    middle: Any = model.base_model.layers[1]
    if fault == "adapter-weight":
        middle.lora_b.weight.data[0, 0] = NAN
    elif fault == "base-weight":
        middle.base.weight.data[0, 0] = NAN
    elif fault == "adapter-forward":
        middle.act = Log()
    elif fault == "adapter-backward":
        middle.act = Root()
        nn.init.ones_(middle.lora_b.weight)
    return model


def run(stage: int, types: str, fault: str, mode: Any) -> dict[str, Any]:
    model = built(fault)
    settings = config_for(stage, types if types == "bf16" else "fp32", lr=1e-3)
    if types == "mixed":
        for layer in model.base_model.layers:  # type: ignore[union-attr]
            layer.base.bfloat16()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hits: list[Any] = []
    try:
        engine = deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]
    except Exception as error:
        return {"hits": hits, "error": f"{type(error).__name__}: {error}", "problems": [], "warnings": []}
    torch.manual_seed(torch.distributed.get_rank())
    detector = attach(engine, mode=mode, on_first_bad=lambda found, *_: hits.append(asdict(found)))
    error_text = None
    try:
        for _ in range(STEPS):
            engine.backward(engine(torch.randn(4, 8).bfloat16()).float().pow(2).mean())
            engine.step()
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"
    detector.detach()
    return {"hits": hits, "error": error_text, "problems": detector.problems, "warnings": detector.warnings}


if __name__ == "__main__":
    run_keys(lambda stage, types, fault, mode: run(int(stage), types, fault, mode))
