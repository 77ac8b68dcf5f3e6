"""What installing dsdoctor does to an environment that has torch and DeepSpeed already: nothing."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_a_plain_install_changes_no_installed_package(tmp_path):
    """pip's own plan, made without an index: whatever it would have to fetch or replace makes this fail."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--quiet", "--report", str(report), str(ROOT)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    planned = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    assert planned <= {"dsdoctor"}


def test_requirements_stay_wide():
    """No upper bound and no exact version, since nobody wants a doctor that upgrades the patient."""
    for requirement in metadata.requires("dsdoctor") or []:
        assert not any(mark in requirement.split(";")[0] for mark in ("==", "<", "~=")), requirement


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_torch_and_deepspeed_are_required_and_their_minimum_is_old(name):
    wanted = {"torch": "torch>=2.2", "deepspeed": "deepspeed>=0.14"}[name]
    assert wanted in (metadata.requires("dsdoctor") or [])
