"""How the memory model is shown: every term once, bars within their width, pages without anything to load."""

import pytest

from dsdoctor.machine.facts import Device, MachineFacts
from dsdoctor.memory.estimate import Use, estimate
from dsdoctor.memory.inventory import Sizes, of_number
from dsdoctor.report.memory import BAR, lines
from dsdoctor.report.memory_page import sections

GIB = 1 << 30
MODEL = of_number(7 * 10**9, Sizes(layers=32, hidden=4096, vocab=32000))
CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


def facts(gpu: int = 24, host: int | None = 256, gpus: int = 4):
    devices = tuple(Device(index=i, name="G", total_bytes=gpu * GIB, free_bytes=gpu * GIB) for i in range(gpus))
    machine = MachineFacts(devices=devices, memory_available=None if host is None else host * GIB)
    return estimate(
        CONFIG, MODEL, machine, nproc_per_node=max(gpus, 1), device="cuda" if gpus else "cpu", use=Use(sequence=512)
    )


@pytest.mark.parametrize("one", [facts(), facts(gpu=1, host=1), facts(host=None), facts(gpus=0)])
def test_all_that_is_known_is_shown(one):
    text = "\n".join(line.text for line in lines(one, {"8x80GB": "8 x 74.5 GiB"}))
    for term in one.terms:
        assert term.name in text
    for row in (f"{need.stage:<6}{need.precision:<10}{need.offload_optimizer:<10}" for need in one.needs):
        assert row in text
    assert all(assumption in text for assumption in one.assumptions)
    assert "8x80GB was read as 8 x 74.5 GiB" in text


def test_bars_end_at_the_limit():
    for line in lines(facts(gpu=1, host=1), {}):
        assert line.text.count("█") + line.text.count("░") in (0, BAR)


def test_streams_without_blocks_get_plain_signs():
    told = "".join(line.text for line in lines(facts(), {}, blocks=False))
    assert "█" not in told
    assert "#" in told


def test_the_page_has_a_bar_for_every_moment_and_loads_nothing():
    one = facts()
    page = "".join(sections(one))
    for moment in one.current.per_gpu.moments:
        assert moment.name in page
    assert page.count("<svg") == page.count("</svg>") == 2
    assert "http" not in page
    assert "<script" not in page


def test_names_are_escaped():
    from dataclasses import replace

    page = "".join(sections(replace(facts(), model="<script>alert(1)</script>")))
    assert "<script" not in page
