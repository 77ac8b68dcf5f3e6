"""`dsdoctor memory DS_CONFIG`: will the job fit, and the cheapest config that does, before anything is started."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsdoctor.cli.errors import CannotWork
from dsdoctor.cli.options import add_output_options, count, duration, numbered_folder, positive, readable

if TYPE_CHECKING:
    from dsdoctor.finding import Finding
    from dsdoctor.machine.facts import MachineFacts
    from dsdoctor.memory.facts import MemoryFacts
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
    from dsdoctor.case import Case
    from dsdoctor.diagnoses import diagnose

    config = _config(arguments.config)
    machine = _machine(arguments, config)
    if arguments.script is not None:
        model, config = _captured(arguments, config)
    else:
        model = _model(arguments)
    facts = _estimated(arguments, config, model, machine)
    findings = diagnose(Case(memory=facts)).findings
    code = 1 if any(finding.severity == "error" for finding in findings) else 0
    _show(arguments, facts, findings, machine, code)
    return code


def _config(path: str) -> dict[str, Any]:
    """The ds_config's data. Raises CannotWork where it cannot be read."""
    from dsdoctor.dsconfig import load_config

    facts = load_config(readable(path))
    if facts.syntax_error is not None:
        error = facts.syntax_error
        raise CannotWork(f"not a ds_config: {path}:{error.line}: {error.message}")
    return dict(facts.data)


def _machine(arguments: argparse.Namespace, config: dict[str, Any]) -> MachineFacts:
    """This machine without asking torch, or the one that the options describe. Raises CannotWork."""
    from dsdoctor.machine import described, host, nvidia, nvme
    from dsdoctor.machine.collect import gather

    probes: list[Any] = [("disks", lambda: _disks(arguments.save_dir))]
    if arguments.gpu is None:
        probes += [
            ("memory", host.memory),
            ("control group", host.control_group),
            ("/dev/shm", host.shared_memory),
            ("limits", host.limits),
            ("nvme_path", lambda: nvme.folders(config)),
            ("nvidia-smi", nvidia.gpus),
        ]
    here = gather(probes)
    release = arguments.deepspeed_version or _installed()
    try:
        return _with_versions(
            described.described(
                here,
                devices=described.gpus(arguments.gpu) if arguments.gpu else here.driver_devices or None,
                host=described.size(arguments.host) if arguments.host else None,
                nvme=described.size(arguments.nvme) if arguments.nvme else None,
            ),
            release,
        )
    except described.NotUnderstood as error:
        raise CannotWork(str(error)) from None


def _with_versions(machine: MachineFacts, release: str) -> MachineFacts:
    from dataclasses import replace

    return replace(machine, versions={**machine.versions, **({"deepspeed": release} if release else {})})


def _disks(save_dir: str | None) -> dict[str, Any]:
    """Free space where checkpoints go; a folder that is not there yet will lie on its nearest parent's disk."""
    import shutil

    from dsdoctor.machine.facts import Disk

    if save_dir is None:
        return {}
    absolute = Path(save_dir).absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    usage = shutil.disk_usage(existing)
    return {"disks": (Disk(path=save_dir, free_bytes=usage.free, total_bytes=usage.total),)}


def _installed() -> str:
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return ""


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
        model = inventory_of(arguments.model) if arguments.model else of_number(arguments.params, sizes)
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


def _estimated(
    arguments: argparse.Namespace, config: dict[str, Any], model: Inventory, machine: MachineFacts
) -> MemoryFacts:
    from dsdoctor.memory.divides import DoesNotDivide, check
    from dsdoctor.memory.estimate import Use, estimate

    each = arguments.nproc or len(machine.devices) or 2
    try:
        check(config, each * arguments.nodes)
    except DoesNotDivide as error:
        raise CannotWork(str(error)) from None
    return estimate(
        config,
        model,
        machine,
        nproc_per_node=each,
        nodes=arguments.nodes,
        device="cuda" if machine.devices else "cpu",
        use=Use(
            micro_batch=arguments.micro_batch,
            sequence=arguments.seq,
            attention=arguments.attention,
            checkpointing=arguments.checkpointing,
            zero_init=arguments.zero_init,
            save_dir=arguments.save_dir,
            kept=arguments.keep,
        ),
    )


def _show(
    arguments: argparse.Namespace,
    facts: MemoryFacts,
    findings: tuple[Finding, ...],
    machine: MachineFacts,
    code: int,
) -> None:
    from dsdoctor.report import memory

    if arguments.html:
        _write_page(arguments.html, facts, findings)
    if arguments.json:
        from dsdoctor.report.document import document, dumps

        extra = {**facts.to_dict(), "understood": _understood(arguments)}
        print(dumps(document("memory", exit_code=code, findings=findings, environment=machine.to_dict(), extra=extra)))
        return
    from dsdoctor.report.terminal import Terminal

    terminal = Terminal(sys.stdout)
    for line in memory.lines(facts, _understood(arguments)):
        terminal.line(line.text, style=line.style)
    terminal.findings(findings)


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


def _write_page(path: str, facts: MemoryFacts, findings: tuple[Finding, ...]) -> None:
    from dsdoctor.report import html
    from dsdoctor.report.memory_page import sections

    try:
        html.write(Path(path), html.page("dsdoctor memory", findings, sections=sections(facts)))
    except html.NotOurs as refused:
        raise CannotWork(str(refused)) from None
    except OSError as error:
        raise CannotWork(f"{path}: {error.strerror or error}") from None
