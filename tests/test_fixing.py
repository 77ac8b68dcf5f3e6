"""Fixing a config file: what is safe is done, what is not is left, and a second time changes nothing."""

import pytest

from dsdoctor.case import Case
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.load import with_text
from dsdoctor.fixing import as_diff, back_up, fix

TEXT = """{
  // the batch
  "train_micro_batch_size_per_gpu": "4",
  "zero_optimization": {
    "stage": 2,
    "overlap_com": true,      # hides communication
    "cpu_offload": true,
    "offload_param": {"device": "cpu"}
  },
  "amp": {"enabled": false},
  "gradient_cliping": 1.0,
  "hysteresis": 2
}
"""
SAFELY_FIXED = """{
  // the batch
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,      # hides communication
    "offload_optimizer": {"device": "cpu"}
  },
  "gradient_cliping": 1.0,
  "hysteresis": 2
}
"""


def case(text=TEXT):
    return Case(config=with_text(load_config({}, release="0.19.8", world_size=2, framework="deepspeed"), text))


def test_safe_fixes_only():
    fixed = fix(case(), TEXT)
    assert fixed.text == SAFELY_FIXED
    assert not fixed.refused
    assert {finding.id for finding, _fix in fixed.applied} == {
        "config/wrong-type",
        "config/unknown-key",
        "config/deprecated",
        "config/ineffective",
        "config/removed",
    }


def test_unsafe_fixes_on_demand():
    """A misspelt key at the top level is ignored by DeepSpeed, so that mending it changes the run."""
    text = fix(case(), TEXT, unsafe=True).text
    assert '"gradient_clipping": 1.0' in text
    assert "hysteresis" in text.partition("fp16")[2]


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_second_time_changes_nothing(unsafe):
    once = fix(case(), TEXT, unsafe=unsafe).text
    again = fix(case(once), once, unsafe=unsafe)
    assert again.text == once
    assert not again.applied


def test_fixes_that_undo_each_other_end():
    text = '{"train_batch_size": 7, "fp16": {"enabled": true}, "bf16": {"enabled": true}}'
    fixed = fix(case(text), text, unsafe=True)
    assert len(fixed.applied) < 10


def test_a_file_that_cannot_be_read_stays():
    fixed = fix(case("{"), "{")
    assert (fixed.text, fixed.applied) == ("{", ())


def test_the_diff_names_the_file_and_only_the_changes():
    lines = as_diff("ds.json", TEXT, SAFELY_FIXED).splitlines()
    assert lines[:2] == ["--- ds.json", "+++ ds.json"]
    assert '-    "overlap_com": true,      # hides communication' in lines
    assert "   // the batch" in lines
    assert as_diff("ds.json", TEXT, TEXT) == ""


def test_no_backup_overwrites_another(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(TEXT)
    copies = [back_up(path) for _ in range(3)]
    assert [copy.name for copy in copies] == ["ds.json.bak", "ds.json.bak1", "ds.json.bak2"]
    assert all(copy.read_text() == TEXT for copy in copies)
