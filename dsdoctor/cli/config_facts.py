"""The facts that `dsdoctor config` judges by, collected as far as its options ask for them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import readable

if TYPE_CHECKING:
    from dsdoctor.case import Case
    from dsdoctor.dsconfig import ConfigFacts
    from dsdoctor.machine.facts import MachineFacts
    from dsdoctor.memory.facts import MemoryFacts
    from dsdoctor.scripts.facts import ScriptFacts


def gather(arguments: argparse.Namespace) -> Case:
    """All facts that the options name. Raises CannotWork."""
    from dsdoctor.case import Case
    from dsdoctor.dsconfig import load_config
    from dsdoctor.dsconfig.hf_arguments import ArgumentsUnreadable, given, parse
    from dsdoctor.model_config import ModelUnreadable, load, named_by

    script, framework = _script(arguments.script)
    try:
        hf_arguments = given(arguments.hf_args) if arguments.hf_args else {}
        model = load(Path(arguments.model)) if arguments.model else None
        words = parse(arguments.script_args)
    except (ArgumentsUnreadable, ModelUnreadable) as error:
        raise CannotWork(str(error)) from None
    if script is not None and script.training_arguments is not None:
        hf_arguments = {**script.training_arguments.literals, **hf_arguments}
    config = load_config(
        Path(arguments.config),
        release=arguments.deepspeed_version or _installed(),
        world_size=arguments.world_size,
        framework=framework or ("transformers" if arguments.hf_args else None),
        script_args=arguments.script_args,
        hf_arguments=hf_arguments,
    )
    machine = _machine(config) if arguments.machine else None
    return Case(
        config=config,
        script=script,
        model=model or named_by(script, hf_arguments | words),
        machine=machine,
        memory=_memory(arguments, config, machine),
    )


def _script(path: str | None) -> tuple[ScriptFacts | None, Any]:
    """The script's calls, and the framework that it uses."""
    if path is None:
        return None, None
    from dsdoctor.runs.framework import guess
    from dsdoctor.scripts.read import read

    facts = read(readable(path))
    if facts.problem is not None:
        raise CannotWork(f"not a Python script: {path}: {facts.problem}")
    return facts, guess(readable(path).read_text(encoding="utf-8", errors="replace"))


def _machine(config: ConfigFacts) -> Any:
    from dsdoctor.machine.collect import collect

    print("dsdoctor: looking at this machine", file=sys.stderr)
    return collect(config=config.data)


def _memory(arguments: argparse.Namespace, config: ConfigFacts, here: MachineFacts | None) -> MemoryFacts | None:
    """What the model needs of the machine at hand or the one described; None where one of the two is not given.

    Raises CannotWork.
    """
    asked = arguments.model and (here is not None or arguments.gpu or arguments.host)
    if not asked or config.syntax_error is not None:
        return None
    from dsdoctor.dsconfig import Effective
    from dsdoctor.machine import described, quick
    from dsdoctor.memory.analysis import RANKS_ON_A_CPU, analyze
    from dsdoctor.memory.divides import DoesNotDivide
    from dsdoctor.memory.estimate import Use
    from dsdoctor.memory.sources import ModelUnknown, inventory_of

    try:
        machine = described.described(
            here or quick.here(config.data),
            devices=described.gpus(arguments.gpu) if arguments.gpu else None,
            host=described.size(arguments.host) if arguments.host else None,
        )
        each = len(machine.devices) or config.world_size or RANKS_ON_A_CPU
        each = min(each, config.world_size or each)
        sharded = config.framework == "transformers" and Effective.of(config).stage == 3
        return analyze(
            config.data,
            inventory_of(arguments.model),
            quick.with_release(machine, config.release or None),
            ranks_per_host=each,
            nodes=max(1, (config.world_size or each) // each),
            use=Use(zero_init=sharded),
        ).memory
    except (described.NotUnderstood, ModelUnknown, DoesNotDivide) as error:
        raise CannotWork(str(error)) from None


def _installed() -> str:
    """The installed release; one that the shipped table lacks is read from the install, once."""
    from dsdoctor.dsconfig import schema
    from dsdoctor.machine.versions import installed

    release = _named_by_folder() or installed("deepspeed") or ""
    if release and release.split("+")[0] not in schema.releases():
        print(f"dsdoctor: reading what DeepSpeed {release} takes, once", file=sys.stderr)
        problem = schema.learn()
        if problem:
            print(f"dsdoctor: judged by an older release: {problem}", file=sys.stderr)
    return release


def _named_by_folder() -> str:
    """The release by the name of its `.dist-info` folder, which is found sooner than importlib.metadata is imported."""
    for folder in sys.path:
        for found in Path(folder or ".").glob("deepspeed-*.dist-info"):
            return found.name.removeprefix("deepspeed-").removesuffix(".dist-info")
    return ""
