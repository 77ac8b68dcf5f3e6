from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from dsdoctor.runs import launcher
from dsdoctor.runs.launcher import LaunchError, LaunchPlan, chosen_port, command, environment, world_size
from dsdoctor.runs.spec import RUN_MARKER

FOLDER = Path("/reports/0001/with-deepspeed")


def test_torchrun_starts_a_module_on_every_rank() -> None:
    line = command(LaunchPlan(nproc=3, master_addr="node7"), "pkg.mod", ["a", "--b"], 4321)

    assert line[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert {"--nproc_per_node=3", "--master_addr=node7", "--master_port=4321"} <= set(line)
    assert line[-4:] == ["-m", "pkg.mod", "a", "--b"]


def test_deepspeed_launcher_keeps_the_devices_that_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --num_gpus it would forget CUDA_VISIBLE_DEVICES and take the first devices."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6")

    line = command(LaunchPlan(nproc=2, launcher="deepspeed"), "pkg.mod", ["a"], 4321)

    assert "--include=localhost:4,5" in line
    assert line[-3:] == ["--module", "pkg.mod", "a"]


@pytest.mark.parametrize("visible", ["", "0", "GPU-8a1,GPU-9b2"])
def test_deepspeed_launcher_is_given_a_number_where_devices_have_none(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert "--num_gpus=2" in command(LaunchPlan(nproc=2, launcher="deepspeed"), "pkg.mod", [], 4321)


def test_hostfile_leaves_the_meeting_place_to_the_launcher(tmp_path: Path) -> None:
    """127.0.0.1 would be another machine on every node."""
    plan = LaunchPlan(nproc=1, launcher="deepspeed", hostfile=str(tmp_path / "hosts"))

    line = command(plan, "pkg.mod", [], 4321)

    assert f"--hostfile={tmp_path / 'hosts'}" in line
    assert not any(word.startswith(("--master_addr", "--num_gpus", "--include")) for word in line)


def test_srun_hands_the_meeting_place_to_its_tasks() -> None:
    line = command(LaunchPlan(nproc=4, launcher="slurm", master_addr="node7"), "pkg.mod", ["a"], 4321)

    assert line[0] == "srun"
    assert {"--ntasks=4", "--export=ALL,MASTER_ADDR=node7,MASTER_PORT=4321"} <= set(line)
    assert line[-3:] == ["-m", "pkg.mod", "a"]


def test_impossible_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="at least one rank"):
        command(LaunchPlan(nproc=0), "pkg.mod", [], 1)
    with pytest.raises(LaunchError, match="deepspeed launcher only"):
        command(LaunchPlan(nproc=1, hostfile="hosts"), "pkg.mod", [], 1)
    with pytest.raises(LaunchError, match="No such file"):
        world_size(LaunchPlan(nproc=1, hostfile=str(tmp_path / "absent")))


def test_world_size_counts_the_slots_of_a_hostfile(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# slots=99\n\nworker-0 slots=4\nuser@worker-1\tslots=2 extra\n")
    plan = LaunchPlan(nproc=1, launcher="deepspeed", hostfile=str(hosts))
    assert world_size(plan) == 6

    hosts.write_text("worker-0\n")
    with pytest.raises(LaunchError, match="slots=N"):
        world_size(plan)


@pytest.mark.parametrize(("text", "port"), [("", None), ("29500", 29500), (" 65535 ", 65535)])
def test_the_port_that_the_user_chose(text: str, port: int | None) -> None:
    assert chosen_port({"MASTER_PORT": text}) == port
    assert chosen_port({}) is None


@pytest.mark.parametrize("text", ["http", "0", "65536", "-1", "29500.0", "²"])
def test_a_port_that_is_none(text: str) -> None:
    with pytest.raises(LaunchError, match=r"MASTER_PORT is .* from 1 to 65535"):
        chosen_port({"MASTER_PORT": text})


def test_environment_keeps_what_the_user_set() -> None:
    base = {"OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO", "TORCH_FR_BUFFER_SIZE": "5", "MY_OWN": "x"}

    env = environment(LaunchPlan(nproc=2), FOLDER, base)

    assert base.items() <= env.items()
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env, "another name of what the user set"
    assert "NCCL_DEBUG" not in environment(LaunchPlan(nproc=2), FOLDER, {})


def test_environment_of_a_launcher_around_us_does_not_leak_in() -> None:
    outer = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PET_NPROC_PER_NODE": "8",
        "CROSS_SIZE": "2",
    }
    assert not outer.keys() & environment(LaunchPlan(nproc=2), FOLDER, outer).keys()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_usable_cores", lambda: 8.0)
    assert environment(LaunchPlan(nproc=3), FOLDER, {})["OMP_NUM_THREADS"] == "2"
    assert environment(LaunchPlan(nproc=16), FOLDER, {})["OMP_NUM_THREADS"] == "1"


def test_devices_are_hidden_for_a_cpu_run_only() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "1"}
    cpu = environment(LaunchPlan(nproc=1, device="cpu"), FOLDER, base)
    assert (cpu["CUDA_VISIBLE_DEVICES"], cpu["DS_ACCELERATOR"]) == ("", "cpu")
    auto = environment(LaunchPlan(nproc=1), FOLDER, base)
    assert auto["CUDA_VISIBLE_DEVICES"] == "1"
    assert "DS_ACCELERATOR" not in auto


def test_trackers_stay_offline_and_write_into_the_run() -> None:
    env = environment(LaunchPlan(nproc=1), FOLDER, {"WANDB_MODE": "online", "MLFLOW_TRACKING_URI": "https://x"})
    assert (env["WANDB_MODE"], env["WANDB_DIR"]) == ("offline", str(FOLDER))
    assert env["MLFLOW_TRACKING_URI"] == f"file://{FOLDER}/mlruns"


def test_tracker_that_is_switched_off_stays_off() -> None:
    assert environment(LaunchPlan(nproc=1), FOLDER, {"WANDB_MODE": "disabled"})["WANDB_MODE"] == "disabled"


def test_every_process_is_marked_and_unbuffered() -> None:
    env = environment(LaunchPlan(nproc=1), FOLDER, {})
    assert (env[RUN_MARKER], env["PYTHONUNBUFFERED"]) == (str(FOLDER), "1")


def test_ranks_find_dsdoctor_in_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(launcher.__file__).parents[2])
    monkeypatch.setattr(launcher, "_installed", lambda: False)
    env = environment(LaunchPlan(nproc=1), FOLDER, {"PYTHONPATH": "/mine"})
    assert env["PYTHONPATH"] == os.pathsep.join(["/mine", root])  # after what the user put there


def test_path_is_left_alone_where_dsdoctor_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_installed", lambda: True)
    assert "PYTHONPATH" not in environment(LaunchPlan(nproc=1), FOLDER, {})


def test_port_in_use_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not launcher.port_is_free("127.0.0.1", server.getsockname()[1])
    assert launcher.port_is_free("127.0.0.1", launcher.free_port())
