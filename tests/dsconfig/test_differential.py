"""Would DeepSpeed refuse this config? What the shipped table says against what constructing DeepSpeed's config does.

Plain runs ask the installed release about a sample. `pytest -m full tests/dsconfig` asks it about all generated
configs, and every older release whose Python is named in DSDOCTOR_OLD_PYTHONS (paths parted by `:`), and writes
tests/results/config_differential.md. Such a Python is an environment of its own, which may borrow all but DeepSpeed:

    python3 -m venv old
    python -c 'import site; print(site.getsitepackages()[0])' > $(echo old/lib/python3*/site-packages)/base.pth
    DS_BUILD_OPS=0 old/bin/pip install --no-deps --no-build-isolation deepspeed==0.14.4
"""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import pytest

from dsdoctor.case import Case
from dsdoctor.diagnoses import config as rules
from dsdoctor.dsconfig import load_config
from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.release import at_least, version_key
from dsdoctor.dsconfig.schema import releases
from tests.dsconfig.mutations import configs
from tests.dsconfig.real import INSTALLED, ask

OLD_PYTHONS = [path for path in os.environ.get("DSDOCTOR_OLD_PYTHONS", "").split(os.pathsep) if path]
ZERO = "zero_optimization"
RESULTS = Path(__file__).parents[1] / "results" / "config_differential.md"
ABOUT = """# What `dsdoctor config` refuses against what DeepSpeed refuses

Every generated config of `tests/dsconfig/mutations.py` was judged from the shipped table and handed to the real
`DeepSpeedConfig` of the release, for one rank. "later" counts configs that dsdoctor calls an error and DeepSpeed takes
when it reads them, to fail (or do something else) afterwards; "not told" counts those that DeepSpeed refuses and
dsdoctor does not. Both are explained entries of `tests/dsconfig/test_differential.py`, which wrote this file.
"""


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


NO_MESH = r"not divide the \d+ ranks|is not the \d+ ranks"
LATER = (
    # errors of dsdoctor that DeepSpeed raises after its config is built, or never says: why, and which findings
    ("kept; the code that uses it fails", "config/wrong-type", lambda f, _c: "where it is used" in f.cause),
    (
        "any text counts as true: it means something else",
        "config/wrong-type",
        lambda f, _c: "counts as true" in f.cause,
    ),
    (
        "any text is kept; the engine looks it up",
        "config/wrong-type",
        about("data_types.grad_accum_dtype", "log_level"),
    ),
    ("'auto' counts as not given, or is kept as a text", "config/auto-unresolved", anything),
    ("the mesh of ranks cannot be built", "config/batch-size", lambda f, _c: re.search(NO_MESH, f.cause)),
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
    ("the engine refuses amp beside ZeRO", "config/conflict", lambda f, _c: "Apex amp and ZeRO" in f.cause),
    ("ZeRO-3 refuses it", "config/conflict", about("torch_autocast.enabled")),
    ("ZenFlow's set-up refuses it", "config/conflict", lambda f, _c: f.keys[0].startswith(f"{ZERO}.zenflow")),
    ("ZeRO-3's optimizer refuses it", "config/conflict", about(f"{ZERO}.zero_quantized_gradients")),
    ("the scheduler's constructor refuses it", "config/conflict", about("scheduler.params.warmup_num_steps")),
    ("the engine compares the two", "config/conflict", about("tensor_parallel.tp.tp_size")),
    (
        "AutoEP's set-up refuses it",
        "config/conflict",
        lambda f, _c: re.search("AutoEP|autoep_size|expert_tensor_parallel_size", f.cause),
    ),
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


@dataclass(kw_only=True)
class Comparison:
    """What came of it: configs that were judged otherwise, and how many are explained, by reason."""

    tried: int
    differing: list = field(default_factory=list)
    refused: int = 0
    explained: Counter = field(default_factory=Counter)


def compared(tried, release, python=sys.executable):
    told = Comparison(tried=len(tried))
    for config, answer in zip(tried, ask(tried, python=python), strict=True):
        told.refused += answer.error is not None
        said = f"{json.dumps(config)} {answer.error}"
        excuse = next((why for why, words in NOT_TOLD if re.search(words, said, re.DOTALL)), None)
        if answer.error and excuse is not None:
            told.explained[f"not told: {excuse}"] += 1
            continue
        errors, later = judged(config, release)
        ours = errors + [f for f in later if answer.error and re.search(USED_AT_ONCE, f"{f.cause} {f.evidence}")]
        if bool(ours) != (answer.error is not None):
            told.differing.append((config, answer.error, [(f.id, f.cause) for f in errors + later]))
        elif later and not ours:
            told.explained[f"later: {_reason(later[0], config, release)}"] += 1
    return told


def _reason(finding, config, release):
    effective = Effective.of(load_config(config, release=release, framework="deepspeed"))
    return next(entry[0] for entry in LATER if _holds(entry, finding, effective))


def record(release, python, told):
    """Write one release's row into the results, and what is explained; other releases' parts stay."""
    parts = _parts()
    versions = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
    said = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout.split()
    lines = [f"| {told.tried:,} | {told.refused:,} | {len(told.differing)} | {', torch '.join(said)}, {date.today()} |"]
    lines += [f"- {count:,} x {reason}" for reason, count in sorted(told.explained.items())]
    lines += [f"- unexplained: `{json.dumps(config)}`: {error}; {ours}" for config, error, ours in told.differing[:20]]
    parts[release] = [lines[0], "", *lines[1:]]
    head = "| configs | refused by DeepSpeed | unexplained | Python |\n|---|---|---|---|"
    body = [f"## {name}\n\n{head}\n" + "\n".join(parts[name]) for name in sorted(parts, key=version_key)[::-1]]
    RESULTS.write_text(f"{ABOUT}\n" + "\n\n".join(body) + "\n")


def _parts():
    """What the results hold, by release."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    found = {}
    for part in text.split("\n## ")[1:]:
        name, _, rest = part.partition("\n")
        found[name.strip()] = rest.strip().splitlines()[2:]
    return found


def test_a_sample_on_the_installed_release():
    if INSTALLED not in releases():
        pytest.skip("the table does not hold the installed release")
    tried = random.Random(5).sample(configs(INSTALLED), 600)
    assert compared(tried, INSTALLED).differing == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", [sys.executable, *OLD_PYTHONS])
def test_all(python):
    question = "from importlib.metadata import version; print(version('deepspeed').split('+')[0])"
    release = subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()
    assert release in releases()
    tried = configs(release)
    assert len(tried) > 3000
    told = compared(tried, release, python)
    record(release, python, told)
    assert told.differing == []
