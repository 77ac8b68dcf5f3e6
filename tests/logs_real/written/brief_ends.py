# ruff: noqa: E501
"""Short excerpts as people paste them (cut, prefixed, only a summary), about how processes were started and how they ended."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    bar,
    behind,
    ds,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
)

REMOTE = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, NCCL version 2.14.3
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/Socket : remote peer 10.0.0.3<40100> has closed connection"""
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")


CASES = (
    WrittenLog(
        name="pdsh-abort",
        text=log(
            [
                f"192.169.83.12{n}: [2023-10-13 11:{n}1:28,593] [INFO] [launch.py:315:sigkill_handler] Killing subprocess {249 + n}"
                for n in range(3)
            ],
            "192.169.83.120: [2023-10-13 11:33:28,766] [ERROR] [launch.py:321:sigkill_handler] ['/usr/bin/python3', '-u', 'pretrain.py', '--local_rank=7'] exits with return code = -6",
        ),
        primary="launch/abort",
    ),
    WrittenLog(
        name="pod-own",
        text=behind(
            "[pod/train-worker-1/pytorch] ",
            log(
                trainer(falling(5)),
                traceback(
                    "UnicodeDecodeError",
                    "'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",
                    ("data.py", 3, "read", "f.read()"),
                ),
                torchrun_failed(1, rank=3, others=(0,)),
            ),
        ),
        primary="launch/user-exception",
        line="utf-8",
    ),
    WrittenLog(
        name="lost-only",
        text=log(
            traceback(
                "RuntimeError",
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2049",
                ("t.py", 1, "x", "dist.all_reduce(t)"),
                prefix="[rank0]: ",
            ),
            torchrun_failed(1, rank=0, others=(1,)),
        ),
        primary="launch/peer-failure",
    ),
    WrittenLog(
        name="addr-old",
        text=log(
            traceback(
                "RuntimeError",
                "Address already in use",
                (
                    f"{SITE}/torch/distributed/rendezvous.py",
                    172,
                    "_env_rendezvous_handler",
                    "store = TCPStore(master_addr, master_port, world_size, start_daemon, timeout)",
                ),
            ),
            stopped(1),
        ),
        primary="launch/port-in-use",
    ),
    WrittenLog(
        name="addr-new",
        text=log(
            traceback(
                "torch.distributed.DistNetworkError",
                "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
                (f"{SITE}/torch/distributed/run.py", 910, "run", "elastic_launch("),
            )
        ),
        primary="launch/port-in-use",
    ),
    WrittenLog(
        name="port-permission",
        text=log(
            traceback(
                "RuntimeError",
                "The server socket has failed to listen on any local network address. The server socket has failed to bind to [::]:23 (errno: 13 - Permission denied).",
                (f"{SITE}/torch/distributed/rendezvous.py", 189, "_c", "return TCPStore("),
            )
        ),
        primary="launch/port-in-use",
        accept=("launch/user-exception", "comm/unreachable"),
    ),
    WrittenLog(
        name="hostfile",
        text=log(
            traceback(
                "ValueError",
                "Hostfile is not formatted correctly, unable to proceed with training.",
                (f"{SITE}/deepspeed/launcher/runner.py", 230, "_parse_hostfile", "raise ValueError("),
            )
        ),
        primary="launch/ssh-or-hostfile",
    ),
    WrittenLog(
        name="ssh-check",
        text=log(
            traceback(
                "subprocess.CalledProcessError",
                "Command 'ssh -o PasswordAuthentication=no 192.168.3.100 hostname' returned non-zero exit status 255.",
                (f"{SITE}/deepspeed/launcher/runner.py", 437, "main", "subprocess.check_call("),
            ),
            "",
            "During handling of the above exception, another exception occurred:",
            "",
            traceback(
                "RuntimeError",
                "Using hostfile at hostfile but host=192.168.3.100 was not reachable via ssh. If you are running with a single node please remove hostfile or setup passwordless ssh.",
                (f"{SITE}/deepspeed/launcher/runner.py", 442, "main", "raise RuntimeError("),
            ),
        ),
        primary="launch/ssh-or-hostfile",
    ),
    WrittenLog(
        name="spot",
        text=log(
            trainer(falling(30)),
            "[2024-05-11 10:20:12,551] torch.distributed.elastic.agent.server.api: [WARNING] Received Signals.SIGTERM death signal, shutting down workers",
            "[2024-05-11 10:20:12,552] torch.distributed.elastic.multiprocessing.api: [WARNING] Sending process 4100 closing signal SIGTERM",
            traceback(
                "torch.distributed.elastic.multiprocessing.api.SignalException",
                "Process 4000 got signal: 15",
                (
                    f"{SITE}/torch/distributed/elastic/multiprocessing/api.py",
                    62,
                    "_terminate_process_handler",
                    "raise SignalException(",
                ),
            ),
        ),
        primary="launch/cancelled",
    ),
    WrittenLog(
        name="ctrl-c",
        text=log(
            launched(),
            trainer(falling(20)),
            "^C[2024-05-11 10:20:12,551] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 4100",
            traceback("KeyboardInterrupt", "", ("train.py", 33, "step", "loss.backward()")),
            ds("Main process received SIGINT, exiting", where="launch.py:325:sigkill_handler"),
        ),
        primary="launch/cancelled",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="hup",
        text=log(
            trainer(falling(20)),
            "WARNING:torch.distributed.elastic.agent.server.api:Received 1 death signal, shutting down workers",
            *["WARNING:torch.distributed.elastic.multiprocessing.api:Sending process 4100 closing signal SIGHUP"] * 4,
        ),
        primary="launch/sighup",
        absent=("launch/cancelled",),
    ),
    WrittenLog(
        name="remote-only",
        text=log(
            trainer(falling(50)),
            traceback(
                "torch.distributed.DistBackendError", REMOTE, ("t.py", 1, "x", "dist.all_reduce(t)"), prefix="[rank3]: "
            ),
            torchrun_failed(1, rank=3, others=(0,)),
        ),
        primary="launch/peer-failure",
    ),
    WrittenLog(
        name="ordinary-mat",
        text=log(
            "zero_optimization_stage ...... 2",
            traceback(
                "RuntimeError",
                "mat1 and mat2 shapes cannot be multiplied (512x4096 and 5120x4096)",
                ("t.py", 5, "f", "self.proj(h)"),
                prefix="[rank1]: ",
            ),
        ),
        primary="launch/user-exception",
    ),
    WrittenLog(
        name="bash-segv",
        text=log(
            [bar(3, 9)],
            "./run.sh: line 22:  7312 Segmentation fault      (core dumped) CUDA_VISIBLE_DEVICES=0 deepspeed train.py",
        ),
        primary="launch/segfault",
    ),
    WrittenLog(
        name="segv-handler",
        text=log(
            "Fatal Python error: Segmentation fault",
            "",
            "Current thread 0x00007f (most recent call first):",
            f'  File "{SITE}/deepspeed/ops/adam/cpu_adam.py", line 150 in step',
            "Extension modules: numpy.core (total: 41)",
            stopped(-11),
        ),
        primary="launch/segfault",
    ),
    WrittenLog(
        name="torchelastic-env",
        text=log(
            traceback(
                "ValueError",
                "Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set",
                (f"{SITE}/deepspeed/comm/torch.py", 1, "init_process_group", "torch.distributed.init_process_group("),
            )
        ),
        primary="launch/launcher-missing",
    ),
    WrittenLog(
        name="local-rank-env",
        text=log(
            traceback(
                "AssertionError",
                "DeepSpeed requires the LOCAL_RANK environment variable, it is set by the deepspeed launcher, deepspeed.init_distributed, or the torch's launcher.",
                (f"{SITE}/deepspeed/runtime/engine.py", 1, "__init__", "assert"),
            )
        ),
        primary="launch/launcher-missing",
    ),
    WrittenLog(
        name="dl-exit",
        text=log(
            trainer(falling(5)),
            traceback(
                "RuntimeError",
                "DataLoader worker (pid(s) 4711) exited unexpectedly",
                (f"{SITE}/torch/utils/data/dataloader.py", 1, "_try_get_data", "raise RuntimeError("),
            ),
            stopped(1),
        ),
        primary="launch/user-exception",
        accept=("memory/shm-exhausted", "memory/host-oom-kill"),
    ),
    WrittenLog(
        name="summary-many",
        text=log(
            "E0511 10:15:02.9 4000 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 2 (pid: 4102) of binary: /opt/conda/bin/python",
            "train.py FAILED",
            "Failures:",
            "[1]:",
            "  time      : 2024-05-11_10:15:01",
            "  host      : gpu01",
            "  rank      : 11 (local_rank: 3)",
            "  exitcode  : 1 (pid: 4103)",
            "Root Cause (first observed failure):",
            "[0]:",
            "  rank      : 10 (local_rank: 2)",
            "  exitcode  : 1 (pid: 4102)",
        ),
        primary="launch/user-exception",
    ),
    WrittenLog(
        name="rc245",
        text=log(
            "train.sh: deepspeed ended with exit status 245",
            ds(
                "['/opt/conda/bin/python', '-u', 'train.py', '--local_rank=0'] exits with return code = -11",
                level="ERROR",
                where="launch.py:321:sigkill_handler",
            ),
        ),
        primary="launch/segfault",
    ),
    WrittenLog(
        name="port-and-client",
        text=log(
            traceback(
                "torch.distributed.DistNetworkError",
                "The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
                BARRIER,
                prefix="node1: ",
            ),
            "node2: [E socket.cpp:957] [c10d] The client socket has timed out after 600000ms while trying to connect to (node1, 29500).",
            traceback(
                "torch.distributed.DistNetworkError",
                "The client socket has timed out after 600000ms while trying to connect to (node1, 29500).",
                BARRIER,
                prefix="node2: ",
            ),
        ),
        primary="launch/port-in-use",
    ),
    WrittenLog(
        name="code-143",
        text=log(trainer(falling(9)), "srun: error: gpu3: tasks 0-7: Exited with exit code 143"),
        primary="launch/cancelled",
    ),
    WrittenLog(
        name="segv-after-others",
        text=log(
            traceback("ValueError", "bad", ("t.py", 1, "f", "x"), prefix="[rank1]: "),
            "srun: error: g: task 1: Exited with exit code 1",
            "srun: error: g: task 0: Segmentation fault (core dumped)",
        ),
        primary="launch/user-exception",
        absent=("launch/segfault",),
    ),
    WrittenLog(
        name="etcd",
        text=log(
            traceback(
                "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
                "",
                (
                    f"{SITE}/torch/distributed/elastic/rendezvous/dynamic_rendezvous.py",
                    1,
                    "run",
                    "raise RendezvousClosedError()",
                ),
            ),
            "x",
        ),
        primary="launch/user-exception",
        accept=("launch/peer-failure", "comm/missing-rank"),
    ),
)
