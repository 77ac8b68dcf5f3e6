"""Whether this process was started as one rank of a job, and by which launcher: from its environment alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsdoctor.runs.launcher import LaunchError, chosen_port
from dsdoctor.runs.rank_variables import ALL, RankVariables

DEFAULT_PORT = 29500
"""Where torch meets when nobody says a port."""
_SLURM_PORTS = 15000, 20000
"""First port and number of ports to derive one from a SLURM job's number: below the ephemeral ports of Linux."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """One rank as its launcher described it. `local_world_size` is 0 where the launcher does not say it.

    `agent_store` says that the launcher's own agent listens at the master's port (torchrun), so that no rank may.
    """

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool = False

    @property
    def leads_node(self) -> bool:
        """The one rank of its node that tests links and, where rank 0 cannot be reached, speaks for the node."""
        return self.local_rank == 0

    @property
    def elsewhere(self) -> bool:
        """Certainly not on the node of rank 0: ranks of one node are numbered in a row."""
        return self.rank > self.local_rank


class NotComplete(ValueError):
    """A launcher started this rank and did not say all that a rank must know; the message says what."""


def started(environment: Mapping[str, str]) -> Started | None:
    """The rank that this process is, None where no launcher started it. Raises NotComplete."""
    if environment.get("RANK", "") and not environment.get("WORLD_SIZE", ""):
        raise NotComplete("RANK is set and WORLD_SIZE is not: set both, or neither to check this machine by itself")
    for names in ALL:
        if _is(names.launcher, environment) and names.rank in environment and names.world_size in environment:
            return _read(names, environment)
    return None


def _is(launcher: str, environment: Mapping[str, str]) -> bool:
    """A batch script has the task variables of SLURM as well; a step that srun started has a small number."""
    if launcher != "srun":
        return True
    step = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < 0xFFFFFF00


def _read(names: RankVariables, environment: Mapping[str, str]) -> Started:
    launcher = names.launcher
    world_size = _number(environment, names.world_size)
    local_world_size = _number(environment, names.local_world_size, 0)
    rank = _number(environment, names.rank)
    if rank >= world_size:
        raise NotComplete(f"{names.rank} is {rank} and {names.world_size} is {world_size}: ranks are numbered from 0")
    address = environment.get("MASTER_ADDR") or _address(launcher, environment, world_size, local_world_size)
    return Started(
        launcher="deepspeed" if launcher == "torchrun" and "CROSS_RANK" in environment else launcher,
        rank=rank,
        local_rank=_number(environment, names.local_rank, 0),
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=address,
        master_port=_chosen_port(environment) or _port(launcher, environment),
        agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if text.strip().isascii() and text.strip().isdigit():
        return int(text)
    if default is None or text:
        raise NotComplete(f"{name} is {text!r}, which is not a number" if text else f"{name} is not set")
    return default


def _chosen_port(environment: Mapping[str, str]) -> int | None:
    try:
        return chosen_port(environment)
    except LaunchError as error:
        raise NotComplete(str(error)) from None


def _address(launcher: str, environment: Mapping[str, str], world_size: int, local_world_size: int) -> str:
    if world_size == local_world_size:
        return "127.0.0.1"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if launcher == "srun" and nodes:
        return first_node(nodes)
    raise NotComplete(f"{launcher} started this rank without MASTER_ADDR: set it to the host of rank 0 on all ranks")


def first_node(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[07-09,12],login1` begins with `gpu07`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _port(launcher: str, environment: Mapping[str, str]) -> int:
    """Under SLURM one that all ranks of a job agree on and that two jobs on a node hardly share."""
    job = environment.get("SLURM_JOB_ID", "")
    first, count = _SLURM_PORTS
    return first + int(job) % count if launcher == "srun" and job.isdigit() else DEFAULT_PORT
