"""Which rank a launcher made of a process, from variables as the launchers set them."""

import pytest

from dsdoctor.comm.started import DEFAULT_PORT, NotComplete, first_node, started

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def test_torchrun():
    place = started(TORCHRUN)
    assert (place.launcher, place.rank, place.local_rank, place.world_size) == ("torchrun", 5, 1, 8)
    assert (place.master_addr, place.master_port, place.agent_store) == ("node0", 29400, True)
    assert place.elsewhere
    assert not place.leads_node


def test_the_deepspeed_launcher_has_no_agent():
    place = started({**TORCHRUN, "CROSS_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert (place.launcher, place.agent_store) == ("deepspeed", False)


def test_srun_meets_at_the_first_node_and_a_port_of_the_job():
    place = started(SRUN)
    assert (place.launcher, place.rank, place.world_size, place.master_addr) == ("srun", 3, 4, "gpu07")
    assert place.master_port == started({**SRUN, "SLURM_PROCID": "0"}).master_port
    assert 1024 < place.master_port < 65536
    assert started({**SRUN, "MASTER_PORT": "4000", "MASTER_ADDR": "here"}).master_port == 4000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu07", "gpu07"), ("gpu[07-09,12],login1", "gpu07"), ("a,b", "a"), ("rack[1,3]-n", "rack1-n")],
)
def test_first_of_a_node_list(nodes, first):
    assert first_node(nodes) == first


def test_mpi_on_one_machine():
    place = started(OPEN_MPI)
    assert (place.launcher, place.master_addr, place.master_port) == ("Open MPI", "127.0.0.1", DEFAULT_PORT)
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert started(hydra).launcher == "MPICH"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one'"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "from 1 to 65535"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is 8 and WORLD_SIZE is 8"),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
        ({**TORCHRUN, "LOCAL_RANK": "²"}, "LOCAL_RANK is '²'"),
        ({"RANK": "0", "MASTER_ADDR": "node0"}, "WORLD_SIZE is not"),
    ],
)
def test_what_a_rank_must_know(environment, says):
    with pytest.raises(NotComplete, match=says):
        started(environment)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        {"WORLD_SIZE": "4"},
        {**SRUN, "SLURM_STEP_ID": "4294967291"},  # the batch script itself, SLURM_BATCH_SCRIPT
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},
    ],
)
def test_nobody_started_it(environment):
    assert started(environment) is None
