"""How true the memory model is: predicted against measured bytes of real DeepSpeed engines.

    python tests/benchmarks/bench_memory.py            the reduced set
    python tests/benchmarks/bench_memory.py --full     all cases; writes tests/results/memory.md

Runs on the CPU accelerator, where model tensors are host tensors, with one process a rank and one such group for each
world size. `memory_rank` measures, `dsdoctor.memory` predicts from the ds_config and the list of parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsdoctor.memory import host, moments  # noqa: E402
from dsdoctor.memory.activations import NOTHING, Activations  # noqa: E402
from dsdoctor.memory.facts import Holding  # noqa: E402
from dsdoctor.memory.inventory import Inventory  # noqa: E402
from dsdoctor.memory.parameter import Parameter  # noqa: E402
from dsdoctor.memory.setup import Setup, setup_of  # noqa: E402

RESULTS = ROOT / "tests" / "results" / "memory.md"
TIMEOUT = 3000.0
GPT2 = {"model_type": "gpt2", "n_embd": 192, "n_layer": 4, "n_head": 4, "vocab_size": 2048, "n_positions": 256}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 2048,
}
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"kind": "mlp", "hidden": 384, "layers": 8},
    "gpt2": {"kind": "gpt2", "config": GPT2},
    "lora": {"kind": "lora", "config": LLAMA, "rank": 8},
    "llama": {"kind": "llama", "config": LLAMA},
    "llama-checkpointing": {"kind": "llama", "config": LLAMA, "checkpointing": True},
}
SMALL_BUCKET = 200_000


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One moment of one case. Bytes of one rank, with its share of the host, without the process itself."""

    case: str
    moment: str
    predicted: int
    measured: int
    estimator: int | None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def cases(*, full: bool) -> Iterator[dict[str, Any]]:
    """Stage x precision x offload x model x bucket with hardly any activations, then switches, then activations."""
    for stage, precision, offload, model, bucket in itertools.product(
        range(4), PRECISIONS, OFFLOADS, ("mlp", "gpt2", "lora"), ("small", "default")
    ):
        reduced = bucket == "small" and model == "gpt2" and precision == "bf16"
        reduced = reduced or (bucket == "small" and model == "mlp" and precision == "fp32" and offload == "none")
        if possible(stage, offload) and (full or reduced):
            name = f"{model} stage {stage} {precision} offload {offload} bucket {bucket}"
            yield case(name, model, config(stage, precision, offload, bucket), TINY)
    for name, made in switches():
        if full or "reduced" in name:
            yield case(f"gpt2 {name}", "gpt2", made, TINY)
    for stage, precision, model in itertools.product(range(4), ("fp32", "bf16"), BATCHES):
        if full or (precision == "bf16" and stage in (0, 2)):
            name = f"{model} stage {stage} {precision} with activations"
            yield case(name, model, config(stage, precision, "none", "small"), BATCHES[model])


PRECISIONS = ("fp32", "bf16", "fp16")
OFFLOADS = ("none", "optimizer", "both")
TINY = {"rows": 1, "seq": 4}
BATCHES = {
    "mlp": {"rows": 2048},
    "gpt2": {"rows": 4, "seq": 128},
    "llama": {"rows": 4, "seq": 128},
    "llama-checkpointing": {"rows": 4, "seq": 128},
    "lora": {"rows": 4, "seq": 128},
}


def possible(stage: int, offload: str) -> bool:
    return stage == 3 or (offload == "none" or (offload == "optimizer" and stage > 0))


def case(name: str, model: str, made: dict[str, Any], batch: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "model": MODELS[model], "config": made, "batch": batch}


