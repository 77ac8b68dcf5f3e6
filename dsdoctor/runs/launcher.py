"""How ranks are started: the command line of each launcher, and the environment that the ranks get.

Pure but for `free_port` and `port_is_free`. What the ranks run is a module, so that no launcher looks for a file.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import site
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import dsdoctor
from dsdoctor.machine import cgroup
from dsdoctor.runs import hostfile
from dsdoctor.runs.flight_recorder import recording
from dsdoctor.runs.spec import RUN_MARKER
from dsdoctor.runs.trackers import tracker_variables

_OF_AN_OUTER_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|LOCAL_SIZE|CROSS_(RANK|SIZE)|ROLE_NAME"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|PET_\w+"
)
"""Variables that would make the ranks, or the launcher itself, take part in a job around us."""


class LaunchError(ValueError):
    """The plan cannot be carried out by this launcher."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How many ranks, by which launcher, where they meet.

    `nproc` counts all ranks; with a hostfile its slots count instead. `master_port` None means that a free one is
    chosen for every start.
    """

    nproc: int
    launcher: Literal["torchrun", "deepspeed", "slurm"] = "torchrun"
    hostfile: str | None = None
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"


def chosen_port(environment: Mapping[str, str] = os.environ) -> int | None:
    """The user's MASTER_PORT, None where none is set. Raises LaunchError for one that is no port."""
    text = environment.get("MASTER_PORT", "").strip()
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16):
        raise LaunchError(f"MASTER_PORT is {text!r}, which is no port: a number from 1 to 65535")
    return int(text) if text else None


def world_size(plan: LaunchPlan) -> int:
    """Ranks that the plan starts. Raises LaunchError for a hostfile that cannot be read or names no slots."""
    if plan.hostfile is None:
        return plan.nproc
    try:
        return sum(hostfile.hosts(plan.hostfile).values())
    except OSError as error:
        raise LaunchError(f"hostfile {plan.hostfile}: {error.strerror or error}") from error
    except hostfile.Malformed as error:
        raise LaunchError(f"hostfile {error}") from error


def command(plan: LaunchPlan, module: str, args: Sequence[str], port: int) -> list[str]:
    """The command line that starts `python -m MODULE ARGS` on every rank. Raises LaunchError."""
    if plan.nproc < 1:
        raise LaunchError("at least one rank is needed")
    if plan.hostfile is not None and plan.launcher != "deepspeed":
        raise LaunchError("a hostfile is read by the deepspeed launcher only")
    build = {"torchrun": _torchrun, "deepspeed": _deepspeed, "slurm": _slurm}[plan.launcher]
    return [*build(plan, port), module, *args]


def kills_by_name(plan: LaunchPlan) -> bool:
    """True if the launcher, asked to end, kills what has the name of its own processes on every node, those of other
    jobs too: deepspeed's does so (`pkill -f` over pdsh)."""
    return plan.launcher == "deepspeed" and plan.hostfile is not None


def _torchrun(plan: LaunchPlan, port: int) -> list[str]:
    meeting = ["--nnodes=1", f"--master_addr={plan.master_addr}", f"--master_port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *meeting, f"--nproc_per_node={plan.nproc}", "-m"]


def _deepspeed(plan: LaunchPlan, port: int) -> list[str]:
    where = [f"--hostfile={plan.hostfile}"] if plan.hostfile is not None else _local_devices(plan)
    if plan.hostfile is None or not _is_loopback(plan.master_addr):  # else the launcher asks the first host
        where.append(f"--master_addr={plan.master_addr}")
    return [sys.executable, "-m", "deepspeed.launcher.runner", *where, f"--master_port={port}", "--module"]


def _local_devices(plan: LaunchPlan) -> list[str]:
    """The deepspeed launcher forgets CUDA_VISIBLE_DEVICES when it is given a number of devices, so name them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = visible.replace(" ", "").split(",")[: plan.nproc]
    if plan.device != "cpu" and len(numbers) == plan.nproc and all(number.isdigit() for number in numbers):
        return [f"--include=localhost:{','.join(numbers)}"]
    return [f"--num_gpus={plan.nproc}"]


def _slurm(plan: LaunchPlan, port: int) -> list[str]:
    address = _first_node() if _is_loopback(plan.master_addr) else plan.master_addr
    meeting = f"--export=ALL,MASTER_ADDR={address},MASTER_PORT={port}"
    # -u: srun passes lines on as they come; a bad end of one task ends the step
    return ["srun", "-u", f"--ntasks={plan.nproc}", "--kill-on-bad-exit=1", meeting, sys.executable, "-u", "-m"]


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _first_node() -> str:
    """Name of the allocation's first node, where rank 0 runs; this host outside of an allocation."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    scontrol = shutil.which("scontrol")
    if nodes and scontrol:
        question = [scontrol, "show", "hostnames", nodes]
        answer = subprocess.run(question, capture_output=True, text=True, timeout=20, check=False).stdout.split()
        if answer:
            return answer[0]
    return socket.gethostname()


def environment(plan: LaunchPlan, folder: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The user's variables, and what a run under observation needs besides. What the user set is kept.

    Overridden are only: variables of a launcher around us, the place of tracker data (into `folder`), and for
    device `cpu` those that choose the device. TORCH_EXTENSIONS_DIR is `runs.extensions`' part.
    """
    env = {name: value for name, value in base.items() if not _OF_AN_OUTER_LAUNCHER.fullmatch(name)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, int(_usable_cores()) // plan.nproc)))
    env |= recording(env)
    env.update(tracker_variables(folder, base))
    env.update({RUN_MARKER: str(folder), "PYTHONUNBUFFERED": "1"})
    if plan.device == "cpu":
        env.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    return _with_dsdoctor(env)


def _usable_cores() -> float:
    """Cores that this process may use, by affinity and by the control group's quota."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError):
        return min(cores, cgroup.read().cpu_quota or cores)
    return cores


def _with_dsdoctor(env: dict[str, str]) -> dict[str, str]:
    """Let the ranks import dsdoctor where it runs from a source tree that only this process has on its path."""
    if _installed():
        return env
    root = str(Path(dsdoctor.__file__).resolve().parents[1])
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root in paths:
        return env
    return env | {"PYTHONPATH": os.pathsep.join([*paths, root])}


def _installed() -> bool:
    """True if every start of this Python finds dsdoctor, be it installed as a copy or as a link."""
    places = {Path(place).resolve() for place in (*site.getsitepackages(), site.getusersitepackages())}
    found = importlib.metadata.distributions(name="dsdoctor")
    return any(Path(str(each.locate_file(""))).resolve() in places for each in found)


def free_port() -> int:
    """A TCP port that is free now on every interface."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def port_is_free(address: str, port: int) -> bool:
    """True if a server could listen on `port` of every interface, as the rendezvous does."""
    family = _family(address)
    everywhere = "::" if family is socket.AF_INET6 else ""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((everywhere, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
