"""`dsdoctor nan` on real DeepSpeed: the verdict, fixes that were tried, a kept batch that runs again, planted faults.

Run by hand: `RESULTS=tests/results/nan.md pytest -m full tests/end_to_end/test_nan.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import dsdoctor
from tests.end_to_end.command import call, ids, stage

DEMO = Path(dsdoctor.__file__).parent / "demo"
SCRIPTS = Path(__file__).parent / "scripts"
OPTIONS = ("--nproc", "2")

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture
def folder(tmp_path):
    shutil.copy(DEMO / "train.py", tmp_path / "train.py")
    shutil.copy(DEMO / "ds_config_fp16.json", tmp_path / "ds_config.json")
    return tmp_path


def fixes(document):
    return [fix["text"] for finding in document["findings"] for fix in finding["fixes"]]


def test_the_patch_of_the_demo_makes_the_demo_train_and_its_batch_comes_back(folder):
    code, document = call(["nan", "ds_config.json", "train.py", *OPTIONS], folder)
    assert (code, document["verdict"]["blame"]) == (1, "precision")
    assert document["verdict"]["first_bad"]["line"].endswith(
        "return self.wo(self.act(self.wi_0(hidden)) * self.wi_1(hidden))"
    )
    assert any("bf16" in text and "tried: finite, loss" in text for text in fixes(document))
    details = stage(document, "numerics")["details"]

    replayed, again = call(["nan", "replay", details["examined"]["bundle"]], folder)
    assert (replayed, again["verdict"]["blame"]) == (1, "precision")
    assert again["verdict"]["first_bad"] == document["verdict"]["first_bad"]

    script = (folder / "train.py").read_text()
    place = "    plant_outlier(model.encoder)\n"
    assert script.count(place) == 1
    patch = "".join(f"    {line}\n" if line else "\n" for line in details["patch"].splitlines())
    (folder / "patched.py").write_text(script.replace(place, place + patch))
    code, trained = call(["nan", "ds_config.json", "patched.py", *OPTIONS], folder)
    assert (code, trained["verdict"]["blame"]) == (0, "healthy"), trained["findings"]
    for rank in stage(trained, "with-deepspeed")["details"]["ranks"]:
        assert len(rank["steps"]) == 20
        assert not any(skipped for *_, skipped in rank["steps"]), "no step is skipped"
        assert all(isinstance(loss, float) for _, loss, *_ in rank["steps"]), "every loss is finite"


def test_planted_faults_are_found_in_the_demo(folder):
    code, document = call(["nan", "selftest", "ds_config.json", "train.py", "--html", "page.html"], folder)
    rows = stage(document, "numerics")["details"]["selftest"]
    assert code == 0, rows
    assert sum(row["right"] is True for row in rows) >= 8
    assert (folder / "page.html").is_file()


@pytest.mark.parametrize("zero", [0, 3])
def test_a_nan_of_the_script_is_the_scripts(tmp_path, zero):
    shutil.copy(SCRIPTS / "regression.py", tmp_path / "train.py")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
    }
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    code, document = call(["nan", "ds_config.json", "train.py", *OPTIONS], tmp_path, "--fault", "nan")
    assert "numerics/nan-loss" in ids(document, "error")
    assert (code, document["verdict"]["blame"]) == (1, "script")
    assert document["verdict"]["first_bad"]["step"] == 3


def test_a_healthy_run_is_watched_and_mapped(tmp_path):
    shutil.copy(DEMO / "train.py", tmp_path / "train.py")
    shutil.copy(DEMO / "ds_config_bf16.json", tmp_path / "ds_config.json")
    options = ("--html", "page.html", "--trace-batches", "1", "--stop-after-batch", "5")
    code, document = call(["nan", "ds_config.json", "train.py", *OPTIONS, *options], tmp_path)
    assert (code, document["verdict"]["blame"]) == (0, "healthy"), document["findings"]
    assert ids(document, "warning") == []
    page = (tmp_path / "page.html").read_text()
    assert "encoder.block.1.layer.1.DenseReluDense.wo" in page
    assert "*** Finished batch number=1 ***" in Path(stage(document, "numerics")["details"]["trace"]).read_text()


def test_remedies_are_tried_without_zero_3_where_the_weights_are_partitioned(folder):
    config = json.loads((folder / "ds_config.json").read_text())
    kept_apart = {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    config["zero_optimization"] = {"stage": 3, "stage3_max_reuse_distance": 0, **kept_apart}
    (folder / "ds_config.json").write_text(json.dumps(config))
    code, document = call(["nan", "ds_config.json", "train.py", *OPTIONS], folder)
    assert (code, document["verdict"]["blame"]) == (1, "precision")
    assert document["verdict"]["first_bad"]["module"] == "encoder.block.1.layer.1.DenseReluDense.wo"
    trials = stage(document, "numerics")["details"]["examined"]["trials"]
    assert {trial["remedy"]: trial["outcome"] for trial in trials} == {"bf16": "finite", "fp32-island": "finite"}


def test_where_runs_part(tmp_path):
    """The same run twice, with other partitioning, and with a division by zero in the fourth step."""
    shutil.copy(SCRIPTS / "regression.py", tmp_path / "train.py")
    folders = []
    for zero, *words in ((0,), (0,), (3,), (0, "--fault", "nan")):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0} if zero else {"stage": zero},
        }
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
        _, document = call(["nan", "ds_config.json", "train.py", *OPTIONS, "--steps", "6"], tmp_path, *words)
        folders.append(document["report_folder"])
    parted = []
    for other in folders[1:]:
        code, document = call(["nan", "compare", folders[0], other], tmp_path)
        found = document["comparison"]
        assert (code, found["ranks"]) == (0, [0, 1])
        assert (found["only_a"]["count"], found["only_b"]["count"]) == (0, 0)
        parted.append({name: found[name] for name in ("bits", "rounding")})
    again, partitioned, faulty = parted
    assert again == {"bits": None, "rounding": None}
    assert partitioned["rounding"] is None
    bad = faulty["rounding"]
    assert (bad["step"], bad["phase"], bad["a"]["abs_max"] < 100, bad["b"]["abs_max"]) == (3, "forward", True, "nan")
