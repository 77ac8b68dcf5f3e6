"""Reading a script's calls: by its text, and never by running it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.scripts.read import parse, read

SOURCE = """
import deepspeed
raise SystemExit("never run")

def main():
    with deepspeed.zero.GatheredParameters(list(model.parameters())), open("x") as file:
        torch.save(model.state_dict(), file)
    engine, optimizer, _, self.schedule = deepspeed.initialize(args, model=net, config="ds.json")

class Runner:
    def go(self):
        args = Seq2SeqTrainingArguments(output_dir=OUT, bf16=True, learning_rate=3e-4, deepspeed=cfg["x"])
"""


def test_calls_with_their_place_and_arguments():
    facts = parse(SOURCE, "train.py")
    (save,) = facts.named("save")
    assert (save.owner, save.arguments, save.scope, save.line) == ("torch", ("model.state_dict", "file"), "main", 7)
    assert save.contexts == ("deepspeed.zero.GatheredParameters", "open")
    assert save.text == "torch.save(model.state_dict(), file)"
    (started,) = facts.named("initialize")
    assert started.targets == ("engine", "optimizer", "_", "self.schedule")
    assert started.given["model"] == "net"
    assert started.literals == {"config": "ds.json"}


def test_training_arguments_are_found_by_their_name():
    arguments = parse(SOURCE).training_arguments
    assert arguments.scope == "Runner.go"
    assert arguments.literals == {"bf16": True, "learning_rate": 3e-4}
    assert "deepspeed" in arguments.given


def test_two_constructions_settle_nothing():
    assert parse("TrainingArguments(bf16=True)\nTrainingArguments(bf16=False)").training_arguments is None


def test_what_is_no_python_says_so(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(b"def \xff(:\n")
    assert "SyntaxError" in read(path).problem
    assert parse("x = 1\0").problem
    assert parse("f(" * 5000 + ")" * 5000).problem


@given(st.text(max_size=60))
def test_any_text_gives_facts(source):
    parse(source)


@pytest.mark.parametrize(
    "source", ["a = b = f(1)", "(f() for x in y)", "f(*a, **b)", "x: int = f()", "f()()", "lambda: f()"]
)
def test_odd_calls(source):
    assert parse(source).calls_any("f")
