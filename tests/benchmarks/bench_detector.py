"""What the detector costs: the CPU time of a training step under it, as a ratio to the plain step of the same run.

    python tests/benchmarks/bench_detector.py [--rounds N] [--models llama,gpt2] [--variants plain,sentinel,...]

Two small models built from config (hidden 256, 6 layers, sequence 128, batch 4, fp32, AdamW) are trained on one thread.
Each variant has a model of its own with the same weights; in every round each variant does one step, in a new random
order, so that a busy machine hits all alike. What counts is the median of the process's CPU time, and for a GPU
(`--device cuda`) that of the clock after a synchronisation. Ratios of 1.02 and less are within the noise of a busy
machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers.debug_utils import DebugUnderflowOverflow

from dsdoctor.numerics import attach

HIDDEN, LAYERS, HEADS, VOCABULARY, SEQUENCE, BATCH = 256, 6, 8, 4096, 128, 4
Guard = Callable[[], AbstractContextManager[Any]]


def llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=688,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=SEQUENCE,
        )
    )


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=SEQUENCE
    )
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def nothing(_: Any) -> Guard:
    return nullcontext


def sentinel(model: Any) -> Guard:
    attach(model, mode="sentinel")
    return nullcontext


def frames(model: Any) -> Guard:
    attach(model, mode="frames")
    return nullcontext


def recorded(model: Any) -> Guard:
    """What `dsdoctor nan` does: frames, and the numbers of every tensor into a file."""
    folder = TemporaryDirectory()
    attach(model, mode="frames", record=folder.name)
    return partial(nullcontext, folder)  # which lives as long as the guard


def transformers_class(model: Any) -> Guard:
    DebugUnderflowOverflow(model)
    return nullcontext


def anomaly(_: Any) -> Guard:
    return partial(torch.autograd.detect_anomaly, check_nan=True)


VARIANTS: dict[str, Callable[[Any], Guard]] = {
    "plain": nothing,
    "sentinel": sentinel,
    "frames": frames,
    "recorded": recorded,
    "transformers": transformers_class,
    "anomaly": anomaly,
}


class Trainee:
    """A model under one variant, and the times that its steps took."""

    def __init__(self, build: Callable[[], Any], variant: str, device: str) -> None:
        torch.manual_seed(0)
        self.model = build().train().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = VARIANTS[variant](self.model)
        self.times: list[float] = []
        self.losses: list[float] = []
        self._clock = time.process_time if device == "cpu" else _device_clock

    def step(self, tokens: torch.Tensor) -> None:
        """One optimizer step, timed. The dropout of a step is the same under every variant."""
        torch.manual_seed(len(self.losses))
        start = self._clock()
        with self.guard():
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(self._clock() - start)
        self.losses.append(loss.item())


def _device_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(build: Callable[[], Any], variants: list[str], rounds: int, warm_up: int, device: str) -> list[Trainee]:
    """Train all variants in interleaved rounds; the times of the first rounds are thrown away."""
    trainees = [Trainee(build, variant, device) for variant in variants]
    numbers = random.Random(0)
    for index in range(warm_up + rounds):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE)).to(device)
        for trainee in numbers.sample(trainees, len(trainees)):
            trainee.step(tokens)
        if index + 1 == warm_up:
            for trainee in trainees:
                trainee.times.clear()
    return trainees


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = ["plain", *(name for name in arguments.variants.split(",") if name != "plain")]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.device}, one thread")
    for name in arguments.models.split(","):
        trained = measure(MODELS[name], variants, arguments.rounds, arguments.warm_up, arguments.device)
        ratios = _report(name, variants, trained)
        if {"frames", "transformers"} <= set(ratios):
            share = (ratios["frames"] - 1) / (ratios["transformers"] - 1)
            print(f"{name}: frames have {share:.2f} of the overhead of the Transformers class")
    return 0


def _report(name: str, variants: list[str], trained: list[Trainee]) -> dict[str, float]:
    plain = trained[0]
    ratios = {}
    for variant, trainee in zip(variants, trained, strict=True):
        middle = statistics.median(trainee.times)
        ratios[variant] = middle / statistics.median(plain.times)
        pairs = statistics.median(a / b for a, b in zip(trainee.times, plain.times, strict=True))
        equal = "bit-equal" if trainee.losses == plain.losses else "DIFFERENT"
        print(
            f"{name:6} {variant:13} {1e3 * middle:7.1f} ms  x{ratios[variant]:.3f}  "
            f"(paired {pairs:.3f}, losses {equal})"
        )
    return ratios


if __name__ == "__main__":
    sys.exit(main())
