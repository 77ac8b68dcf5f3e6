"""The check under each launcher: real processes; srun, scontrol, mpirun, pdsh and ssh are stand-ins."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm import stand_ins

ROOT = Path(__file__).parents[2]
LIMIT = 120


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def environment(base: dict[str, str], **more: str) -> dict[str, str]:
    """Python's own folder first, so that `torchrun` and `dsdoctor` are those of this environment."""
    bin_folder = str(Path(sys.executable).parent)
    paths = {"PATH": f"{base['PATH'].split(':')[0]}:{bin_folder}:{base['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**base, **paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", **more}


def run(command, env, cwd) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT)


def dsdoctor(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dsdoctor", "comm", *arguments]


@pytest.mark.parametrize(
    ("launcher", "names", "more"),
    [
        pytest.param(
            "Open MPI",
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE",
            {},
            marks=pytest.mark.full,
        ),
        pytest.param("MPICH", "PMI_RANK MPI_LOCALRANKID PMI_SIZE MPI_LOCALNRANKS", {}, marks=pytest.mark.full),
        ("srun", "SLURM_PROCID SLURM_LOCALID SLURM_NTASKS", {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}),
    ],
)
def test_one_task_a_rank(tmp_path, port, launcher, names, more):
    base = stand_ins.put(tmp_path / "bin", tasks=stand_ins.TASKS)
    env = environment(base, NAMES=names, NTASKS="2", MASTER_PORT=port, **more)
    done = run(["tasks", *dsdoctor("--json", "--device", "cpu")], env, tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # one document, whatever ranks there are
    assert {member["launcher"] for member in document["comm"]["members"]} == {launcher}
    assert document["comm"]["world_size"] == 2


@pytest.mark.full
def test_what_nccl_logged_on_the_rank_that_failed(tmp_path, port):
    """Its log comes to rank 0 with the report, the middle of it left out, and is read there."""
    base = stand_ins.put(tmp_path / "bin", tasks=stand_ins.TASKS)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE"
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "COMM_FAULT": "fails_as_nccl_does:1"}
    env = environment(base, NAMES=names, NTASKS="2", **more)
    command = ["tasks", sys.executable, "-m", "tests.comm.faulty_member", "comm", "--json", "--device", "cpu"]
    done = run(command, env, ROOT)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    first = document["findings"][0]
    assert first["id"] == "comm/wrong-interface"
    assert "docker0" in first["cause"]
    assert not any("/" in one["source"] for one in first["evidence"])  # the folder is gone by now
    assert document["nccl"]["interfaces"] == {"docker0": 1}
    assert len(document["nccl"]["warnings"]) == 1


@pytest.mark.full
def test_the_deepspeed_launcher(tmp_path, port):
    launch = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", f"--master_port={port}"]
    done = run([*launch, "--module", "dsdoctor", "comm", "--device", "cpu"], environment(dict(os.environ)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks over gloo on cpu: all values right" in done.stdout


@pytest.mark.full
def test_a_hostfile(tmp_path):
    """Two hosts that are both this machine, by pdsh, whose lines carry the host's name."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    base = stand_ins.put(tmp_path / "bin", pdsh=stand_ins.PDSH, ssh=stand_ins.SSH)
    done = run(dsdoctor("--hostfile", str(hosts), "--json", "--device", "cpu"), environment(base), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["comm"]["world_size"] == 2
    assert {member["launcher"] for member in document["comm"]["members"]} <= {"deepspeed", "torchrun"}


@pytest.mark.full
def test_hosts_that_cannot_be_reached(tmp_path):
    """The launcher's own failure is read as any log."""
    hosts = tmp_path / "hostfile"
    hosts.write_text("node-a slots=1\nnode-b slots=1\n")
    refuse = '#!/bin/bash\necho "ssh: connect to host $1 port 22: Connection refused" >&2\nexit 255\n'
    base = stand_ins.put(tmp_path / "bin", pdsh=stand_ins.PDSH, ssh=refuse)
    done = run(dsdoctor("--hostfile", str(hosts), "--json", "--device", "cpu"), environment(base), tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["findings"][0]["id"] == "launch/ssh-or-hostfile"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "nowhere: No such file"),
        ("node-a slots=1\nnode-b: 4\n", "nowhere:2: 'node-b: 4' is not of the form HOST slots=N"),
        ("node-a slots=1\nnode-a slots=2\n", "nowhere:2: node-a is there twice"),
        ("# nobody\n", "no slots in it"),
    ],
)
def test_a_hostfile_that_says_nothing(tmp_path, text, says):
    if text is not None:
        (tmp_path / "nowhere").write_text(text)
    done = run(dsdoctor("--hostfile", "nowhere"), environment(dict(os.environ)), tmp_path)
    assert done.returncode == 2
    assert says in done.stderr


@pytest.mark.full
def test_the_slurm_script(tmp_path, port):
    """What `--slurm` writes, run by a shell as sbatch would: two nodes of one rank, each its own output file."""
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}}')
    wrote = run(
        dsdoctor("ds_config.json", "--slurm", "--nproc", "1", "--device", "cpu"),
        environment(dict(os.environ)),
        tmp_path,
    )
    assert wrote.returncode == 0, wrote.stderr
    script = tmp_path / "check.sh"
    script.write_text(wrote.stdout.replace("MASTER_PORT=29500", f"MASTER_PORT={port}"))
    base = stand_ins.put(tmp_path / "bin", srun=stand_ins.SRUN, scontrol=stand_ins.SCONTROL)
    env = environment(base, SLURM_NNODES="2", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]")
    done = run(["bash", str(script)], env, tmp_path)
    first, second = ((tmp_path / f"dsdoctor-comm-7-{node}.txt").read_text() for node in (0, 1))
    assert done.returncode == 0, first + second + done.stderr
    assert "2 ranks" in first
    assert "all values right" in first
    assert second == ""
    for line in ("--nodes=2", "--ntasks-per-node=1", "--time=00:10:00"):
        assert f"#SBATCH {line}" in wrote.stdout


