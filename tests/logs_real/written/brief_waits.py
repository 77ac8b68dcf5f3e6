# ruff: noqa: E501
"""Short excerpts as people paste them (cut, prefixed, only a summary), about ranks that wait and networks between them."""

from tests.logs_real.written.parts import (
    SITE,
    WrittenLog,
    falling,
    launched,
    log,
    stopped,
    torchrun_failed,
    traceback,
    trainer,
    watchdog,
)

NCCL = "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3"
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")


CASES = (
    WrittenLog(
        name="uneven-counts",
        text=log(
            ["[2024-05-11 10:00:00] rank=0 num_batches=1250", "[2024-05-11 10:00:00] rank=3 num_batches=1249"],
            trainer(falling(30)),
            watchdog(0, 12510, "ALLREDUCE", numel=7340032),
        ),
        primary="hang/uneven-batches",
    ),
    WrittenLog(
        name="even-counts",
        text=log(
            ["rank 0: dataloader length: 1250", "rank 1: dataloader length: 1250"],
            trainer(falling(30)),
            watchdog(0, 12510, "ALLREDUCE", numel=7340032),
        ),
        primary="comm/timeout",
        absent=("hang/uneven-batches",),
    ),
    WrittenLog(
        name="rank0-silent-late",
        text=log(
            trainer(falling(50)),
            [watchdog(r, 96120, "ALLREDUCE", numel=1) for r in (1, 2, 3)],
            torchrun_failed(-6, rank=1, others=(0, 2, 3), name="SIGABRT"),
        ),
        primary="comm/timeout",
        absent=("comm/rank0-work-timeout", "launch/abort"),
    ),
    WrittenLog(
        name="sizes",
        text=log(
            trainer(falling(50)),
            watchdog(0, 42, "BROADCAST", numel=1024),
            watchdog(1, 42, "BROADCAST", numel=1025),
            torchrun_failed(-6, rank=1, others=(0,), name="SIGABRT"),
        ),
        primary="comm/collective-mismatch",
    ),
    WrittenLog(
        name="gloo-length",
        text=log(
            "step 1 loss 2.0",
            "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
            "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 400 vs 384",
            torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
        ),
        primary="comm/collective-mismatch",
        absent=("launch/abort",),
    ),
    WrittenLog(
        name="nccl-invalid",
        text=log(
            traceback(
                "torch.distributed.DistBackendError",
                "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1331, invalid argument, NCCL version 2.18.1\nncclInvalidArgument: Invalid value for an argument.\nLast error:\nInvalid config blocking attribute value -2147483648",
                ("t.py", 1, "x", "dist.barrier()"),
                prefix="[rank0]: ",
            )
        ),
        primary="comm/nccl-error",
    ),
    WrittenLog(
        name="127011",
        text=log(
            traceback(
                "RuntimeError",
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:51234: Connection refused",
                (
                    f"{SITE}/torch/distributed/distributed_c10d.py",
                    1,
                    "_new_process_group_helper",
                    "pg = ProcessGroupGloo(",
                ),
                prefix="node2: ",
            ),
            "pdsh@node1: node2: ssh exited with exit code 1",
        ),
        primary="comm/name-resolution",
    ),
    WrittenLog(
        name="invalid-rank",
        text=log(
            traceback(
                "RuntimeError",
                "NCCL error in: x.cpp:1, invalid usage\nLast error:\nInvalid rank requested : 8/8",
                ("t.py", 1, "x", "dist.barrier()"),
                prefix="node2: ",
            )
        ),
        primary="launch/world-size-mismatch",
    ),
    WrittenLog(
        name="size-nodes",
        text=log(
            "node1: [2024-05-11 10:00:00,000] [INFO] [launch.py:163:main] dist_world_size=16",
            "node2: [2024-05-11 10:00:00,000] [INFO] [launch.py:163:main] dist_world_size=8",
            traceback(
                "torch.distributed.DistStoreError",
                "Timed out after 1801 seconds waiting for clients. 8/16 clients joined.",
                ("t.py", 1, "x", "dist.init()"),
                prefix="node1: ",
            ),
        ),
        primary="launch/world-size-mismatch",
    ),
    WrittenLog(
        name="versions",
        text=log(
            "n1:1:1 [0] NCCL INFO NCCL version 2.18.1+cuda12.1",
            "n2:2:2 [0] NCCL INFO NCCL version 2.20.5+cuda12.4",
            [watchdog(r, 1, "ALLREDUCE", numel=1) for r in (0, 1)],
        ),
        primary="version/rank-mismatch",
    ),
    WrittenLog(
        name="uneven-dl",
        text=log(
            ["[default0]:Rank 0: 1250 steps per epoch", "[default1]:Rank 1: 1249 steps per epoch"],
            trainer(falling(30)),
            watchdog(0, 12510, "ALLREDUCE", numel=7340032),
            torchrun_failed(-6, rank=0, others=(1,), name="SIGABRT"),
        ),
        primary="hang/uneven-batches",
    ),
    WrittenLog(
        name="p2p-4090",
        text=log(
            "NVIDIA GeForce RTX 4090",
            "[INFO] world size 2",
            launched(),
            [watchdog(r, 1, "BROADCAST", numel=131072) for r in (0, 1)],
        ),
        primary="comm/p2p-hang",
    ),
    WrittenLog(
        name="ib-flap",
        text=log(
            "n1:1:1 [0] NCCL INFO NET/IB : mlx5_0:1 Got async event : port error",
            "n1:1:1 [0] NCCL INFO NET/IB : mlx5_0:1 Got async event : port active",
            trainer(falling(40)),
        ),
        primary=None,
    ),
    WrittenLog(
        name="nccl-env",
        text=log(
            "[rank0]:[W924 19:01:01.2 Utils.hpp:135] Warning: Environment variable NCCL_ASYNC_ERROR_HANDLING is deprecated; use TORCH_NCCL_ASYNC_ERROR_HANDLING instead (function operator())",
            trainer(falling(30)),
        ),
        primary=None,
    ),
    WrittenLog(
        name="modify-qp",
        text=log(
            traceback(
                "torch.distributed.DistBackendError",
                NCCL
                + "\nncclSystemError: System call failed.\nLast error:\nCall to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR",
                BARRIER,
                prefix="[rank9]: ",
            )
        ),
        primary="comm/ib-error",
        absent=("comm/nccl-error",),
    ),
    WrittenLog(
        name="only-nccl",
        text=log(
            trainer(falling(2)),
            traceback("torch.distributed.DistBackendError", NCCL, BARRIER, prefix="[rank0]: "),
            stopped(1),
        ),
        primary="comm/nccl-error",
        absent=("launch/user-exception",),
    ),
    WrittenLog(
        name="store-timeout-key",
        text=log(
            traceback(
                "torch.distributed.DistStoreError",
                "wait timeout after 1800000ms, keys: /torch.rendezvous.x/rank_3",
                BARRIER,
                prefix="[rank0]: ",
            )
        ),
        primary="comm/missing-rank",
        accept=("comm/timeout", "launch/peer-failure"),
    ),
    WrittenLog(
        name="socket-timeout",
        text=log(
            traceback(
                "RuntimeError",
                "Socket Timeout",
                (
                    f"{SITE}/torch/distributed/distributed_c10d.py",
                    246,
                    "_store_based_barrier",
                    "store.add(store_key, 0)",
                ),
                prefix="node1: ",
            )
        ),
        primary="comm/missing-rank",
        accept=("comm/timeout", "comm/unreachable"),
    ),
    WrittenLog(
        name="store-barrier",
        text=log(
            traceback(
                "RuntimeError",
                "Timed out initializing process group in store based barrier on rank: 0, for key: store_based_barrier_key:1 (world_size=16, worker_count=8, timeout=0:30:00)",
                (f"{SITE}/torch/distributed/distributed_c10d.py", 246, "_store_based_barrier", "raise RuntimeError("),
                prefix="node1: ",
            )
        ),
        primary="comm/missing-rank",
        absent=("launch/user-exception",),
    ),
)
