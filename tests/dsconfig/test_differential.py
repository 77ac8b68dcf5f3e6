"""Would DeepSpeed refuse this config? What the shipped table says against what constructing DeepSpeed's config does.

Plain runs ask the installed release about a sample. `pytest -m full` asks it about all generated configs, and every
older release whose Python is named in DSDOCTOR_OLD_PYTHONS (paths parted by `:`).
"""

import json
import os
import random
import re
import subprocess
import sys

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import config as rules
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least
from dsdoctor.dsconfig.schema import releases
from tests.dsconfig.mutations import configs
from tests.dsconfig.real import INSTALLED, ask

OLD_PYTHONS = [path for path in os.environ.get("DSDOCTOR_OLD_PYTHONS", "").split(os.pathsep) if path]
ZERO = "zero_optimization"


def about(*keys):
    return lambda finding, _config: finding.keys[0] in keys


def passed_on(finding, _config):
    return finding.keys[0].startswith(("optimizer.", "scheduler."))


def no_norm_at_stage_1_or_2(finding, config):
    return finding.keys[0] == f"{ZERO}.compute_grad_norm" and config.stage in (1, 2)


def old_window(finding, config):
    return finding.keys[0].startswith("fp16.loss_scale_window") and not at_least(config.schema.release, "0.19.3")


def anything(_finding, _config):
    return True


LATER = (
    # errors of dsdoctor that DeepSpeed raises after its config is built, or never says: why, and which findings
    ("kept; the code that uses it fails", "config/wrong-type", lambda f, _c: "where it is used" in f.cause),
    (
        "any text counts as true: it means something else",
        "config/wrong-type",
        lambda f, _c: "counts as true" in f.cause,
    ),
    ("any text is kept; the engine looks it up", "config/wrong-type", about("data_types.grad_accum_dtype")),
    ("'auto' counts as not given, or is kept as a text", "config/auto-unresolved", anything),
    ("the mesh of ranks cannot be built", "config/batch-size", lambda f, _c: "do not divide" in f.cause),
    ("before 0.19.3 the scaler divides by it at the first overflow", "config/conflict", old_window),
    ("the engine looks the class up and calls it", "config/unknown-key", passed_on),
    ("the engine looks the class up and calls it", "config/removed", about("optimizer.type")),
    ("the engine refuses the optimizer", "config/untested-optimizer", anything),
    ("the engine compares it with the precision", "config/conflict", about("data_types.param_dtype")),
    ("the engine compares it with the precision", "config/conflict", about("data_types.grad_accum_dtype")),
    ("ZeRO's optimizer refuses it", "config/conflict", about("prescale_gradients", "gradient_predivide_factor")),
    ("ZeRO's optimizer refuses it", "config/conflict", about(f"{ZERO}.allgather_bucket_size", f"{ZERO}.legacy_stage1")),
    ("the engine looks at clipping and offload", "config/conflict", no_norm_at_stage_1_or_2),
    (
        "the engine asks for the CPU's optimizer",
        "config/conflict",
        lambda f, _c: "16-bit master weights need" in f.cause,
    ),
    ("the engine compares it with the optimizer", "config/conflict", about("optimizer.type")),
    ("the engine looks at what overlaps", "config/conflict", about("managed_gradient_accumulation")),
    ("the compiler's set-up refuses it", "config/conflict", about("compile.offload_activation")),
    ("ZeRO-3 refuses it", "config/conflict", about("torch_autocast.enabled")),
    ("ZenFlow's set-up refuses it", "config/conflict", lambda f, _c: "ZenFlow" in f.cause),
    ("ZeRO-3's optimizer refuses it", "config/conflict", about(f"{ZERO}.zero_quantized_gradients")),
    ("the scheduler's constructor refuses it", "config/conflict", about("scheduler.params.warmup_num_steps")),
    ("the engine compares the two", "config/conflict", about("tensor_parallel.tp.tp_size")),
    ("the engine counts the layers", "config/conflict", lambda f, _c: "random_ltd" in f.cause),
    ("the swapper opens the folder", "config/ineffective", lambda f, _c: f.keys[0].endswith("nvme_path")),
)
NOT_TOLD = (
    # what DeepSpeed refuses and dsdoctor does not tell: why, and a pattern of the config and DeepSpeed's words
    ("judged by the accelerator of the machine", "GDS currently only supported for CUDA accelerator"),
    ("sections of releases up to 0.19.6 that are taken as a whole: no switch in them", "KeyError: 'enabled'"),
    ("a power of two beyond every number", "Numerical result out of range"),
    ("null where older releases calculate with the value", "'int' and 'NoneType'"),
    ("releases with pydantic 1 read 'auto' there as a value", r'"comms_logger": \{"\w+": "auto"\}.*CommsLoggerConfig'),
)
USED_AT_ONCE = "where it is used|takes the text as|a TypeError when"
"""What fails later may fail while the config is built, if it is used there."""


def judged(config, release):
    """What dsdoctor calls an error: what DeepSpeed should refuse at once, and what fails later."""
    facts = load_config(config, release=release, world_size=1, framework="deepspeed")
    effective = Effective.of(facts)
    found = [finding for rule in rules.DIAGNOSES for finding in rule.examine(Case(config=facts))]
    errors = [finding for finding in found if finding.severity == "error"]
    later = [finding for finding in errors if any(_holds(entry, finding, effective) for entry in LATER)]
    return [finding for finding in errors if finding not in later], later


def _holds(entry, finding, effective):
    _reason, identifier, applies = entry
    return finding.id == identifier and applies(finding, effective)


def disagreements(tried, release, python=sys.executable):
    found = []
    for config, answer in zip(tried, ask(tried, python=python), strict=True):
        said = f"{json.dumps(config)} {answer.error}"
        if answer.error and any(re.search(words, said, re.DOTALL) for _reason, words in NOT_TOLD):
            continue
        errors, later = judged(config, release)
        ours = errors + [f for f in later if answer.error and re.search(USED_AT_ONCE, f"{f.cause} {f.evidence}")]
        if bool(ours) != (answer.error is not None):
            found.append((config, answer.error, [(finding.id, finding.cause) for finding in errors + later]))
    return found


def test_a_sample_on_the_installed_release():
    if INSTALLED not in releases():
        pytest.skip("the table does not hold the installed release")
    tried = random.Random(5).sample(configs(INSTALLED), 600)
    assert disagreements(tried, INSTALLED) == []


@pytest.mark.full
def test_all_on_the_installed_release():
    assert INSTALLED in releases()
    tried = configs(INSTALLED)
    assert len(tried) > 3000
    assert disagreements(tried, INSTALLED) == []


@pytest.mark.full
@pytest.mark.skipif(not OLD_PYTHONS, reason="DSDOCTOR_OLD_PYTHONS names no Python with an older DeepSpeed")
@pytest.mark.parametrize("python", OLD_PYTHONS)
def test_all_on_an_older_release(python):
    question = "from importlib.metadata import version; print(version('deepspeed'))"
    release = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()
    assert release in releases()
    tried = configs(release)
    assert len(tried) > 3000
    assert disagreements(tried, release, python) == []
