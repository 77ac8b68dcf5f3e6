"""Configs as people publish them: nothing is said of what is well, and what is said is what DeepSpeed does."""

import json

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.load import with_text
from dsdoctor.fixing import fix
from tests.dsconfig.real import INSTALLED, ask
from tests.dsconfig.wild import CONFIGS

HERE = [wild for wild in CONFIGS if wild.release == INSTALLED]
REFUSED_LATER = ("config/auto-unresolved", "version/known-defect", "loss-scale/static")
"""What DeepSpeed takes without a word when it reads the config, though it does harm."""


def case(wild, text):
    facts = load_config({}, release=wild.release, world_size=wild.ranks, framework=wild.framework, hf_arguments={})
    return Case(config=with_text(facts, text))


def troubles(job):
    return [finding for finding in diagnose(job, strict=True).findings if finding.severity != "info"]


def refused(wild):
    found = troubles(case(wild, json.dumps(wild.config)))
    return [finding for finding in found if finding.severity == "error" and finding.id not in REFUSED_LATER]


@pytest.mark.parametrize("wild", CONFIGS, ids=lambda wild: wild.name)
def test_what_is_found_is_wrong_and_nothing_else(wild):
    text = json.dumps(wild.config, indent=2)
    findings = diagnose(case(wild, text), strict=True).findings
    assert {finding.id for finding in findings if finding.severity != "info"} == set(wild.wrong)
    for finding in findings:
        places = [evidence for evidence in finding.evidence if evidence.line is not None]
        assert places, f"{finding.id} points at no place: {finding.cause}"
        assert all(evidence.column is not None and evidence.text for evidence in places)


def test_there_are_enough_of_them():
    assert len(CONFIGS) >= 80
    assert len([wild for wild in CONFIGS if not wild.wrong]) >= 55


def test_deepspeed_agrees_with_every_error():
    """Those that the installed release would get as they stand: "auto" is filled in by Hugging Face first."""
    plain = [wild for wild in HERE if wild.framework == "deepspeed"]
    ours = [
        any(
            finding.severity == "error" and finding.id not in REFUSED_LATER
            for finding in troubles(case(w, json.dumps(w.config)))
        )
        for w in plain
    ]
    answers = ask([wild.config for wild in plain], world_size=[wild.ranks for wild in plain])
    differing = [
        (wild.name, error, answer.error)
        for wild, error, answer in zip(plain, ours, answers, strict=True)
        if error != (answer.error is not None) and wild.name not in FAILS_LATER
    ]
    assert differing == []
    assert len(plain) > 30


FAILS_LATER = {
    "lion with a parameter of another class": "the constructor of the optimizer raises",
    "warm-up of no steps": "the constructor of the scheduler raises",
    "autotuned": "the autotuner writes the batch size in before DeepSpeed reads it",
}


@pytest.mark.parametrize("wild", [wild for wild in CONFIGS if wild.wrong], ids=lambda wild: wild.name)
def test_fixing_twice_changes_nothing(wild):
    text = json.dumps(wild.config, indent=2)
    for unsafe in (False, True):
        job = case(wild, text)
        once = fix(job, text, unsafe=unsafe).text
        assert fix(job, once, unsafe=unsafe).text == once


def test_fixed_configs_load_in_deepspeed():
    """Those of the installed release that no error is left in, after every fix that has a patch."""
    fixed, ranks = [], []
    for wild in HERE:
        if wild.wrong and wild.framework == "deepspeed":
            text = json.dumps(wild.config, indent=2)
            done = fix(case(wild, text), text, unsafe=True)
            left = [f for f in troubles(case(wild, done.text)) if f.severity == "error"]
            if done.applied and not left:
                fixed.append(json.loads(done.text))
                ranks.append(wild.ranks)
    assert len(fixed) >= 10
    assert [answer.error for answer in ask(fixed, world_size=ranks)] == [None] * len(fixed)
