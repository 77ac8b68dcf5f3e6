"""Learning rates that no usual network survives."""

import pytest

from dsdoctor.case import Case
from dsdoctor.dsconfig.facts import ConfigFacts
from tests.diagnoses.examples import found


def case(kind, rate, **more):
    return Case(config=ConfigFacts(path="ds.json", data={"optimizer": {"type": kind, "params": {"lr": rate}}, **more}))


SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 300.0}}}
POSITIVE = {"config/suspicious-value": [case("AdamW", 3e4), case("SGD", 1e3), case("Adam", 1e-3, **SCHEDULED)]}
NEGATIVE = {
    "config/suspicious-value": [
        case("AdamW", 3e-4),
        case("AdamW", 0.1),
        case("SGD", 10.0),
        case("AdamW", "auto"),
        case("AdamW", True),
        Case(),
    ]
}


@pytest.mark.parametrize("case", POSITIVE["config/suspicious-value"])
def test_positive(case):
    assert found(case, "config/suspicious-value")


@pytest.mark.parametrize("case", NEGATIVE["config/suspicious-value"])
def test_negative(case):
    assert not found(case, "config/suspicious-value")


def test_it_names_the_key_and_brings_the_patch_that_a_proof_needs():
    (finding,) = found(POSITIVE["config/suspicious-value"][0], "config/suspicious-value")
    assert finding.keys == ("optimizer.params.lr",)
    assert finding.fixes[0].patch == {"optimizer": {"params": {"lr": 1e-4}}}
