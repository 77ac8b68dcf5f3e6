"""Which findings speak of the machine and which of the config."""

from __future__ import annotations

from dsdoctor.blame.view import NOT_THE_MACHINES
from dsdoctor.finding import Finding

_ENVIRONMENT = ("environment/", "comm/", "memory/", "build/", "disk/", "hardware/", "nvme/")
_ENVIRONMENT_IDS = {
    "launch/port-in-use",
    "launch/ssh-or-hostfile",
    "launch/launcher-missing",
    "launch/world-size-mismatch",
    "launch/sighup",
    "launch/cancelled",
    "numerics/dtype-unsupported",
    "version/incompatible",
    "version/rank-mismatch",
}
_CONFIG = ("config/", "zero3/", "loss-scale/static", "autograd/direct-backward")


def is_environment(finding: Finding) -> bool:
    """It blames the machine, or what is installed on it."""
    family = finding.id.startswith(_ENVIRONMENT) and finding.id not in NOT_THE_MACHINES
    return family or finding.id in _ENVIRONMENT_IDS


def is_config(finding: Finding) -> bool:
    """It blames a key of the ds_config."""
    return finding.id.startswith(_CONFIG)
