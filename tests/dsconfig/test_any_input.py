"""Any JSON in: findings or a clear error out, never a traceback, and fixes that come to an end."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.load import with_text
from dsdoctor.dsconfig.schema import schema_for
from dsdoctor.fixing import fix
from dsdoctor.scripts.read import parse

SCHEMA = schema_for("0.19.8")
KEYS = sorted({name for section in SCHEMA.sections.values() for name in section.names()})
SCRIPT = parse("model = AutoModel.from_pretrained('x')\nargs = TrainingArguments(deepspeed='ds.json', bf16=True)\n")
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.sampled_from(["auto", "cpu", "nvme", "AdamW", "3", "", "a.b"])
    | st.text(max_size=5)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
configs = st.dictionaries(st.sampled_from(sorted(SCHEMA.sections[""].keys)) | st.text(max_size=6), values, max_size=5)


def case(text, framework):
    empty = load_config({}, release="0.19.8", world_size=2, framework=framework)
    return Case(config=with_text(empty, text), script=SCRIPT)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30)
@given(configs | values, st.sampled_from([None, 2]), st.sampled_from([None, "deepspeed", "transformers"]))
@example({"activation_checkpointing": {".": None, "allgather_bucket_size": None}}, 2, None)
def test_any_json(value, indent, framework):
    text = json.dumps(value, indent=indent)
    job = case(text, framework)
    diagnose(job, strict=True)
    fixed = fix(job, text, unsafe=True)
    assert fix(job, fixed.text, unsafe=True).text == fixed.text


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="{}[]:,\"'\\ \n\r\t#/*aN1e.-+\ufeff\0", max_size=50))
def test_any_text(text):
    job = case(text, "deepspeed")
    diagnose(job, strict=True)
    fix(job, text)


@pytest.mark.parametrize(
    "text",
    [
        "NaN",
        '{"train_batch_size": NaN}',
        '{"train_batch_size": Infinity, "gradient_clipping": -Infinity}',
        "[" * 5000 + "]" * 5000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "3",
        '"text"',
        "null",
        "{",
    ],
)
def test_odd_files_are_findings(text):
    findings = diagnose(case(text, "deepspeed"), strict=True).findings
    assert any(finding.severity == "error" for finding in findings)


def test_a_long_list_is_told_at_once():
    text = " [" + "1," * 5_000_000 + "1]"
    assert "a list" in with_text(load_config({}, release="0.19.8"), text).syntax_error.message


def test_yaml_in_a_json_file_is_told():
    findings = diagnose(case("train_batch_size: 8\nzero_optimization:\n  stage: 2\n", "deepspeed")).findings
    assert any("looks like YAML" in finding.cause for finding in findings)


def test_a_name_with_dots_is_one_key():
    text = '{"train_batch_size": 8, "zero_optimization.stage": 2}'
    (finding,) = [f for f in diagnose(case(text, "deepspeed")).findings if f.id == "config/unknown-key"]
    assert finding.severity == "warning"
    assert "objects in objects" in finding.fixes[0].text
    assert finding.fixes[0].patch is None


def test_ten_megabytes_are_read():
    text = json.dumps({"train_batch_size": 8, "x": {f"key_{number}": "x" * 200 for number in range(50_000)}}, indent=1)
    assert len(text) > 10_000_000
    facts = with_text(load_config({}, release="0.19.8"), text)
    assert facts.where("x.key_49999").line == 50_003
