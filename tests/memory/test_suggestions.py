"""Jobs that do not fit: the row that is recommended instead is run on real DeepSpeed, and held to the same limit.

On the CPU accelerator the host is the limit for all ranks together, so that the recommended config can be tried as it
is. What a GPU has that a CPU lacks (pinned blocks, PCIe, NVMe) cannot be tried here.
"""

import random

import pytest

from dsdoctor.dsconfig import patch
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.memory.estimate import estimate
from dsdoctor.memory.terms import CPU_PROCESS
from dsdoctor.runs.facts import ModelFacts
from tests.benchmarks import bench_memory as bench
from tests.benchmarks import memory_cases as cases

RANKS = 2
JOBS = [
    ("mlp", 0, "fp32"),
    ("mlp", 0, "bf16"),
    ("mlp", 1, "fp32"),
    ("mlp", 2, "fp32"),
    ("gpt2", 0, "fp32"),
    ("gpt2", 0, "bf16"),
    ("gpt2", 1, "fp32"),
    ("gpt2", 2, "fp32"),
    ("gpt2", 3, "fp32"),
    ("llama", 0, "fp32"),
    ("llama", 0, "bf16"),
    ("llama", 1, "fp32"),
]


def needed(facts, index) -> int:
    return facts.needs[index].per_host.peak


def facts_of(config, inventory, limit):
    machine = MachineFacts(memory_available=limit, versions={"deepspeed": "0.19.8"})
    return estimate(config, inventory, machine, nproc_per_node=RANKS, device="cpu")


@pytest.fixture(scope="module")
def suggested():
    """For each job a limit between what it needs and what the leanest row needs, and the config that is recommended."""
    pytest.importorskip("deepspeed")
    numbers, made = random.Random(7), []
    given = [cases.case(f"{m} {s} {p}", m, cases.config(s, p, "none", "small"), cases.TINY) for m, s, p in JOBS]
    for one, measured in zip(given, bench.measure(given, 1), strict=True):
        inventory = bench.inventory(measured)
        free = facts_of(one["config"], inventory, 1 << 40)
        own = next(index for index, need in enumerate(free.needs) if need.current)
        least = min(needed(free, index) for index in range(len(free.needs)))
        limit = round(least + numbers.uniform(0.1, 0.9) * (needed(free, own) - least))
        facts = facts_of(one["config"], inventory, limit)
        assert facts.current is not None
        assert facts.current.fits is False
        assert facts.patch is not None
        made.append((one | {"config": patch.apply(one["config"], facts.patch)}, limit))
    return made


@pytest.mark.full
def test_what_is_recommended_fits(suggested):
    """Twelve jobs, two ranks: the allocator's peaks of both ranks and the processes stay below the limit."""
    found = bench.measure([case for case, _ in suggested], RANKS)
    assert len(found) == 12
    for one, (case, limit) in zip(found, suggested, strict=True):
        assert "error" not in one, (case["name"], one.get("error"))
        peak = max(phase["peak"] for phase in one["phases"])
        assert RANKS * (peak + CPU_PROCESS) <= limit, (case["name"], case["config"]["zero_optimization"], peak, limit)


def test_a_model_of_which_only_the_size_is_known_gets_a_suggestion_too():
    facts = ModelFacts(class_name="M", parameters=10**9, trainable=10**9, largest_layer=10**7)
    machine = MachineFacts(memory_available=30 << 30)
    told = estimate({}, facts, machine, nproc_per_node=2, device="cpu")
    assert told.current is not None
    assert told.current.fits is False
    assert told.recommended is not None
