"""Records of ranks put together by hand: what each rank did, and who is at fault."""

import pytest

from dsdoctor.comm.facts import CommFacts, RankGpu
from dsdoctor.comm.merge import merge
from dsdoctor.comm.order import CommOrder, read_records, record_path
from dsdoctor.comm.reading import read
from dsdoctor.runs.attendance import Attendance

IN_COLLECTIVE = 'File "/env/torch/distributed/distributed_c10d.py", line 3, in all_reduce'
IN_SLEEP = 'File "/home/u/site.py", line 3, in hook'


def record(event: str, time: float, **values) -> dict:
    return {"event": event, "time": time, "dtype": "", "seconds": 0.1, **values}


def passed(step: str, time: float) -> list[dict]:
    return [record("begin", time, step=step), record("end", time, step=step, status="passed")]


HELLO = [record("hello", 0, rank=0, pid=1, host="a"), record("chosen", 0, device="cpu", backend="gloo")]
ARRIVED = [*HELLO, *passed("import", 1), *passed("rendezvous", 2)]


def process(rank: int, code: int | None = 0, *, told: float | None = None, began: bool = True) -> Attendance:
    return Attendance(rank=rank, pid=10 + rank if began else None, host="a", exit_code=code, told=told)


def reading(records: list[list[dict]], processes: list[Attendance]):
    return read(CommFacts(world_size=len(records), ranks=merge(records, processes)))


def gave_up(step: str, time: float, stack: str = IN_COLLECTIVE, peers: dict | None = None) -> list[dict]:
    return [record("begin", time, step=step), record("timeout", time, step=step, stack=stack, peers=peers or {})]


def told_to_end(step: str, time: float, stack: str) -> list[dict]:
    return [record("begin", time, step=step), record("terminated", time, step=step, stack=stack, peers={})]


def failed(step: str, time: float, text: str) -> list[dict]:
    return [record("begin", time, step=step), record("end", time, step=step, status="failed", text=text)]


@pytest.mark.parametrize(
    ("records", "processes", "kind", "guilty"),
    [
        pytest.param(
            [[*ARRIVED, *passed("goodbye", 3)]] * 2, [process(0), process(1, -6)], "passed", [], id="abort after work"
        ),
        pytest.param([[], []], [process(0, None, began=False)] * 2, "not-started", [0, 1], id="no rank began"),
        pytest.param(
            [[*HELLO, *passed("import", 1), *failed("rendezvous", 9, "MissingRanks: rank 1")], []],
            [process(0, 1), process(1, None, began=False)],
            "missing",
            [1],
            id="never launched",
        ),
        pytest.param(
            [[*ARRIVED, *failed("all_reduce", 3, "RuntimeError: Connection closed by peer [::1]:5")], ARRIVED],
            [process(0, 1), process(1, -9)],
            "died",
            [1],
            id="what the survivor reports follows from the death",
        ),
        pytest.param(
            [
                [*ARRIVED, *gave_up("all_reduce", 9, peers={"1": "T"})],
                [*ARRIVED, record("begin", 3, step="all_reduce")],
            ],
            [process(0, 75), process(1, -9, told=9)],
            "stopped",
            [1],
            id="stopped by a signal",
        ),
        pytest.param(
            [
                [*ARRIVED, *gave_up("all_reduce", 9, peers={"1": "S"})],
                [*ARRIVED, *told_to_end("all_reduce", 9, IN_SLEEP)],
            ],
            [process(0, 75), process(1, 143, told=9)],
            "stalled",
            [1],
            id="elsewhere while the other waits",
        ),
        pytest.param(
            [
                [*ARRIVED, *gave_up("all_reduce", 9, peers={"1": "S"})],
                [*ARRIVED, *told_to_end("all_reduce", 9, IN_COLLECTIVE)],
            ],
            [process(0, 75), process(1, 143, told=9)],
            "unreachable",
            [0, 1],
            id="both wait inside the collective",
        ),
        pytest.param(
            [
                [*ARRIVED, *gave_up("all_reduce", 9, stack=IN_SLEEP, peers={"1": "S"})],
                [*ARRIVED, *told_to_end("all_reduce", 9, IN_SLEEP)],
            ],
            [process(0, 75), process(1, 143, told=9)],
            "stalled",
            [0, 1],
            id="all stand still and none waits for another",
        ),
        pytest.param(
            [
                [*ARRIVED, *failed("process-group", 4, "RuntimeError: Gloo connectFullMesh failed with timed out")],
                [*ARRIVED, *told_to_end("process-group", 5, IN_COLLECTIVE)],
            ],
            [process(0, 1), process(1, 143, told=5)],
            "unreachable",
            [0],
            id="cannot connect",
        ),
        pytest.param(
            [
                [*ARRIVED, *failed("device", 4, "RuntimeError: CUDA error: invalid device ordinal")],
                [*ARRIVED, *failed("process-group", 5, "RuntimeError: Connection reset by peer")],
            ],
            [process(0, 1), process(1, 1)],
            "failed",
            [0],
            id="the earliest exception of its own",
        ),
    ],
)
def test_who_is_at_fault(records, processes, kind, guilty):
    found = reading(records, processes)
    assert (found.kind, [rank.rank for rank in found.ranks]) == (kind, guilty)


