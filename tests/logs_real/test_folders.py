"""Jobs whose ranks or nodes write a file each: one story out of all of them."""

from dsdoctor.analysis import analyze_log
from tests.logs_real.written.parts import SITE, falling, log, torchrun_failed, traceback, trainer

BROKEN = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, internal error - please report this issue"
)
BARRIER = (f"{SITE}/torch/distributed/distributed_c10d.py", 3703, "barrier", "work = default_pg.barrier(opts=opts)")


def primary(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.log").write_text(text)
    findings = analyze_log(folder).findings
    return findings[0].id if findings else None


def test_what_another_rank_did_later_does_not_clear_an_exception(tmp_path):
    failed = log(trainer(falling(10)), traceback("KeyError", "'label'"))
    assert primary(tmp_path, rank0=failed, rank1=log(trainer(falling(16)))) == "launch/user-exception"


def test_what_another_rank_did_later_does_not_clear_an_exit(tmp_path):
    agent = log(torchrun_failed(-11, rank=1, name="SIGSEGV"))
    assert primary(tmp_path, agent=agent, rank0=log(trainer(falling(16)))) == "launch/segfault"


def test_the_same_rank_going_on_does_clear_it(tmp_path):
    retried = log(trainer(falling(10)), traceback("ConnectionResetError", "again"), trainer(falling(10), first=11))
    assert primary(tmp_path, rank0=retried, rank1=log(trainer(falling(20)))) is None


def test_nodes_that_name_different_versions_and_fail_to_talk(tmp_path):
    nodes = {"node1": "torch 2.3.1+cu121", "node2": "torch 2.1.0+cu118"}
    failed = traceback("torch.distributed.DistBackendError", BROKEN, BARRIER)
    assert primary(tmp_path, **{name: log(v, failed) for name, v in nodes.items()}) == "version/rank-mismatch"


def test_nodes_that_were_started_for_different_sizes(tmp_path):
    line = "[2024-05-11 10:00:00,000] [INFO] [launch.py:163:main] dist_world_size="
    waited = traceback(
        "torch.distributed.DistStoreError", "Timed out after 601 seconds waiting for clients. 8/16 clients joined."
    )
    assert primary(tmp_path, node1=log(f"{line}16", waited), node2=log(f"{line}8")) == "launch/world-size-mismatch"


def attempts(folder, *later):
    """torchrun's folder: rank 1 ran out of memory, rank 0 lost it, and the ranks were started again."""
    lost = traceback("RuntimeError", "Connection closed by peer [10.0.0.3]:2049", BARRIER)
    memory = traceback("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.")
    first = [log(trainer(falling(20)), lost), log(trainer(falling(20)), memory)]
    for number, texts in enumerate((first, later)):
        for rank, text in enumerate(texts):
            path = folder / "run_x" / f"attempt_{number}" / str(rank) / "stderr.log"
            path.parent.mkdir(parents=True)
            path.write_text(text)
    findings = analyze_log(folder).findings
    return findings[0].id if findings else None


def test_an_attempt_that_trains_replaces_the_one_before(tmp_path):
    going_on = log(trainer(falling(9), first=21))
    assert attempts(tmp_path / "a", going_on, going_on) is None
    otherwise = log(
        trainer(falling(9), first=21), traceback("KeyError", "'label'", ("data.py", 3, "load", "row['label']"))
    )
    assert attempts(tmp_path / "b", going_on, otherwise) == "launch/user-exception"


def test_an_attempt_that_shows_no_step_replaces_none(tmp_path):
    assert attempts(tmp_path, "Loading weights\n", "Loading weights\n").startswith("memory/gpu-oom")
