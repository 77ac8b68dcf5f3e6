"""The figures in messages about memory."""

import pytest

from dsdoctor.diagnoses.memory_numbers import device_memory, host_sum
from dsdoctor.logs.facts import LogFacts
from tests.diagnoses.examples import found
from tests.diagnoses.making import BACKWARD, USER, event, failed, log, process_exit

GIB = 2**30
NEW = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 256.00 MiB is "
    "free. Including non-PyTorch memory, this process has {mine} GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 508.00 MiB (GPU 1; 24.00 GiB total capacity; 20.00 GiB already allocated; "
    "196.00 MiB free; 22.50 GiB reserved in total by PyTorch)"
)


def test_a_message_of_a_new_release():
    read = device_memory(NEW.format(mine="79.75", unused="3.00 GiB"))
    assert (read.asked, read.total, read.free) == (2 * GIB, 80 * GIB, GIB / 4)
    assert (read.allocated, read.unused) == (70 * GIB, 3 * GIB)
    assert read.fragmented
    assert read.others is None


def test_a_message_of_an_old_release_tells_what_is_reserved_in_all():
    read = device_memory(OLD)
    assert (read.asked, read.total, read.free) == (508 * 2**20, 24 * GIB, 196 * 2**20)
    assert read.unused == pytest.approx(2.5 * GIB)


def test_what_others_hold_is_what_this_process_does_not():
    read = device_memory(NEW.format(mine="39.75", unused="10.00 MiB"))
    assert read.others == 40 * GIB
    assert not read.fragmented
    assert "other processes hold 40" in read.told()


def test_another_message_tells_nothing():
    assert device_memory("CUDA error: out of memory").told() == ""


def test_fragmentation_changes_what_to_do_first():
    case = failed("torch.OutOfMemoryError", NEW.format(mine="79.75", unused="3.00 GiB"), USER, BACKWARD)
    (finding,) = found(case, "memory/gpu-oom-step")
    assert "fragmentation" in finding.cause
    assert "expandable_segments" in finding.fixes[0].text
    (plain,) = found(failed("torch.OutOfMemoryError", NEW.format(mine="79.75", unused="3.00 MiB"), USER, BACKWARD),
                     "memory/gpu-oom-step")  # fmt: skip
    assert "expandable_segments" not in plain.fixes[0].text


PARTS = event("partition-sizes", ranks="2", sizes="(3000000000, False), (1000, False)")
USED = event("host-memory", used="28.00", percent="22.4")
OFFLOADED = event("cpu-adam")


def test_the_sum_of_offloaded_states():
    needed = host_sum(LogFacts(events=(PARTS, USED, OFFLOADED)))
    assert needed.need == 2 * 3_000_001_000 * 16
    assert needed.total == pytest.approx(125 * GIB)
    assert needed.tight  # 89 GiB of 97 GiB that are left


def test_a_sum_that_is_too_large_makes_a_kill_likelier_to_be_for_memory():
    large = event("partition-sizes", ranks="2", sizes="(4000000000, False)")
    (sure,) = found(log(large, USED, OFFLOADED, exits=(process_exit(-9),)), "memory/host-oom-kill")
    small = event("partition-sizes", ranks="2", sizes="(400000000, False)")
    (unsure,) = found(log(small, USED, OFFLOADED, exits=(process_exit(-9),)), "memory/host-oom-kill")
    assert sure.confidence > unsure.confidence
    assert "125" in sure.cause


@pytest.mark.parametrize("missing", [PARTS, USED, OFFLOADED])
def test_no_sum_without_all_of_its_figures(missing):
    assert host_sum(LogFacts(events=tuple(e for e in (PARTS, USED, OFFLOADED) if e is not missing))) is None


def test_the_oldest_messages_call_it_cached():
    """torch up to 1.4 wrote cached - allocated there."""
    read = device_memory(
        "CUDA out of memory. Tried to allocate 8.50 GiB (GPU 0; 32.00 GiB total capacity; 25.00 GiB already allocated; "
        "5.00 GiB free; 14.00 MiB cached)"
    )
    assert (read.free, read.unused, read.fragmented) == (5 * GIB, 14 * 2**20, False)
