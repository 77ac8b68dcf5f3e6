"""Gather `MachineFacts`. Nothing here raises for a machine that lacks something: the reason is recorded instead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dsdoctor.machine import host, nvidia, nvme, variables
from dsdoctor.machine.facts import Device, MachineFacts, NotCollected, OpBuild
from dsdoctor.machine.versions import installed_of

PROBE_COMMAND = (sys.executable, "-m", "dsdoctor.machine.probe")
_DISTRIBUTIONS = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "peft",
    "trl",
    "datasets",
    "numpy",
    "triton",
    "flash-attn",
    "bitsandbytes",
    "mpi4py",
    "tensorboard",
    "wandb",
    "comet-ml",
    "ninja",
    "pydantic",
)
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]

Probe = tuple[str, Callable[[], dict[str, Any]]]


def collect(
    *,
    config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    timeout: float = 60,
    probe_command: Sequence[str] | None = PROBE_COMMAND,
) -> MachineFacts:
    """What this machine is. Takes up to `timeout` seconds, for the one process that imports torch and DeepSpeed.

    Without a `probe_command` these are not asked, and it takes no time. `config` is the ds_config whose compiled ops
    are checked, none without it. `folder` is where the user works (default: the current directory), for its free
    space. Never raises.
    """
    work = folder or Path.cwd()
    probes: list[Probe] = [
        ("python", host.python),
        ("cores", host.cores),
        ("memory", host.memory),
        ("control group", host.control_group),
        ("/dev/shm", host.shared_memory),
        ("limits", host.limits),
        ("disks", lambda: host.disks(work)),
        ("nvme_path", lambda: nvme.folders(config)),
        ("nvidia-smi", nvidia.gpus),
        ("processes on the GPUs", nvidia.processes),
        ("versions", _versions),
        ("environment variables", lambda: {"environment": variables.select(os.environ)}),
    ]
    if probe_command is not None:
        probes.append(("torch and DeepSpeed", lambda: _ask_libraries(config, timeout, probe_command)))
    return _with_free_memory(gather(probes))


def gather(probes: Sequence[Probe]) -> MachineFacts:
    """Run the probes in order; of two that know a field the later one wins, versions are joined."""
    found: dict[str, Any] = {}
    versions: dict[str, str] = {}
    missing: list[NotCollected] = []
    for name, probe in probes:
        try:
            answer = probe()
        except Exception as error:
            missing.append(NotCollected(probe=name, why=f"{type(error).__name__}: {error}"[:500]))
            continue
        versions |= answer.pop("versions", {})
        missing += answer.pop("not_collected", ())
        found |= answer
    return MachineFacts(**found, versions=versions, not_collected=tuple(missing))


def parse_libraries(output: str) -> dict[str, Any]:
    """Fields of `MachineFacts` out of what `machine.probe` wrote. Raises ValueError where that is not its JSON."""
    answer = json.loads(output)
    if not isinstance(answer, dict):
        raise ValueError("the answer is not an object")
    answer["not_collected"] = [NotCollected(probe=probe, why=why) for probe, why in answer.pop("errors", [])]
    answer["devices"] = tuple(
        Device(**{**device, "capability": tuple(device["capability"])}) for device in answer.get("devices", [])
    )
    answer["ops"] = tuple(OpBuild(**{**op, "missing": tuple(op["missing"])}) for op in answer.get("ops", []))
    known = {field.name for field in fields(MachineFacts)}
    return {name: value for name, value in answer.items() if name in known}


def _ask_libraries(config: Mapping[str, Any] | None, timeout: float, command: Sequence[str]) -> dict[str, Any]:
    """Run the probe process. Raises TimeoutError, RuntimeError (it ended with an error), ValueError (no JSON)."""
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_PACKAGE_ROOT,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(config), timeout=timeout)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    finally:
        _end(process)
    if process.returncode != 0:
        last = (errors.strip().splitlines() or [""])[-1]
        raise RuntimeError(f"the process that imports torch and DeepSpeed {_ended(process.returncode)}: {last}")
    return parse_libraries(output)


def _ended(code: int) -> str:
    return f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the probe's process group (also when the user pressed Ctrl-C) and reap the probe."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _versions() -> dict[str, Any]:
    """Versions of the installed distributions, without importing them."""
    return {"versions": installed_of(_DISTRIBUTIONS)}


def _with_free_memory(facts: MachineFacts) -> MachineFacts:
    """Prefer the driver's figure for free memory: the one from torch already lacks the probe's own CUDA context."""
    free = {device.uuid: device.free_bytes for device in facts.driver_devices if device.uuid}
    devices = tuple(replace(device, free_bytes=free.get(device.uuid) or device.free_bytes) for device in facts.devices)
    return replace(facts, devices=devices)
