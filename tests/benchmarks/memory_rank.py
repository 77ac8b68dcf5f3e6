"""One rank that runs many small DeepSpeed jobs on the CPU accelerator and says what each of them held, and when.

Every allocation and release of torch's CPU allocator is taken from the profiler's memory events, so that a peak inside
an operation is seen too. What a GPU would allocate and a CPU merely reserves (a reduce bucket whose pages nobody
writes) counts in full. Not a test: `bench_memory` starts it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.profiler import profile, record_function

from dsdoctor.memory.module import of_module
from tests.benchmarks import memory_models

STEPS = 2
"""Optimizer steps of a case: the first makes the optimizer's states, the last is the steady one."""


def main(cases_file: str, results_file: str) -> None:
    _allow_fp16()
    _let_go_in_order()
    deepspeed.init_distributed("gloo", verbose=False)
    results = []
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        began = time.monotonic()
        try:
            outcome = measure(case)
        except Exception as error:
            if os.environ.get("BENCH_RAISE"):
                raise
            outcome = {"error": f"{type(error).__name__}: {error}"[:300]}
        results.append({**case, **outcome, "seconds": round(time.monotonic() - began, 2)})
        gc.collect()
        if torch.distributed.get_rank() == 0:
            Path(results_file).write_text(json.dumps(results, indent=1), encoding="utf-8")


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes by phase (`peak` above and `end` beyond what was there before the case), and by category at two moments."""
    phases: list[str] = []
    live: dict[str, dict[str, int]] = {}
    parameters: dict[str, Any] = {}
    linear = torch.nn.functional.linear
    with profile(profile_memory=True, use_cpu=True) as recorded:
        _run(case, phases, live, parameters)
    torch.nn.functional.linear = linear  # stage 3 puts its own there, and leaves it
    return {
        "phases": _phases(recorded, phases),
        "live": live,
        "estimator": _estimator(case, parameters["parameters"]),
        **parameters,
    }


def _estimator(case: dict[str, Any], parameters: list[Any]) -> int | None:
    """What DeepSpeed's own estimator says for a GPU and its share of the host; there is none for stages 0 and 1."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    zero = case["config"]["zero_optimization"]
    optimizer, param = ("offload_optimizer" in zero, "offload_param" in zero)
    total = sum(one[1] for one in parameters)
    ranks = torch.distributed.get_world_size()
    if zero["stage"] == 2:
        host, device, *_ = stage_1_and_2.estimate_zero2_model_states_mem_needs(total, ranks, 1, optimizer, 1.0)
    elif zero["stage"] == 3:
        largest = max(one[1] for one in parameters)
        host, device, *_ = stage3.estimate_zero3_model_states_mem_needs(
            total, largest, ranks, 1, optimizer, param, True, 1.0
        )
    else:
        return None
    return int(device + (host / ranks if optimizer else 0))


def _run(case: dict[str, Any], phases: list[str], live: dict[str, dict[str, int]], listed: dict[str, Any]) -> None:
    def phase(name: str) -> Any:
        gc.collect()
        phases.append(name)
        return record_function(f"phase:{name}")

    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what is there already need not be looked through again and again
    with phase("construction"):
        model = memory_models.build(case["model"])
        parameters = [p for p in model.parameters() if p.requires_grad]
    inventory = of_module(model)
    listed |= {"parameters": inventory.parameters, "tied": inventory.tied, "expert_parallel": inventory.expert_parallel}
    with phase("initialize"):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=case["config"])
    accumulate = engine.gradient_accumulation_steps()
    for step in range(STEPS):
        for micro in range(accumulate):
            with phase(f"step {step} micro {micro} forward"):
                output, loss = memory_models.forward(engine, case["model"], case["batch"])
            with phase(f"step {step} micro {micro} backward"):
                engine.backward(loss)
                del output, loss
            if micro == accumulate - 1:
                live["backward"] = _live(engine)
            with phase(f"step {step} micro {micro} step"):
                engine.step()
        live["step"] = _live(engine)
    engine.destroy()
    del engine, model, parameters
    gc.collect()


def _phases(recorded: Any, names: list[str]) -> list[dict[str, Any]]:
    """Peak and end of every phase, in bytes allocated since the case began; older memory may come and go."""
    ranges: dict[str, tuple[int, int]] = {}
    memory: list[tuple[int, int, int]] = []
    for event in _events(recorded):
        if event.name.startswith("phase:"):
            ranges[event.name.removeprefix("phase:")] = (event.start_time_ns, event.end_time_ns)
        elif "Allocation" in str(event.tag):
            memory.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    curve = _curve(sorted(memory, key=lambda one: one[0]))
    found, before = [], 0
    for name in names:
        start, end = ranges[name]
        inside = [total for at, total in curve if start <= at <= end]
        last = inside[-1] if inside else before
        found.append({"name": name, "peak": max([before, *inside]), "end": last})
        before = last
    return found


