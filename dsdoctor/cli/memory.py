"""`dsdoctor memory DS_CONFIG`: will the job fit, and the cheapest config that does, before anything is started."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork, tell_broken
from dsdoctor.cli.options import add_output_options, count, duration, numbered_folder, positive, readable
from dsdoctor.cli.pages import write_page

if TYPE_CHECKING:
    from dsdoctor.machine.facts import MachineFacts
    from dsdoctor.memory.analysis import MemoryAnalysis
    from dsdoctor.memory.estimate import Use
    from dsdoctor.memory.inventory import Inventory


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "memory",
        help="will it fit, and the cheapest config that does",
        description="What a job needs of each GPU, host and disk, at its peak, and which config fits.",
        usage="dsdoctor memory DS_CONFIG (--model MODEL | --params N | --script TRAIN.py) [options] [-- script args]",
    )
    parser.add_argument("config", metavar="DS_CONFIG")
    _add_model(parser)
    _add_work(parser)
    _add_machine(parser)
    parser.add_argument("--html", metavar="REPORT", help="also write the timeline to one file for a browser")
    add_output_options(parser)
    parser.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the model (one of the first three)")
    one = group.add_mutually_exclusive_group(required=True)
    one.add_argument("--model", metavar="MODEL", help="config.json, folder, safetensors file, or id in the hub's cache")
    one.add_argument("--params", type=count, metavar="N", help="number of parameters: 7e9, 7B, 350M")
    one.add_argument("--script", metavar="TRAIN.py", help="run it until it hands its model to DeepSpeed")
    group.add_argument("--largest-layer", type=count, metavar="N", help="parameters of the largest layer")
    for name in ("layers", "hidden", "heads"):
        group.add_argument(f"--{name}", type=positive, metavar="N")
    group.add_argument("--vocab", type=positive, metavar="N")
    group.add_argument(
        "--trainable", type=count, metavar="N", help="only that many are trained (LoRA), all else frozen"
    )
    group.add_argument("--zero-init", action="store_true", help="it is built under zero.Init")
    group.add_argument("--timeout", type=duration, default=300.0, metavar="S", help="seconds for --script")
    group.add_argument("--out", default="dsdoctor-report", metavar="DIR", help="where --script is observed")


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the work")
    group.add_argument("--seq", type=positive, metavar="N", help="tokens of a sequence, for the activations")
    group.add_argument("--micro-batch", type=positive, metavar="N", help="sequences (default: the config's)")
    group.add_argument("--checkpointing", action="store_true", help="activation checkpointing is on")
    group.add_argument("--attention", choices=("fused", "eager"), default="fused", help="fused: SDPA, flash")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine (default: this one)")
    group.add_argument("--gpu", metavar="SPEC", help="GPUs of one host: 8x80GiB, 8xA100-80G")
    group.add_argument("--host", metavar="SIZE", help="host memory free for the job: 512GiB")
    group.add_argument("--nodes", type=positive, default=1, metavar="N")
    group.add_argument("--nvme", metavar="SIZE", help="free space for swapping on each host: 2TiB")
    group.add_argument("--nproc", type=positive, metavar="N", help="ranks a host (default: one a GPU, else 2)")
    group.add_argument("--save-dir", metavar="DIR", help="where checkpoints go, to see whether they fit")
    group.add_argument("--keep", type=positive, default=1, metavar="N", help="checkpoints kept at a time (default 1)")
    group.add_argument("--deepspeed-version", metavar="V", help="whose defaults count (default: the installed one)")


def run(arguments: argparse.Namespace) -> int:
    from dsdoctor.dsconfig import load_data
    from dsdoctor.memory.analysis import RANKS_ON_A_CPU, analyze
    from dsdoctor.memory.divides import DoesNotDivide

    config = load_data(readable(arguments.config))
    machine = _machine(arguments, config)
    if arguments.script is not None:
        model, config = _captured(arguments, config)
    else:
        model = _model(arguments)
    each = arguments.nproc or len(machine.devices) or RANKS_ON_A_CPU
    try:
        analysis = analyze(config, model, machine, ranks_per_host=each, nodes=arguments.nodes, use=_use(arguments))
    except DoesNotDivide as error:
        raise CannotWork(str(error)) from None
    _show(arguments, analysis)
    return analysis.exit_code


def _machine(arguments: argparse.Namespace, config: dict[str, Any]) -> MachineFacts:
    """This machine, or the one that the options describe: of this one then only the disks count. Raises CannotWork."""
    from dsdoctor.machine import described, quick
    from dsdoctor.machine.facts import MachineFacts

    here = quick.here(config, save_dir=arguments.save_dir)
    try:
        machine = described.described(
            here if arguments.gpu is None else MachineFacts(disks=here.disks),
            devices=described.gpus(arguments.gpu) if arguments.gpu else None,
            host=described.size(arguments.host) if arguments.host else None,
            nvme=described.size(arguments.nvme) if arguments.nvme else None,
        )
    except described.NotUnderstood as error:
        raise CannotWork(str(error)) from None
    return quick.with_release(machine, arguments.deepspeed_version)


def _model(arguments: argparse.Namespace) -> Inventory:
    """The model that `--model` or `--params` names. Raises CannotWork."""
    from dsdoctor.memory.inventory import Sizes, of_number, with_adapters
    from dsdoctor.memory.sources import ModelUnknown, inventory_of

    sizes = Sizes(
        layers=arguments.layers,
        largest_layer=arguments.largest_layer,
        hidden=arguments.hidden,
        heads=arguments.heads,
        vocab=arguments.vocab,
    )
    try:
        model = inventory_of(arguments.model) if arguments.model is not None else of_number(arguments.params, sizes)
        return model if arguments.trainable is None else with_adapters(model, arguments.trainable)
    except (ModelUnknown, ValueError) as error:
        raise CannotWork(str(error)) from None


def _captured(arguments: argparse.Namespace, config: dict[str, Any]) -> tuple[Inventory, dict[str, Any]]:
    """The model that the script hands to DeepSpeed, and the config as a framework filled it in. Raises CannotWork."""
    from dsdoctor.job import Job
    from dsdoctor.memory.inventory import of_facts
    from dsdoctor.triage import triage

    job = Job(
        config=readable(arguments.config),
        script=str(readable(arguments.script)),
        args=arguments.script_args,
        nproc=1,
        timeout=arguments.timeout,
        stages=("memory",),
        folder=numbered_folder(Path(arguments.out)),
    )
    print("dsdoctor: running the script until it hands its model to DeepSpeed", file=sys.stderr)
    probe = triage(job).case.run("probe")
    if probe is None or probe.model is None or probe.facts is None:
        why = probe.why or probe.outcome if probe is not None else "see the report folder"
        raise CannotWork(f"the script did not come as far as handing a model to DeepSpeed ({why}); {job.folder}")
    return of_facts(probe.model), {**config, **probe.facts.config}


def _use(arguments: argparse.Namespace) -> Use:
    from dsdoctor.memory.estimate import Use

    return Use(
        micro_batch=arguments.micro_batch,
        sequence=arguments.seq,
        attention=arguments.attention,
        checkpointing=arguments.checkpointing,
        zero_init=arguments.zero_init,
        save_dir=arguments.save_dir,
        kept=arguments.keep,
    )


def _show(arguments: argparse.Namespace, analysis: MemoryAnalysis) -> None:
    from dsdoctor.report import html, memory, plots

    tell_broken(analysis.broken)
    if arguments.html:
        from dsdoctor.report.memory_page import sections

        text = html.page("dsdoctor memory", analysis.findings, sections=sections(analysis.memory))
        write_page(arguments.html, text)
    if arguments.json:
        from dsdoctor.report.document import dumps

        print(dumps({**analysis.to_dict(), "understood": _understood(arguments)}))
        return
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    for line in memory.lines(analysis.memory, _understood(arguments), blocks=plots.drawable(sys.stdout.encoding)):
        terminal.line(line.text, style=line.style)
    terminal.findings(analysis.findings)


def _understood(arguments: argparse.Namespace) -> dict[str, str]:
    """The sizes of a described machine as they were given and as they were read."""
    from dsdoctor.machine import described
    from dsdoctor.units import size

    said = {}
    if arguments.gpu:
        devices = described.gpus(arguments.gpu)
        said[arguments.gpu] = f"{len(devices)} x {size(devices[0].total_bytes)} a host"
    for text in (arguments.host, arguments.nvme):
        if text:
            said[text] = size(described.size(text))
    return said
