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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from dsdoctor.memory import host, moments  # noqa: E402
from dsdoctor.memory.activations import Activations, Workload  # noqa: E402
from dsdoctor.memory.facts import Holding  # noqa: E402
from dsdoctor.memory.hf_config import shape_of  # noqa: E402
from dsdoctor.memory.inventory import Inventory  # noqa: E402
from dsdoctor.memory.parameter import Parameter  # noqa: E402
from dsdoctor.memory.setup import Setup, setup_of  # noqa: E402
from dsdoctor.runs import extensions  # noqa: E402
from tests.benchmarks.memory_cases import cases  # noqa: E402

RESULTS = ROOT / "tests" / "results" / "memory.md"
TIMEOUT = float(os.environ.get("BENCH_TIMEOUT", "3000"))
"""Seconds for all cases of one world size; what was measured until then counts."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One moment of one case. Bytes of one rank, with its share of the host, without the process itself."""

    case: str
    moment: str
    predicted: int
    measured: int
    estimator: int | None

    @property
    def with_activations(self) -> bool:
        return "with activations" in self.case

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


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
        extensions.VARIABLE: str(extensions.prepared(extensions.cache_folder())),
    }
    command = [sys.executable, "-m", "tests.benchmarks.memory_rank", str(given), str(result)]
    quiet = None if os.environ.get("BENCH_RAISE") else subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)


def of_the_stack(result: dict[str, Any]) -> Activations | None:
    """Activations of the plain stack, counted by hand: input and result of each layer.

    The loss squares its input: in backward its root's derivative and two products are there as well.
    """
    if result["model"]["kind"] != "mlp":
        return None
    weight = 2 if any(name in result["config"] for name in ("bf16", "fp16")) else 4
    one = result["batch"]["rows"] * result["model"]["hidden"]
    cast = 0 if weight == 4 else 4
    return Activations(
        saved=weight * one * (result["model"]["layers"] + 1),
        loss=(4 * 4 + cast) * one,
        loss_forward=(4 + cast) * one,
        source="counted by hand",
    )


def work_of(result: dict[str, Any]) -> Workload:
    """What a language model works on; on a CPU a dropout mask has the size of an activation."""
    spec, batch = result["model"], result["batch"]
    return Workload(
        micro_batch=batch["rows"],
        sequence=batch.get("seq"),
        checkpointing=bool(spec.get("checkpointing")),
        frozen=spec["kind"] == "lora",
        mask=2 if any(name in result["config"] for name in ("bf16", "fp16")) else 4,
    )


def inventory(result: dict[str, Any]) -> Inventory:
    """The model of a measured case, as it was listed before DeepSpeed took it."""
    spec = result["model"].get("config")
    return Inventory(
        parameters=tuple(Parameter(*one) for one in result["parameters"]),
        tied=result["tied"],
        shape=shape_of(spec) if spec else None,
    )


def setup(result: dict[str, Any], ranks: int) -> Setup:
    """What the formulas take for a measured case."""
    return setup_of(
        result["config"],
        inventory(result),
        release="0.19.8",
        device="cpu",
        ranks=ranks,
        ranks_per_host=ranks,
        work=work_of(result),
        measured=of_the_stack(result),
        untouched=True,
    )


def predict(result: dict[str, Any], ranks: int) -> dict[str, int]:
    """Bytes by moment for a measured case: the device's and one rank's share of the host's."""
    one = setup(result, ranks)
    found = {moment.name: _of_a_rank(one, moment.holding) for moment in host.host_moments(one)}
    found["initialize"] = max(found[name] for name in (host.CONSTRUCTION, moments.PARTITION, moments.INITIALIZE))
    held = host.held(one)
    found["after step"] = _of_a_rank(one, held) + _of_a_device(moments.lasting(one))
    found["after backward"] = _of_a_rank(one, held) + _of_a_device(moments.end_of_backward(one))
    return found


def _of_a_rank(setup: Setup, holding: Holding) -> int:
    return (holding.total - holding.overhead) // setup.ranks_per_host


def _of_a_device(holding: Holding) -> int:
    return holding.total - holding.overhead


