# ruff: noqa: E501
"""Logs about how processes are started: arguments, launchers, ssh and ports."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    ds,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
)

GLOO_LOST = "[../third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.12]:41872"
ALLREDUCE = (f"{SITE}/torch/distributed/distributed_c10d.py", 2806, "all_reduce", "work.wait()")
LOST = traceback("RuntimeError", GLOO_LOST, ALLREDUCE, prefix="[rank0]: ")


def rank_of_hf_parser() -> str:
    message = "Some specified arguments are not used by the HfArgumentParser: ['--local_rank=0']"
    where = (f"{SITE}/transformers/hf_argparser.py", 347, "parse_args_into_dataclasses", "raise ValueError(")
    return log(launched(), traceback("ValueError", message, where), stopped(1))


def rank_of_click() -> str:
    return log(
        launched(),
        "Usage: train.py [OPTIONS]",
        "Try 'train.py --help' for help.",
        "",
        "Error: No such option: --local_rank",
        stopped(2),
    )


def two_ranks_on_one_gpu() -> str:
    message = (
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    )
    where = (f"{SITE}/torch/distributed/distributed_c10d.py", 3441, "barrier", "work = default_pg.barrier(opts=opts)")
    return log(
        traceback("torch.distributed.DistBackendError", message, where, prefix="[rank1]: "), torchrun_failed(1, rank=1)
    )


def mpi_library_missing() -> str:
    return log(
        "[2024-05-11 10:00:01,118] [INFO] [comm.py:652:init_distributed] cdb=None",
        "[2024-05-11 10:00:01,119] [INFO] [comm.py:667:init_distributed] Not using the DeepSpeed or dist launchers, attempting to detect MPI environment...",
        traceback("ModuleNotFoundError", "No module named 'mpi4py'",
                  (f"{SITE}/deepspeed/comm/comm.py", 694, "mpi_discovery", "from mpi4py import MPI")),
    )  # fmt: skip


def rank_key_missing() -> str:
    return log(
        traceback("KeyError", "'RANK'", ("train.py", 12, "setup", 'rank = int(os.environ["RANK"])'),
                  ("/opt/conda/lib/python3.10/os.py", 680, "__getitem__", "raise KeyError(key) from None")),
    )  # fmt: skip


def ssh_refused() -> str:
    return log(
        ds("Running on the following workers: node1,node2", where="runner.py:463:main"),
        "node2: ssh: connect to host node2 port 22: Connection refused",
        "pdsh@node1: node2: ssh exited with exit code 255",
    )


def remote_python_missing() -> str:
    return log(
        ds("Running on the following workers: node1,node2", where="runner.py:463:main"),
        "node2: bash: line 1: /opt/conda/bin/python: No such file or directory",
        "pdsh@node1: node2: ssh exited with exit code 127",
    )


def remote_rank_failed() -> str:
    """ssh works; the exit code 1 is that of the job on node2."""
    return log(
        [f"node1: step {s} loss {3 - s / 10:.2f}" for s in range(1, 6)],
        traceback("FileNotFoundError", "[Errno 2] No such file or directory: 'data/shard_07.jsonl'",
                  ("data.py", 12, "read", "open(path)"), prefix="node2: "),
        "pdsh@node1: node2: ssh exited with exit code 1",
    )  # fmt: skip


def no_slots() -> str:
    return log(
        "--------------------------------------------------------------------------",
        "There are not enough slots available in the system to satisfy the 16",
        "slots that were requested by the application:",
        "",
        "  python",
        "",
        "Either request fewer procs for your application, or make more slots",
        "available for use.",
        "--------------------------------------------------------------------------",
    )


def port_in_agent_lines() -> str:
    """Cut to the lines of the socket, as people paste them."""
    return log(
        "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "[W socket.cpp:436] [c10d] The server socket has failed to bind to 0.0.0.0:29500 (errno: 98 - Address already in use).",
        "[E socket.cpp:472] [c10d] The server socket has failed to listen on any local network address.",
    )


def launched_twice() -> str:
    message = "The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
    where = (f"{SITE}/torch/distributed/rendezvous.py", 189, "_create_c10d_store", "return TCPStore(")
    return log(
        launched(gpus=4),
        launched(gpus=4),
        traceback("RuntimeError", message, where, prefix="1: "),
        "srun: error: gpu07: task 1: Exited with exit code 1",
    )


CASES = (
    WrittenLog(name="rank-of-hf-parser", text=rank_of_hf_parser(), primary="launch/local-rank-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="rank-of-click", text=rank_of_click(), primary="launch/local-rank-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="two-ranks-on-one-gpu", text=two_ranks_on_one_gpu(), primary="launch/local-rank-mismatch", absent=("launch/user-exception",)),
    WrittenLog(name="mpi-library-missing", text=mpi_library_missing(), primary="launch/launcher-missing"),
    WrittenLog(name="rank-key-missing", text=rank_key_missing(), primary="launch/launcher-missing"),
    WrittenLog(name="ssh-refused", text=ssh_refused(), primary="launch/ssh-or-hostfile", absent=("comm/unreachable",)),
    WrittenLog(name="remote-python-missing", text=remote_python_missing(), primary="launch/ssh-or-hostfile"),
    WrittenLog(name="remote-rank-failed", text=remote_rank_failed(), primary="launch/user-exception", absent=("launch/ssh-or-hostfile",), accept=("checkpoint/missing-shards",)),
    WrittenLog(name="no-slots", text=no_slots(), primary="launch/ssh-or-hostfile"),
    WrittenLog(name="port-in-agent-lines", text=port_in_agent_lines(), primary="launch/port-in-use"),
    WrittenLog(name="launched-twice", text=launched_twice(), primary="launch/port-in-use", absent=("launch/user-exception", "launch/world-size-mismatch")),
)  # fmt: skip
