"""Nothing heavy at import: the command line answers before torch would have been loaded."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "deepspeed", "transformers", "accelerate", "rich", "psutil", "numpy", "pydantic", "hjson")


def loaded_by(code):
    script = f"{code}\nimport sys\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return finished.stdout.split()


@pytest.mark.parametrize("code", ["import dsdoctor", "from dsdoctor.cli.main import build_parser; build_parser()"])
def test_nothing_heavy(code):
    assert loaded_by(code) == []


@pytest.mark.parametrize(
    "code",
    [
        "import dsdoctor.diagnoses",
        "import dsdoctor.triage, dsdoctor.stages",
        "import dsdoctor.blame.verdict, dsdoctor.runs.supervise, dsdoctor.memory.estimate, dsdoctor.comm.check",
    ],
)
def test_the_parent_process_never_needs_torch(code):
    assert not {"torch", "deepspeed", "transformers"} & set(loaded_by(code))
