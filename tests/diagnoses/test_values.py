"""Learning rates that no usual network survives, and values that a constructor refuses."""

from dataclasses import replace

import pytest

from dsdoctor.case import Case
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.runs.facts import Frame
from tests.diagnoses.examples import found
from tests.diagnoses.making import INITIALIZE, USER, failed, healthy


def case(kind, rate, **more):
    return Case(config=ConfigFacts(path="ds.json", data={"optimizer": {"type": kind, "params": {"lr": rate}}, **more}))


SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 300.0}}}
BUILDS = replace(INITIALIZE, function="_configure_basic_optimizer")
TORCH_ADAM = Frame(file="/env/lib/python3.11/site-packages/torch/optim/adam.py", line=60, function="__init__")
BETAS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 1.5]}}}
REFUSED = replace(
    failed("ValueError", "Invalid beta parameter at index 1: 1.5", USER, INITIALIZE, BUILDS, TORCH_ADAM),
    config=ConfigFacts(path="ds.json", data=BETAS),
)
POSITIVE = {
    "config/suspicious-value": [case("AdamW", 3e4), case("SGD", 1e3), case("Adam", 1e-3, **SCHEDULED)],
    "config/refused-value": [REFUSED],
}
NEGATIVE = {
    "config/refused-value": [
        failed("ValueError", "Invalid beta parameter at index 1: 1.5", USER, TORCH_ADAM),  # the script's own optimizer
        failed("TypeError", "unexpected keyword", USER, INITIALIZE, BUILDS, TORCH_ADAM),
        healthy(),
    ],
    "config/suspicious-value": [
        case("AdamW", 3e-4),
        case("AdamW", 0.1),
        case("SGD", 10.0),
        case("AdamW", "auto"),
        case("AdamW", True),
        Case(),
    ],
}


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in POSITIVE.items() for c in cases])
def test_positive(identifier, case):
    assert found(case, identifier)


@pytest.mark.parametrize(("identifier", "case"), [(i, c) for i, cases in NEGATIVE.items() for c in cases])
def test_negative(identifier, case):
    assert not found(case, identifier)


def test_it_names_the_key_and_brings_the_patch_that_a_proof_needs():
    (finding,) = found(POSITIVE["config/suspicious-value"][0], "config/suspicious-value")
    assert finding.keys == ("optimizer.params.lr",)
    assert finding.fixes[0].patch == {"optimizer": {"params": {"lr": 1e-4}}}


def test_a_value_that_the_optimizer_refuses_is_named():
    (finding,) = found(REFUSED, "config/refused-value")
    assert finding.keys == ("optimizer.params.betas",)
    assert "1.5" in finding.cause