def test_the_kubernetes_manifests(tmp_path):
    yaml = pytest.importorskip("yaml")
    wrote = run(
        dsdoctor("--k8s", "--nodes", "3", "--nproc", "4", "--image", "me/train:1"),
        environment(dict(os.environ)),
        tmp_path,
    )
    assert wrote.returncode == 0, wrote.stderr
    service, job = yaml.safe_load_all(wrote.stdout)
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (3, 3, "Indexed")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "me/train:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "--nnodes=3 --nproc-per-node=4 --node-rank=$JOB_COMPLETION_INDEX" in container["args"][0]
    variables = {one["name"]: one["value"] for one in container["env"]}
    name, _, domain = variables["MASTER_ADDR"].partition(".")
    assert name == f"{job['metadata']['name']}-0"
    assert domain == service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]


def test_the_ds_config_goes_with_the_manifests(tmp_path):
    """The pods do not have the files of the machine where kubectl runs."""
    yaml = pytest.importorskip("yaml")
    config = {"bf16": {"enabled": True}, "note": 'it\'s: "quoted" # and {more}\n'}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    wrote = run(dsdoctor("ds_config.json", "--k8s", "--device", "cpu"), environment(dict(os.environ)), tmp_path)
    held, _, job = yaml.safe_load_all(wrote.stdout)
    (name, text), *_ = held["data"].items()
    assert json.loads(text) == config
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "config"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "config"]
    assert volume["configMap"]["name"] == held["metadata"]["name"]
    assert f"dsdoctor comm {mount['mountPath']}/{name} " in container["args"][0]
    assert str(tmp_path) not in wrote.stdout


def test_reading_what_nccl_logged(tmp_path):
    log = tmp_path / "nccl.log"
    log.write_text(
        "node1:4211:4299 [0] NCCL INFO NET/Socket : Using [0]docker0:172.17.0.1<0>\n"
        "node1:4211:4299 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.9<41234> failed : "
        "Software caused connection abort\n"
    )
    done = run(dsdoctor("--read", str(log), "--json"), environment(dict(os.environ)), tmp_path)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert document["findings"][0]["id"] == "comm/wrong-interface"
    assert document["findings"][0]["evidence"][0]["line"] in (1, 2)
    assert document["nccl"]["interfaces"] == {"docker0": 1}
    (tmp_path / "other.log").write_text("node2:1:2 [0] NCCL INFO Using network Socket\n")
    both = subprocess.run(
        dsdoctor("--read", "other.log", "-"), input=log.read_bytes(), cwd=tmp_path, capture_output=True, timeout=LIMIT
    )
    assert both.returncode == 1
    assert b"docker0" in both.stdout
    assert b"    stdin.log:1: node1:4211:4299" in both.stdout
    assert b"network    Socket" in both.stdout
    missing = run(dsdoctor("--read", "nowhere.log"), environment(dict(os.environ)), tmp_path)
    assert missing.returncode == 2
