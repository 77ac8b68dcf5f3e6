"""The variables by which each launcher tells a process which rank it is; names from their manuals.

torchrun's are also set by the deepspeed launcher. Open MPI's, MPICH's (Hydra) and SLURM's follow, in the order in which
they count.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """Names of variables; `local_world_size` is empty where the launcher does not tell the ranks of a node."""

    launcher: str
    rank: str
    local_rank: str
    world_size: str
    local_world_size: str = ""


TORCHRUN = RankVariables(
    launcher="torchrun",
    rank="RANK",
    local_rank="LOCAL_RANK",
    world_size="WORLD_SIZE",
    local_world_size="LOCAL_WORLD_SIZE",
)
OPEN_MPI = RankVariables(
    launcher="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = RankVariables(
    launcher="MPICH",
    rank="PMI_RANK",
    local_rank="MPI_LOCALRANKID",
    world_size="PMI_SIZE",
    local_world_size="MPI_LOCALNRANKS",
)
SRUN = RankVariables(launcher="srun", rank="SLURM_PROCID", local_rank="SLURM_LOCALID", world_size="SLURM_NTASKS")
ALL = (TORCHRUN, OPEN_MPI, MPICH, SRUN)
