"""Known defects of DeepSpeed releases: the release and the config both have to meet them."""

import math

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import known_defects
from dsdoctor.diagnoses.known_defects import DEFECTS
from dsdoctor.dsconfig import load_config
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogFacts, Point, Series
from dsdoctor.runs.facts import Failure, ModelFacts, RankRun, Run, Step

ZERO = "zero_optimization"
FP16 = {"fp16": {"enabled": True}}
BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}


def judged(release, *sections, run=None, logs=None, stage=None):
    data = {key: value for section in sections for key, value in section.items()}
    if stage is not None:
        data[ZERO] = {"stage": stage}
    config = load_config(data, release=release, world_size=2, framework="deepspeed")
    return Case(config=config, runs=(run,) if run else (), logs=logs)


def norms(*values, name="grad_norm", versions=None):
    points = tuple(
        Point(step=float(n), value=value, evidence=Evidence(source="train.log", text=str(value), line=n + 1))
        for n, value in enumerate(values)
    )
    series = (Series(name=name, points=points),)
    return LogFacts(sources=("train.log",), series=series, versions=versions or {})


def run(model=None, steps=(), failure=None):
    rank = RankRun(rank=0, steps=steps, failure=failure)
    return Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome="raised" if failure else "finished",
        ranks=(rank,),
        seconds=1.0,
        folder="/out",
        world_size=1,
        model=model,
    )


def model(*dtypes):
    return ModelFacts(class_name="Net", parameters=100, trainable=100, largest_layer=10, dtypes=dtypes)


CRASH = Failure(rank=0, type="RuntimeError", message="expected floating point", source="with-deepspeed")
SPECTRAL = run(model(("torch.float32", 60), ("torch.complex64", 40)), failure=CRASH)

POSITIVE = {
    "version/known-defect": [
        judged("0.19.8", FP16),
        judged("0.18.3", FP16, stage=0),
        judged("0.19.8", AUTOCAST, stage=2),
        judged("0.18.2", AUTOCAST, stage=3),
        judged("0.18.2", BF16, stage=2),
        judged("0.16.4", BF16, stage=3),
        judged("0.19.4", BF16, stage=3),
        judged("0.19.2", {"bf16": {"enabled": True, "check_grad_overflow": True}}, stage=3),
        judged("0.16.4", FP16, stage=2),
        judged("0.19.8", {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, stage=2),
        judged("0.19.8", run=SPECTRAL),
        judged("0.19.6", logs=norms(2.0, math.sqrt(2), *[1.4142135] * 5)),
        Case(logs=norms(*[1.0] * 6, versions={"deepspeed": "0.17.5"})),
    ]
}
NEGATIVE = {
    "version/known-defect": [
        Case(),
        judged("0.19.8", FP16, stage=1),
        judged("0.18.2", FP16, stage=0),
        judged("0.19.8", {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, stage=2),
        judged("0.19.8", {"fp16": {"enabled": False}}, stage=0),
        judged("0.19.8", BF16, stage=3),
        judged("0.19.4", BF16, stage=2),
        judged("0.18.2", {"bf16": {"enabled": True, "check_grad_overflow": True}}, stage=2),
        judged("0.11.1", BF16, stage=2),
        judged("0.18.2", BF16, stage=0),
        judged("", FP16, stage=0),
        judged("0.19.8", {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, stage=2),
        judged("0.19.8", AUTOCAST, stage=0),
        judged("0.16.4", {"fp16": {"enabled": True, "initial_scale_power": 16}}, stage=2),
        judged("0.17.1", FP16, stage=2),
        judged("0.19.8", run=run(model(("torch.float32", 100)), failure=CRASH)),
        judged("0.19.8", run=run(model(("torch.complex64", 100)))),
        judged("0.19.8", logs=norms(*[1.0] * 6)),
        judged("0.19.6", logs=norms(1.0, 1.3, 0.9, 1.0, 1.1, 1.0)),
        judged("0.19.6", logs=norms(*[1.2] * 6)),
        Case(logs=norms(*[1.0] * 6)),
    ]
}


def found(case):
    return list(known_defects.KnownDefect().examine(case))


@pytest.mark.parametrize("case", POSITIVE["version/known-defect"])
def test_finds(case):
    assert found(case)


@pytest.mark.parametrize("case", NEGATIVE["version/known-defect"])
def test_does_not_find(case):
    assert not found(case)


def test_the_patch_avoids_the_defect():
    from dsdoctor.dsconfig import patch

    for case in POSITIVE["version/known-defect"]:
        for finding in found(case):
            for fix in finding.fixes:
                if fix.patch is None or finding.caveat == "Stage 3 ignores the key before 0.19.8.":
                    continue
                mended = load_config(patch.apply(case.config.data, fix.patch), release=case.config.release)
                assert finding.title not in [again.title for again in found(Case(config=mended))]


def test_severity_of_fp16_without_zero():
    (finding,) = found(judged("0.19.8", FP16, stage=0))
    assert finding.severity == "error"
    assert finding.keys[0] == f"{ZERO}.stage"
    assert "0.18.3" in finding.evidence[0].text


@pytest.mark.parametrize(
    ("case", "severity"),
    [
        (judged("0.18.2", BF16, stage=2), "info"),
        (judged("0.18.2", BF16, stage=2, run=run(steps=(Step(index=0, losses=(2.0,)),))), "info"),
        (judged("0.18.2", BF16, stage=2, run=run(steps=(Step(index=0, losses=(math.nan,)),))), "warning"),
        (judged("0.18.2", BF16, stage=2, logs=norms(2.0, math.nan, name="loss")), "warning"),
    ],
)
def test_a_latent_defect_is_a_note_until_something_is_not_finite(case, severity):
    (finding,) = found(case)
    assert finding.severity == severity


def test_the_config_in_a_log_counts_too():
    logs = LogFacts(sources=("train.log",), config=FP16, versions={"deepspeed": "0.19.8"})
    assert [finding.severity for finding in found(Case(logs=logs))] == ["error"]


def test_the_table_is_well_formed():
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    for defect in DEFECTS:
        assert defect.keys
        assert defect.latent is False or defect.severity == "warning"


def test_a_defect_of_the_numbers_does_not_explain_an_exception():
    """Refused for fp16 beside bf16, or a KeyError: both would fail without the defect as well."""
    (beside,) = found(judged("0.19.8", FP16, run=run(model(("torch.float16", 100)), failure=CRASH)))
    assert beside.severity == "warning"
    (hurt,) = found(judged("0.19.8", FP16, run=run(model(("torch.float16", 100)))))
    assert hurt.severity == "error"