def measured(result: dict[str, Any]) -> dict[str, int]:
    """Bytes by moment as measured."""
    phases = {one["name"]: one for one in result["phases"]}

    def highest(step: int, kind: str) -> int:
        return max(
            one["peak"] for name, one in phases.items() if name.startswith(f"step {step}") and name.endswith(kind)
        )

    last = max(name for name in phases if name.startswith("step 1"))
    return {
        "initialize": phases["initialize"]["peak"],
        moments.FIRST_BACKWARD: highest(0, "backward"),
        moments.FIRST_STEP: highest(0, "step"),
        moments.FORWARD: highest(1, "forward"),
        moments.BACKWARD: highest(1, "backward"),
        moments.STEP: highest(1, "step"),
        "after backward": phases[last.removesuffix("step") + "backward"]["end"],
        "after step": phases[last]["end"],
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
    """One line a moment; the estimator's figure is its steady state, whatever the moment."""
    yield f"{'case':<66} {'moment':<21} {'measured':>14} {'predicted':>14} {'error':>7} {'estimator':>13}"
    for one in found:
        estimator = f"{one.estimator:>13,}" if one.estimator is not None else f"{'none':>13}"
        yield f"{one.case:<66} {one.moment:<21} {one.measured:>14,} {one.predicted:>14,} {one.error:>+7.1%} {estimator}"


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Median and worst error over moments, and over the highest moment of each case, beside DeepSpeed's estimator."""
    for title, some in (
        ("states and buffers", [one for one in found if not one.with_activations]),
        ("with activations", [one for one in found if one.with_activations]),
    ):
        if some:
            yield f"{title}, every moment: {_errors([one.error for one in some])}"
            peaks = _peaks(some)
            yield f"{title}, highest moment of a case: {_errors([one.error for one in peaks])}"
            estimated = [one.estimator / one.measured - 1 for one in peaks if one.estimator is not None]
            if estimated:
                yield f"{title}, DeepSpeed's own estimator (stages 2 and 3) on the same peaks: {_errors(estimated)}"


def _peaks(found: Sequence[Compared]) -> list[Compared]:
    """Of every case its highest moments, predicted and measured."""
    peaks = []
    for _, group in itertools.groupby(found, key=lambda one: one.case):
        some = list(group)
        highest = max(some, key=lambda one: one.measured)
        peaks.append(replace(highest, predicted=max(one.predicted for one in some)))
    return peaks


def _errors(errors: Sequence[float]) -> str:
    sizes = [abs(one) for one in errors]
    middle, worst = statistics.median(sizes), max(sizes)
    return f"{len(errors)} compared, median error {middle:.1%}, worst {worst:.1%}, lowest {min(errors):+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--save", metavar="PREFIX", help="keep the raw measurements")
    parser.add_argument("--again", metavar="PREFIX", help="predict anew for measurements that were kept")
    arguments = parser.parse_args()
    found = []
    for ranks in arguments.ranks:
        found += compare(_measured(arguments, ranks), ranks)
    lines = list(show(found))
    told = list(summary(found))
    print("\n".join((*lines, *told)))
    if arguments.full:
        RESULTS.write_text(_page(lines, told, cases_seen=len({one.case for one in found})), encoding="utf-8")


def _measured(arguments: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    if arguments.again:
        kept: list[dict[str, Any]] = json.loads(Path(f"{arguments.again}.{ranks}.json").read_text(encoding="utf-8"))
        return kept
    chosen = [one for one in cases(full=arguments.full) if arguments.only in one["name"]]
    random.Random(0).shuffle(chosen)  # what a time limit leaves is a fair sample
    results = measure(chosen, ranks)
    if arguments.save:
        Path(f"{arguments.save}.{ranks}.json").write_text(json.dumps(results), encoding="utf-8")
    return results


def _page(lines: Sequence[str], told: Sequence[str], *, cases_seen: int) -> str:
    whole = 2 * len(list(cases(full=True)))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("deepspeed", "torch", "transformers"))
    table, words = "\n".join(lines), "\n".join(f"- {line}" for line in told)
    return (
        "# The memory model against real DeepSpeed\n\n"
        f"Written by `python tests/benchmarks/bench_memory.py --full`: {versions}, CPU accelerator, 1 and 2 ranks.\n"
        f"{cases_seen} cases of {whole} were measured (a time limit cuts off a random rest).\n"
        "Bytes of one rank; the estimator is DeepSpeed's own, which has none for stages 0 and 1.\n\n"
        f"{words}\n\n```\n{table}\n```\n"
    )


if __name__ == "__main__":
    main()