def _curve(memory: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Time and bytes alive, of what was allocated within the record."""
    alive: dict[int, int] = {}
    total, curve = 0, []
    for at, pointer, size in memory:
        if size > 0:
            total += size - alive.pop(pointer, 0)
            alive[pointer] = size
        else:
            total -= alive.pop(pointer, 0)
        curve.append((at, total))
    return curve


def _events(recorded: Any) -> Any:
    queue = list(recorded.kineto_results.experimental_event_tree())
    while queue:
        event = queue.pop()
        yield event
        queue.extend(event.children)


def _live(engine: Any) -> dict[str, int]:
    """Bytes of the engine's tensors by category, each storage once, found where DeepSpeed keeps them.

    `other` are those that only the garbage collector knows of.
    """
    seen: set[int] = set()
    found = {}
    for category, tensors in (
        ("weights", _weights(engine)),
        ("gradients", _gradients(engine)),
        ("optimizer", _optimizer(engine)),
        ("buffers", _buffers(engine)),
        ("other", (o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter))),
    ):
        found[category] = 0
        for tensor in tensors:
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage.data_ptr() in seen or storage.nbytes() == 0:
                continue
            seen.add(storage.data_ptr())
            found[category] += storage.nbytes()
    return found


def _weights(engine: Any) -> list[Any]:
    found = []
    for parameter in engine.module.parameters():
        found += [
            parameter.data,
            getattr(parameter, "ds_tensor", None),
            getattr(parameter, "ds_secondary_tensor", None),
        ]
    optimizer = engine.optimizer
    for name in ("bit16_groups_flat", "fp16_partitioned_groups_flat", "fp16_groups_flat"):
        found += list(getattr(optimizer, name, None) or [])
    found += list(getattr(optimizer, "param_groups_fp16_flat_cpu_memory", None) or [])
    return [t for t in found if t is not None]


def _gradients(engine: Any) -> list[Any]:
    found: list[Any] = [p.grad for p in engine.module.parameters() if p.grad is not None]
    found += [p.grad_accum for p in engine.module.parameters() if getattr(p, "grad_accum", None) is not None]
    optimizer = engine.optimizer
    for name in (
        "averaged_gradients",
        "all_grad_tensors",
        "accumulated_grads_in_cpu",
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
        "fp32_groups_gradients",
        "fp32_groups_gradients_flat",
        "fp32_groups_gradient_flat_partition",
        "grad_partitions_flat_buffer",
    ):
        found += _flattened(getattr(optimizer, name, None))
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        found += [t.grad for t in getattr(optimizer, name, None) or [] if getattr(t, "grad", None) is not None]
    return found


def _optimizer(engine: Any) -> list[Any]:
    found: list[Any] = []
    optimizer = engine.optimizer
    for name in (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
        "fp32_groups",
    ):
        found += _flattened(getattr(optimizer, name, None))
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        found += _flattened(list(state.values()))
    return found


def _buffers(engine: Any) -> list[Any]:
    found: list[Any] = list(engine.module.buffers())
    optimizer = engine.optimizer
    for bucket in (getattr(optimizer, "ipg_buckets", None) or {}).values():
        found += _flattened(bucket.buffer)
    for name in (
        "param_buffer_of_bit16_for_cpu_offload_groups",
        "temp_grad_buffer_for_cpu_offload",
        "temp_grad_buffer_for_gpu_offload",
    ):
        found += _flattened(getattr(optimizer, name, None))
    return found


def _flattened(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _flattened(part)]
    return []


def _allow_fp16() -> None:
    """DeepSpeed refuses fp16 on most CPUs; for counting bytes it is good enough."""
    kind = type(get_accelerator())
    supported = [*get_accelerator().supported_dtypes(), torch.float16]
    kind.is_fp16_supported = lambda _: True
    kind.supported_dtypes = lambda _: supported


def _let_go_in_order() -> None:
    """After each collective give gloo's thread the time to drop its references first.

    The profiler does not see what another thread releases, and would count it as allocated for ever.
    """
    kind = torch._C._distributed_c10d.Work
    wait = kind.wait

    def patient(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        time.sleep(0.0005)
        return result

    kind.wait = patient


if __name__ == "__main__":
    main(*sys.argv[1:3])
