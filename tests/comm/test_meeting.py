"""What the processes of a check tell each other, over a store that is slow where it matters, and over torch's own."""

import json
import socket
import threading
import time

from dsdoctor.comm.meeting import Meeting, store
from dsdoctor.comm.started import Started


class SlowStore:
    """torch's store in one process; writing down what begins with `slow` takes a while, as on a busy machine."""

    def __init__(self, slow: str = "") -> None:
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._slow = slow

    def set(self, key: str, value: str) -> None:
        if self._slow and key.startswith(self._slow):
            time.sleep(0.3)
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount
            return self._counts[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def test_nobody_is_missing_who_is_just_being_written_down():
    slow = SlowStore(slow="hello/")
    joining = [threading.Thread(target=Meeting(slow, rank).join, args=({"rank": rank},)) for rank in range(3)]
    for thread in joining:
        thread.start()
    found = Meeting(slow, 0).joined(3, 5.0)
    assert sorted(one["rank"] for one in found) == [0, 1, 2]
    for thread in joining:
        thread.join()


def test_who_does_not_come_is_waited_for_until_the_time_is_up():
    meeting = Meeting(SlowStore(), 0)
    meeting.join({"rank": 0})
    begun = time.monotonic()
    assert meeting.joined(2, 0.3) == [{"rank": 0}]
    assert 0.3 <= time.monotonic() - begun < 2.0


def test_two_of_one_rank_are_both_seen():
    meeting = Meeting(SlowStore(), 0)
    meeting.join({"rank": 1})
    meeting.join({"rank": 1})
    assert meeting.joined(2, 1.0) == [{"rank": 1}, {"rank": 1}]


def test_reports_are_those_that_came_in_time():
    meeting = Meeting(SlowStore(), 2)
    meeting.report("links", [1])
    assert meeting.reports("links", [1, 2], 0.2) == {2: [1]}
    assert meeting.told("nothing") is None


def place(port: int, rank: int = 0) -> Started:
    return Started(
        launcher="srun",
        rank=rank,
        local_rank=0,
        world_size=2,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=port,
    )


def test_over_the_store_of_torch():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first = Meeting(store(place(port), 10.0), 0)
    second = Meeting(store(place(port, rank=1), 10.0), 1)
    first.join({"rank": 0})
    second.join({"rank": 1})
    assert sorted(json.dumps(one) for one in first.joined(2, 5.0)) == ['{"rank": 0}', '{"rank": 1}']
    second.tell("verdict", 3)
    assert first.hear("verdict", 5.0) == 3