def test_steps_of_a_rank():
    records = [*ARRIVED, *gave_up("all_reduce", 9)]
    (rank,) = merge([records], [process(0, 75)])
    assert [(step.name, step.status) for step in rank.steps] == [
        ("import", "passed"),
        ("rendezvous", "passed"),
        ("all_reduce", "timeout"),
    ]
    assert rank.where == " in all_reduce"
    assert rank.ending == "gave-up"


def test_a_record_cut_off_by_a_kill_is_left_out(tmp_path):
    path = record_path(tmp_path, 3)
    path.write_text('{"event": "hello", "time": 1.0, "rank": 3}\n{"event": "beg')
    assert [one["event"] for one in read_records(tmp_path, 3)] == ["hello"]
    assert read_records(tmp_path, 4) == []


def test_the_order_comes_back_as_it_was(tmp_path):
    order = CommOrder(folder=str(tmp_path), device="cpu", dtypes=("bf16", "fp32"), deadline=3.5)
    assert CommOrder.read(order.write()) == order


def in_call(name: str) -> str:
    return IN_COLLECTIVE.replace("in all_reduce", f"in {name}")


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (gave_up("all_reduce", 9), gave_up("all_reduce", 9, stack=in_call("broadcast")), "mismatch"),
        (gave_up("all_reduce", 9), gave_up("all_reduce", 9), "unreachable"),
        # one left the reduction that the other one is still in, and waits for it at the next step
        (
            [*passed("all_reduce", 4), *gave_up("barrier", 9, stack=in_call("barrier"))],
            gave_up("all_reduce", 9),
            "unreachable",
        ),
        # the first to give up takes the connection with it
        (
            gave_up("all_reduce", 9, stack=in_call("broadcast")),
            [
                record("begin", 3, step="all_reduce"),
                record(
                    "end",
                    9,
                    step="all_reduce",
                    status="failed",
                    text="RuntimeError: Connection closed by peer",
                    stack=IN_COLLECTIVE,
                ),
            ],
            "mismatch",
        ),
    ],
)
def test_ranks_that_call_different_collectives(one, other, kind):
    found = reading([[*ARRIVED, *one], [*ARRIVED, *other]], [process(0, 75), process(1, 75)])
    assert found.kind == kind


ON_GPU = 'File "/env/dsdoctor/comm/collectives.py", line 3, in wait_for_device\n    torch.cuda.synchronize()\n'
IN_PRODUCT = 'File "/env/dsdoctor/comm/measuring.py", line 3, in compute\n    torch.cuda.synchronize()\n'


def asked(*calls: str, ras: str = "") -> dict:
    return record("asked", 9, calls=list(calls), ras=ras)


@pytest.mark.parametrize(
    ("one", "other", "kind", "guilty"),
    [
        pytest.param(
            [*gave_up("all_reduce", 9, stack=ON_GPU), asked("all_reduce")],
            [*gave_up("all_reduce", 9, stack=ON_GPU), asked("all_reduce")],
            "unreachable",
            [0, 1],
            id="both wait for the device to end the collective",
        ),
        pytest.param(
            [*gave_up("all_reduce", 9, stack=ON_GPU), asked("all_reduce")],
            [*gave_up("all_reduce", 9, stack=ON_GPU), asked("broadcast")],
            "mismatch",
            [0, 1],
            id="the recorder shows different calls",
        ),
        pytest.param(
            [*gave_up("all_gather", 9, stack=in_call("all_gather_into_tensor")), asked("_all_gather_base")],
            [*gave_up("all_gather", 9, stack=ON_GPU), asked("_all_gather_base")],
            "unreachable",
            [0, 1],
            id="the recorder's names are not those of the stack",
        ),
        pytest.param(
            [*gave_up("measure", 9, stack=ON_GPU)],
            [*gave_up("measure", 9, stack=IN_PRODUCT)],
            "stalled",
            [1],
            id="a GPU that does not come back from its own work",
        ),
    ],
)
def test_ranks_that_wait_for_their_gpu(one, other, kind, guilty):
    found = reading([[*ARRIVED, *one], [*ARRIVED, *other]], [process(0, 75), process(1, 75)])
    assert (found.kind, [rank.rank for rank in found.ranks]) == (kind, guilty)


def test_what_a_rank_said_of_its_gpu_and_of_the_job():
    bound = record("bound", 2, uuid="u0", free=70, total=80)
    records = [*ARRIVED, bound, *gave_up("all_reduce", 9), asked("all_reduce", ras="Job summary")]
    (rank,) = merge([records], [process(0, 75)])
    assert rank.gpu == RankGpu(uuid="u0", free_bytes=70, total_bytes=80)
    assert (rank.calls, rank.ras) == (("all_reduce",), "Job summary")
    (plain,) = merge([ARRIVED], [process(0, 75)])
    assert (plain.gpu, plain.calls, plain.ras) == (None, (), "")
