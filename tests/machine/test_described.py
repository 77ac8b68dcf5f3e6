"""Machines in words."""

import pytest

from dsdoctor.machine.described import NotUnderstood, described, gpus, size
from dsdoctor.machine.facts import Device, MachineFacts


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("80GiB", 80 << 30), ("80GB", 80 * 10**9), ("1.5TiB", 3 << 39), ("512 MiB", 512 << 20), ("24g", 24 * 10**9)],
)
def test_both_kinds_of_units(text, bytes_):
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["", "-5GiB", "0GiB", "lots", "1e4", "5iB", "9999999PiB", "1.2.3GB", "GiB", "80"])
def test_what_is_no_size(text):
    with pytest.raises(NotUnderstood):
        size(text)


@pytest.mark.parametrize(
    ("text", "count", "bytes_"),
    [
        ("8x80GiB", 8, 80 << 30),
        ("4 x 24GB", 4, 24 * 10**9),
        ("A100-80G", 1, 80 << 30),
        ("2xa100-80gb", 2, 80 << 30),
        ("8×H100", 8, 81559 << 20),
        ("rtx 4090", 1, 24564 << 20),
    ],
)
def test_gpus(text, count, bytes_):
    found = gpus(text)
    assert (len(found), {one.total_bytes for one in found}) == (count, {bytes_})


@pytest.mark.parametrize("text", ["0x80GiB", "8x80", "99999x80GiB", "8x", "8xZ9000", "x"])
def test_what_describes_no_gpus(text):
    with pytest.raises(NotUnderstood):
        gpus(text)


def test_limits_of_this_host_do_not_hold_for_the_one_described():
    here = MachineFacts(memory_available=1 << 30, cgroup_limit=1 << 29, devices=(Device(index=0, name="real"),))
    other = described(here, host=512 << 30, nvme=1 << 40)
    assert other.host_available == 512 << 30
    assert other.devices == here.devices
    assert other.swap_folders[0].free_bytes == 1 << 40
