"""What a run says of the script's own ds_config. No framework is needed for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsdoctor.runs.intercepts import config_notes
from dsdoctor.runs.session import RankSession
from dsdoctor.runs.spec import RunSpec, trace_path
from dsdoctor.runs.trace import TraceWriter, read_trace

GIVEN = {"gradient_clipping": "auto", "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}


@pytest.fixture
def session(tmp_path: Path) -> RankSession:
    spec = RunSpec(script="x", cwd=str(tmp_path), folder=str(tmp_path), config=GIVEN)
    return RankSession(spec, TraceWriter(trace_path(tmp_path, 0)), 0, 0, 1)


def told(session: RankSession) -> tuple[str, ...]:
    return read_trace(session.spec.folder, 0).notes


def test_values_that_a_framework_fills_in_are_named(session: RankSession) -> None:
    config = session.config()
    session.hand_out(config, "transformers")
    config["gradient_clipping"] = 0.5
    config["optimizer"]["params"]["lr"] = 0.002
    config["train_batch_size"] = 16

    config_notes.say_filled_in(session, config, "transformers")

    filled = "gradient_clipping = 0.5, optimizer.params.lr = 0.002, train_batch_size = 16"
    assert told(session) == (f"Transformers filled in: {filled}",)


def test_what_dsdoctor_itself_left_out_is_not_filled_in(session: RankSession) -> None:
    config = {"zero_optimization": {"stage": 0}}
    session.hand_out(config, "accelerate")
    config_notes.say_filled_in(session, config, "accelerate")
    assert told(session) == ()


def test_config_of_the_script_is_compared_as_a_dict_or_a_file(session: RankSession, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps({**GIVEN, "gradient_clipping": 1.0}))
    config_notes.say_differences(session, str(theirs))
    config_notes.say_differences(session, {**GIVEN, "steps_per_print": 5})
    config_notes.say_differences(session, GIVEN)
    config_notes.say_differences(session, "no such file")
    assert [note.rpartition(": ")[2] for note in told(session)] == ["gradient_clipping", "steps_per_print"]
