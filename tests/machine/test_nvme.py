"""The folders that a config swaps to."""

import os

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.machine.facts import MachineFacts, SwapFolder
from dsdoctor.machine.nvme import folders


def config(path, stage=3, device="nvme"):
    return {"zero_optimization": {"stage": stage, "offload_param": {"device": device, "nvme_path": str(path)}}}


def test_a_folder_that_deepspeed_would_make(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs4 rw 0 0\n")
    (folder,) = folders(config(tmp_path / "new" / "deeper"), mounts)["swap_folders"]
    assert (folder.key, folder.exists, folder.usable) == ("zero_optimization.offload_param.nvme_path", False, True)
    assert folder.file_system == "nfs4"
    assert folder.free_bytes > 0


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    (folder,) = folders(config(tmp_path / "file" / "swap"))["swap_folders"]
    assert not folder.usable


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    assert not folders(config(tmp_path / "swap"))["swap_folders"][0].usable


@pytest.mark.parametrize(
    "unused", [config("/x", stage=2), config("/x", device="cpu"), {}, {"zero_optimization": 3}, None]
)
def test_what_is_not_used_is_not_looked_at(unused):
    assert folders(unused) == {"swap_folders": ()}


def found(**facts):
    folder = SwapFolder(**{"key": "zero_optimization.offload_param.nvme_path", "path": "/x", "exists": True} | facts)
    case = Case(config=load_config(config("/x"), release="0.19.8"), machine=MachineFacts(swap_folders=(folder,)))
    return [finding.severity for finding in diagnose(case, strict=True).findings if finding.id == "nvme/swap"]


def test_the_rule():
    assert found(usable=False, file_system="ext4") == ["error"]
    assert found(usable=True, file_system="tmpfs") == ["warning"]
    assert found(usable=True, file_system="nfs4") == ["warning"]
    assert found(usable=True, file_system="xfs") == []
    assert found(usable=True, file_system=None) == []
