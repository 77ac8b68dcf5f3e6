"""What each of two ranks runs: cases one after another on real DeepSpeed, in one process.

    torchrun --nproc_per_node 2 -m tests.numerics.ranks FOLDER STAGE:CASE:MODE…

Each rank writes FOLDER/RANK.json: by STAGE:CASE:MODE the hits, the detector's own problems, and an exception.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import deepspeed
import torch

from dsdoctor.numerics import attach
from tests.numerics.cases import CASES, STEPS, config
from tests.numerics.rank_script import run_keys


def run(name: str, stage: int, mode: Any) -> dict[str, Any]:
    """One case: what the detector called back on this rank."""
    case, rank = CASES[name], torch.distributed.get_rank()
    torch.manual_seed(0)
    model = case.build()
    hits: list[Any] = []
    try:
        parameters = list(model.parameters())
        engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config(case, stage))[0]
    except Exception as error:
        return {"hits": hits, "error": f"{type(error).__name__}: {error}", "problems": [], "again": None}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.precision]
    torch.manual_seed(rank)
    detector = attach(engine, mode=mode, on_first_bad=lambda found, report, _: hits.append([asdict(found), report]))
    error_text = None
    try:
        for step in range(STEPS):
            batch = torch.randn(4, 8)
            if case.spoil is not None:
                case.spoil(rank, step, batch, model)
            batch = batch.to(dtype)
            engine.backward(case.loss(engine(batch), batch))
            engine.step()
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"
    detector.detach()
    again = asdict(detector.again) if detector.again is not None else None
    return {"hits": hits, "error": error_text, "problems": detector.problems, "again": again}


if __name__ == "__main__":
    run_keys(lambda stage, name, mode: run(name, int(stage), mode))
