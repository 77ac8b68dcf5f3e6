"""The stages before the script trains: environment, config, comm, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.finding import Finding
from dsdoctor.machine.facts import MachineFacts
from dsdoctor.runs.facts import Run
from dsdoctor.runs.framework import guess
from dsdoctor.stages.observe import host_device, launch_plan, nproc, observe
from dsdoctor.triage import Examination, StageResult, Status
from dsdoctor.units import size


def environment(examination: Examination) -> StageResult:
    """Versions, devices and limits of this machine; op builds only as far as the config needs them."""
    machine = look_at_the_machine(examination, libraries=not examination.job.ask_libraries_late)
    missing = [name for name in ("torch", "deepspeed") if name not in machine.versions]
    if missing:
        return StageResult(name="environment", status="failed", why=f"{' and '.join(missing)} cannot be imported")
    gpus = f"{len(machine.devices)} x {machine.devices[0].name}" if machine.devices else "no GPU, rehearsal on the CPU"
    versions = f"torch {machine.versions['torch']}, DeepSpeed {machine.versions['deepspeed']}"
    why = f"Python {machine.python}, {versions}; {gpus}; {size(machine.host_available)} of host memory free"
    status, trouble = _from_findings(Case(machine=machine))
    return StageResult(name="environment", status=status, why=trouble or why, details=machine.to_dict())


def look_at_the_machine(examination: Examination, *, libraries: bool) -> MachineFacts:
    """Collect the machine's facts into the case. To ask torch and DeepSpeed as well takes as long as to import them."""
    from dsdoctor.dsconfig import load_config
    from dsdoctor.machine.collect import PROBE_COMMAND, collect

    job = examination.job
    data = load_config(job.config, release="", world_size=1).data
    machine = collect(config=data, folder=job.folder, probe_command=PROBE_COMMAND if libraries else None)
    examination.learn(machine=machine)
    return machine


def config(examination: Examination) -> StageResult:
    """Parse the ds_config and hold it against DeepSpeed's schema and the world size."""
    from dsdoctor.dsconfig import load_config
    from dsdoctor.dsconfig.hf_arguments import parse
    from dsdoctor.model_config import named_by
    from dsdoctor.scripts.read import read

    job = examination.job
    script = None if job.as_module else read(Path(job.script))
    framework = None if job.as_module else guess(Path(job.script).read_text(encoding="utf-8", errors="replace"))
    facts = load_config(
        job.config,
        release=examination.machine.versions.get("deepspeed", ""),
        world_size=nproc(examination),
        framework=framework,
        script_args=job.args,
    )
    model = named_by(script, parse(job.args))
    examination.learn(config=facts, script=script, model=model)
    status, why = _from_findings(Case(config=facts, machine=examination.case.machine, script=script, model=model))
    return StageResult(name="config", status=status, why=why or f"{len(facts.data)} sections and keys, all known")


def comm(examination: Examination) -> StageResult:
    """Real processes: rendezvous, device, allocation, collectives with their values checked."""
    from dsdoctor.comm.check import check

    job = examination.job
    if cannot_run(examination):
        return StageResult(name="comm", status="skipped", why=cannot_run(examination))
    facts = check(
        launch_plan(examination),
        config=examination.case.config.data if examination.case.config else {},
        folder=job.folder / "comm",
        deadline=min(30.0, job.timeout),
        timeout=min(90.0, job.timeout, job.remaining()),
    )
    examination.learn(comm=facts)
    status, why = _from_findings(Case(comm=facts))
    if status == "passed" and not facts.passed:
        status, why = "failed", facts.problem or "the check did not come to an end"
    healthy = f"{facts.world_size} ranks over {facts.backend}, all values right"
    return StageResult(name="comm", status=status, why=why or healthy, details=facts.to_dict())


def memory(examination: Examination) -> StageResult:
    """The parameters that the script really builds, in one run that stops there, against what the machine has."""
    from dsdoctor.memory.estimate import estimate

    if reason := cannot_run(examination) or comm_failed(examination):
        return StageResult(name="memory", status="skipped", why=reason)
    probe = observe(examination, "probe", engine="deepspeed", probe=True)
    examination.learn(runs=(*examination.case.runs, probe))
    if probe.model is None or probe.facts is None:
        why = f"the script did not come as far as handing a model to DeepSpeed ({probe.why or probe.outcome})"
        return StageResult(name="memory", status="skipped", why=why)
    _settle_framework(examination, probe)
    _say_the_plan(examination, probe)
    facts = estimate(
        probe.facts.config,
        probe.model,
        examination.machine,
        nproc_per_node=nproc(examination),
        device=host_device(examination),
    )
    examination.learn(memory=facts)
    status, why = _from_findings(Case(memory=facts, machine=examination.case.machine))
    need = facts.current
    healthy = f"{probe.model.class_name} with {probe.model.parameters:,} parameters"
    if need is not None:
        healthy += f" needs {size(need.per_gpu.peak)} a rank at its peak (without activations)"
    return StageResult(name="memory", status=status, why=why or healthy, details=facts.to_dict())


def cannot_run(examination: Examination) -> str:
    """Why no process of the script can be started, empty where it can."""
    facts = examination.case.config
    if facts is not None and facts.syntax_error is not None:
        return "the ds_config cannot be read"
    missing = [name for name in ("torch", "deepspeed") if name not in examination.machine.versions]
    if examination.case.machine is not None and missing:
        return f"{' and '.join(missing)} cannot be imported"
    return ""


def comm_failed(examination: Examination) -> str:
    result = examination.result("comm")
    failed = result is not None and result.status in ("failed", "timeout")
    return "the ranks cannot talk to each other" if failed else ""


def _settle_framework(examination: Examination, probe: Run) -> None:
    """The run has shown who hands the config to DeepSpeed, so lint need not guess any more."""
    facts = examination.case.config
    if facts is not None and probe.facts is not None and facts.framework != probe.facts.framework:
        examination.learn(config=replace(facts, framework=probe.facts.framework))


def _say_the_plan(examination: Examination, probe: Run) -> None:
    """How many runs there will be and how long one takes, judged by the one that was just made."""
    legs = "with-deepspeed, without-deepspeed; control-fp32 and numerics where something goes wrong"
    examination.tell(
        f"plan: 2 to 4 more runs of the script ({legs}), each about {probe.seconds:.0f} s "
        f"and the time of {examination.job.steps} steps; where a key of the config may be guilty, short runs to find it"
    )


def _from_findings(case: Case) -> tuple[Status, str]:
    """Status and line of a stage from what the rules find in its facts alone."""
    findings = [finding for finding in diagnose(case).findings if finding.severity != "info"]
    if not findings:
        return "passed", ""
    status: Status = "failed" if any(finding.severity == "error" for finding in findings) else "warned"
    return status, _line(findings)


def _line(findings: Sequence[Finding]) -> str:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{findings[0].cause}{more}"