def switches() -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys that move memory, one at a time."""
    accumulate = {"data_types": {"grad_accum_dtype": "fp32"}}
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    for stage in (1, 2, 3):
        base = config(stage, "bf16", "none", "small")
        yield f"stage {stage} bf16 accumulated in fp32", base | accumulate
        yield f"stage {stage} bf16 with 2 micro-steps", base | {"gradient_accumulation_steps": 2}
    for stage in (2, 3):
        yield f"stage {stage} bf16 with bf16 masters and states", config(stage, "bf16", "none", "small") | low
    offloaded = config(2, "bf16", "optimizer", "small")
    yield "stage 2 bf16 offload optimizer with 2 micro-steps", offloaded | {"gradient_accumulation_steps": 2}
    for stage in (1, 2):
        base = config(stage, "bf16", "none", "small")
        yield (
            f"stage {stage} bf16 with overlap_comm",
            base | {"zero_optimization": base["zero_optimization"] | {"overlap_comm": True}},
        )
    base = config(3, "bf16", "none", "small")
    for key, value in (
        ("stage3_max_live_parameters", 400_000),
        ("stage3_max_reuse_distance", 400_000),
        ("sub_group_size", 200_000),
    ):
        yield f"stage 3 bf16 with {key} {value}", base | {"zero_optimization": base["zero_optimization"] | {key: value}}
    persistent = base["zero_optimization"] | {"stage3_param_persistence_threshold": 100_000}
    yield "stage 3 bf16 with default persistence", base | {"zero_optimization": persistent}


def config(stage: int, precision: str, offload: str, bucket: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 2_000}
    if bucket == "small":
        zero |= {"reduce_bucket_size": SMALL_BUCKET, "allgather_bucket_size": SMALL_BUCKET}
        zero |= {"stage3_prefetch_bucket_size": SMALL_BUCKET}
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "both":
        zero["offload_param"] = {"device": "cpu"}
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": zero,
    }
    return made | ({precision: {"enabled": True}} if precision != "fp32" else {})


def measure(some: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Run the cases in one group of processes. Raises RuntimeError where nothing was measured."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder, "cases.json"), Path(folder, "results.json")
        given.write_text(json.dumps(list(some)), encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = [_start(rank, ranks, port, given, result) for rank in range(ranks)]
        try:
            codes = [process.wait(TIMEOUT) for process in processes]
        except subprocess.TimeoutExpired:
            codes = []
            print(f"the ranks took more than {TIMEOUT:g} s: what they measured until then", file=sys.stderr)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not result.exists():
            raise RuntimeError(f"the ranks ended with {codes}")
        found: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
        return found


def _start(rank: int, ranks: int, port: int, given: Path, result: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tests.benchmarks.memory_rank", str(given), str(result)]
    quiet = None if os.environ.get("BENCH_RAISE") else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)


def predict(result: dict[str, Any], ranks: int, activations: Activations = NOTHING) -> dict[str, int]:
    """Bytes by moment for a measured case: the device's and one rank's share of the host's."""
    inventory = Inventory(parameters=tuple(Parameter(*one) for one in result["parameters"]), tied=result["tied"])
    setup = setup_of(
        result["config"],
        inventory,
        release="0.19.8",
        device="cpu",
        ranks=ranks,
        ranks_per_host=ranks,
        activations=activations,
        untouched=True,
    )
    found = {one.name: _of_a_rank(setup, one.holding) for one in host.host_moments(setup)}
    found["initialize"] = max(found[name] for name in (host.CONSTRUCTION, moments.PARTITION, moments.INITIALIZE))
    held = host.held(setup)
    found["after step"] = _of_a_rank(setup, held) + _of_a_device(moments.lasting(setup))
    found["after backward"] = _of_a_rank(setup, held) + _of_a_device(moments.end_of_backward(setup))
    return found


def _of_a_rank(setup: Setup, holding: Holding) -> int:
    return (holding.total - holding.overhead) // setup.ranks_per_host


def _of_a_device(holding: Holding) -> int:
    return holding.total - holding.overhead


def measured(result: dict[str, Any]) -> dict[str, int]:
    """Bytes by moment as measured."""
    phases = {one["name"]: one for one in result["phases"]}
    step = [name for name in phases if name.startswith("step 1")]
    peak = {name: one["peak"] for name, one in phases.items()}
    return {
        "initialize": peak["initialize"],
        moments.FIRST_BACKWARD: peak["step 0 micro 0 backward"],
        moments.FIRST_STEP: peak["step 0 micro 0 step"],
        moments.FORWARD: max(peak[name] for name in step if name.endswith("forward")),
        moments.BACKWARD: max(peak[name] for name in step if name.endswith("backward")),
        moments.STEP: max(peak[name] for name in step if name.endswith("step")),
        "after backward": phases["step 1 micro 0 backward"]["end"],
        "after step": phases["step 1 micro 0 step"]["end"],
    }


def compare(results: Sequence[dict[str, Any]], ranks: int) -> list[Compared]:
    found = []
    for result in results:
        if "error" in result:
            print(f"{result['name']}, {ranks} ranks: not measured: {result['error']}", file=sys.stderr)
            continue
        guess, seen = predict(result, ranks), measured(result)
        name = f"{result['name']}, {ranks} ranks"
        found += [
            Compared(
                case=name, moment=moment, predicted=guess[moment], measured=seen[moment], estimator=result["estimator"]
            )
            for moment in seen
        ]
    return found


def show(found: Sequence[Compared]) -> Iterator[str]:
    for one in found:
        estimator = f"{one.estimator:>12,}" if one.estimator is not None else f"{'none':>12}"
        yield f"{one.case:<62} {one.moment:<22} {one.measured:>14,} {one.predicted:>14,} {one.error:>+7.1%} {estimator}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--save", help="keep the raw measurements here")
    arguments = parser.parse_args()
    found = []
    for ranks in arguments.ranks:
        chosen = [one for one in cases(full=arguments.full) if arguments.only in one["name"]]
        random.Random(0).shuffle(chosen)  # what a time limit leaves is a fair sample
        results = measure(chosen, ranks)
        if arguments.save:
            Path(f"{arguments.save}.{ranks}.json").write_text(json.dumps(results), encoding="utf-8")
        found += compare(results, ranks)
    for line in show(found):
        print(line)
    print(summary(found))


def summary(found: Sequence[Compared]) -> str:
    """Median and worst error, and the worst that was predicted too low."""
    errors = [abs(one.error) for one in found]
    low = min(one.error for one in found)
    middle = statistics.median(errors)
    return f"{len(found)} comparisons: median error {middle:.1%}, worst {max(errors):.1%}, lowest {low:+.1%}"


if __name__ == "__main__":
    main()
