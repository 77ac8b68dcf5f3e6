"""The schema table: what is known of releases by other sources than the table itself."""

import pytest

from dsdoctor.dsconfig.release import at_least, in_range, version_key
from dsdoctor.dsconfig.schema import nearest, releases, releases_with, schema_for


@pytest.mark.parametrize("release", releases())
def test_every_release_of_the_table_loads(release):
    schema = schema_for(release)
    assert schema.release == release
    assert schema.key("zero_optimization.stage").choices == (0, 1, 2, 3)
    assert schema.sections["zero_optimization"].forbids
    assert not schema.sections[""].forbids
    assert schema.key("train_batch_size").kind == "int"
    assert "adamw" in schema.optimizer_names
    assert "WarmupLR" in schema.schedulers


def test_changes_between_releases():
    """Known from DeepSpeed's release notes and pull requests, not from the table."""
    assert "amp" in schema_for("0.19.8").removed
    assert schema_for("0.19.6").key("amp") is not None
    assert schema_for("0.19.2").key("log_level") is None
    assert schema_for("0.19.3").key("log_level") is not None
    assert schema_for("0.14.4").key("steps_per_print").default == 10
    assert schema_for("0.15.4").key("steps_per_print").default is None
    assert releases_with("torch_autocast")[0] == "0.17.5"
    assert releases_with("no_such_key") == ()


def test_old_fp16_section_has_its_scale_keys():
    names = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}
    assert names <= set(schema_for("0.14.4").sections["fp16"].keys)


def test_either_spelling_finds_the_key():
    schema = schema_for("0.19.8")
    assert schema.key("zero_optimization.max_live_parameters") is schema.key(
        "zero_optimization.stage3_max_live_parameters"
    )


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("zero_optimizations", "zero_optimization"),
        ("gradientClipping", "gradient_clipping"),
        ("train_micro_batch_size_per_device", "train_micro_batch_size_per_gpu"),
        ("comment", None),
        ("_note", None),
        ("model_name", None),
        ("foo", None),
    ],
)
def test_the_nearest_key(typo, meant):
    assert nearest(typo, schema_for("0.19.8").sections[""].names()) == meant


def test_versions():
    assert version_key("0.19.8+cu121") == (0, 19, 8)
    assert version_key("") == ()
    assert at_least("0.19.10", "0.19.8")
    assert not at_least("", "0.1")
    assert in_range("0.18.2", "0.17.1", "0.19.2")
    assert not in_range("0.19.3", "0.17.1", "0.19.2")
    assert in_range("1.0", "0.19.8", None)
