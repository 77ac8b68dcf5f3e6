"""Who will hand the ds_config to DeepSpeed, judged by the script's text alone; the run itself settles it later."""

from __future__ import annotations

import ast

from dsdoctor.dsconfig.facts import Framework

_MARKS: tuple[tuple[Framework, frozenset[str]], ...] = (
    ("transformers", frozenset({"Trainer", "TrainingArguments", "Seq2SeqTrainer", "SFTTrainer", "HfDeepSpeedConfig"})),
    ("lightning", frozenset({"DeepSpeedStrategy", "LightningModule", "Fabric"})),
    ("accelerate", frozenset({"Accelerator", "DeepSpeedPlugin"})),
)


def guess(source: str) -> Framework | None:
    """The framework, or None where the text does not say. A direct call of `deepspeed.initialize` decides."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    names = {_name(node) for node in ast.walk(tree)}
    if any(_calls_initialize(node) for node in ast.walk(tree)):
        return "deepspeed"
    return next((framework for framework, marks in _MARKS if names & marks), None)


def _name(node: ast.AST) -> str:
    """The last name that a node mentions: an imported name, an attribute, a plain name."""
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _calls_initialize(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(called, ast.Attribute) or called.attr != "initialize":
        return False
    return isinstance(called.value, ast.Name) and called.value.id in ("deepspeed", "ds")
