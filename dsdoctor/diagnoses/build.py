"""Compiled extensions that cannot be built or loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses import context, op_builds
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.frames import passes_through
from dsdoctor.logs.facts import LogEvent
from dsdoctor.runs.facts import Failure


class CudaMismatch(TextDiagnosis):
    """The CUDA toolkit and the CUDA that torch was built for do not go together.

    What it is: DeepSpeed's (or torch's) builder refuses to compile an extension with a toolkit of another major
    version than torch's.

    What proves it: its exception, which names both versions.

    When it could be wrong: a difference in the minor version alone is only a warning and is not reported.

    What to do: compare `nvcc --version` with `python -c "import torch; print(torch.version.cuda)"`; install the toolkit
    that belongs to torch, or the torch that belongs to the toolkit, and `export CUDA_HOME=/usr/local/cuda-X.Y`.
    `DS_SKIP_CUDA_CHECK=1` switches the check off, at your own risk.
    """

    id = "build/cuda-mismatch"
    severity = "error"
    title = "CUDA toolkit and torch do not go together"
    forms = (
        Form(
            message=r"Installed CUDA version (?P<toolkit>\S+) does not match .*torch was compiled with (?P<torch>\S+)"
        ),
        Form(
            message=r"detected CUDA version \((?P<toolkit>[\d.]+)\) mismatches(?:[\s\S]*PyTorch \((?P<torch>[\d.]+)\))?"
        ),
        Form(message=r"CUDA version mismatch! DeepSpeed ops were compiled"),
    )
    cause = "the CUDA toolkit is {toolkit}, torch was built for {torch}, so the extension cannot be compiled"
    fixes = (
        Fix(
            text="install the CUDA toolkit of torch's version and point CUDA_HOME at it (or the torch of the toolkit's)"
        ),
    )

    def tell(self, groups: Mapping[str, str]) -> str:
        if not groups.get("torch"):
            return "DeepSpeed's extensions were compiled for another CUDA version than torch has now"
        if groups["torch"] == "?":
            return f"the CUDA toolkit is {groups['toolkit']}, torch was built for another version"
        return super().tell({name: value.rstrip(",.") for name, value in groups.items()})

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from list(super().examine(case)) or op_builds.findings(self, case, "toolkit-mismatch")


class CudaHome(TextDiagnosis):
    """There is no CUDA toolkit to compile with.

    What it is: compiling an extension needs nvcc. The driver (what nvidia-smi shows) is not a toolkit.

    What proves it: the message about CUDA_HOME.

    When it could be wrong: a toolkit may be there and only CUDA_HOME not be set.

    What to do: `python -c "import torch; print(torch.version.cuda)"` says which version; install that toolkit (with
    conda: `conda install -c nvidia cuda-nvcc=12.4`), `export CUDA_HOME=/usr/local/cuda-12.4`; or avoid the extension:
    `"optimizer": {"params": {"torch_adam": true}}`.
    """

    id = "build/cuda-home"
    severity = "error"
    title = "no CUDA toolkit"
    forms = (
        Form(types=("MissingCUDAException",)),
        Form(
            message=r"CUDA_HOME does not exist|CUDA_HOME environment variable is not set|No such file .*'\S*/bin/nvcc'"
        ),
    )
    cause = "an extension is to be compiled and there is no CUDA toolkit (CUDA_HOME); a driver is not a toolkit"
    fixes = (
        Fix(text="install the CUDA toolkit of torch's version and set CUDA_HOME"),
        Fix(text="or use an optimizer that needs no extension", patch={"optimizer": {"params": {"torch_adam": True}}}),
    )

    def examine(self, case: Case) -> Iterator[Finding]:
        yield from list(super().examine(case)) or op_builds.findings(self, case, "no-toolkit")


class Compiler(TextDiagnosis):
    """A tool or header that the build of an extension needs is missing or too old.

    What it is: g++, nvcc, ninja, Python.h or libaio is missing, or nvcc is too old for the language standard.

    What proves it: the first `error:` or `fatal error:` of the build. What follows (ninja, CalledProcessError, a .so
    that cannot be opened) is its consequence.

    When it could be wrong: without the first error in the log only the failure of the build is known, not its reason.

    What to do: install what the first error names, for instance `apt install build-essential python3-dev libaio-dev`,
    `pip install ninja`; then `rm -rf ~/.cache/torch_extensions/*/OP` (or in `$TORCH_EXTENSIONS_DIR`). `ds_report` lists
    which ops can be built. Build one alone to see all of its output: `DS_BUILD_CPU_ADAM=1 pip install -v
    --no-build-isolation --force-reinstall --no-deps deepspeed` in an environment of its own.
    """

    id = "build/compiler"
    severity = "error"
    title = "an extension could not be compiled"
    forms = (
        Form(message=r"Error building extension '(?P<what>\w+)'"),
        Form(
            types=("CalledProcessError",),
            message=r"'\['(?:[^']*/)?(?:ninja|gcc|g\+\+|cc|c\+\+|clang\+*|nvcc|ptxas)(?:-[\d.]+)?'.*\]' returned non-",
        ),
        Form(message=r"(?P<why>Ninja is required to load C\+\+ extensions)"),
        Form(message=r"Unable to JIT load the (?P<why>\w+ op due to .*)"),
        Form(message=r"(?P<why>\w+ requires the '[^']+' command, but it does not exist)"),
        Form(types=("ImportError",), message=r"torch_extensions\S*\.so: cannot open shared object file"),
        Form(
            types=("CalledProcessError",), message=r"'\['which', '(?P<why>[gc]\+\+|cc|nvcc|ninja)'\]' returned non-zero"
        ),
    )
    kinds = ("compile-error",)
    confidence = 0.9
    cause = "the build of an extension failed"
    fixes = (
        Fix(
            text="install or update what the first error of the build names (g++, nvcc, ninja, python headers, libaio)"
        ),
        Fix(text="then delete the half-built extension in ~/.cache/torch_extensions (or $TORCH_EXTENSIONS_DIR)"),
    )

    def applies(self, failure: Failure, case: Case) -> bool:
        return not any(CudaMismatch().claims(f, case) or CudaHome().claims(f, case) for f in context.failures(case))

    def tell(self, groups: Mapping[str, str]) -> str:
        return f"{self.cause}: {groups['why'].strip()}" if "why" in groups else self.cause

    def examine(self, case: Case) -> Iterator[Finding]:
        """Compiler output counts where the build failed, by its first error; before a run the machine's own tools."""
        claimed = [failure for failure in context.failures(case) if self.claims(failure, case)]
        events = self.events(case)
        printed = _compilers_error(claimed[0]) if claimed else None
        if claimed and events:
            yield self._first_error(events[0].evidence(), claimed)
        elif printed is not None:
            yield self._first_error(printed, claimed)
        elif claimed:
            yield self.told(case, claimed, events)
        else:
            yield from op_builds.findings(self, case, "tool")

    def _first_error(self, error: Evidence, claimed: list[Failure]) -> Finding:
        return self.finding(
            cause=f"the build of an extension failed; its first error is: {error.text.strip()}",
            evidence=(error, context.evidence(claimed[0])),
            confidence=0.95,
            fixes=self.fixes,
        )


def _compilers_error(failure: Failure) -> Evidence | None:
    """The first error of the compiler or linker where it stands in the message of the exception."""
    for one in (failure, *failure.chain):
        for index, text in enumerate(one.message.splitlines()):
            if _COMPILER_SAYS.search(text) is not None:
                line = one.message_lines[index] if index < len(one.message_lines) else one.line
                return Evidence(source=one.source, line=line, rank=one.rank, text=text.strip())
    return None


class OpAttribute(TextDiagnosis):
    """A destructor complains that an op was never loaded.

    What it is: `'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'` from `__del__`: the constructor had failed
    before, when the extension could not be built or loaded.

    What proves it: the message itself. It is never a cause.

    When it could be wrong: it is not; if the build's own error is not in this excerpt, look further up.

    What to do: read the first error of the build: `grep -nE 'error:|nvcc fatal|cannot find -l' LOG | head`.
    """

    id = "build/op-attribute"
    severity = "error"
    role = "consequence"
    title = "an op was never loaded"
    forms = (Form(types=("AttributeError",), message=r"has no attribute 'ds_opt_\w+'"),)
    kinds = ("op-attribute",)
    cause = (
        "the destructor of an optimizer found that its extension had never been loaded; the cause is the build's error"
    )
    fixes = (Fix(text="read the first error of the build; if it is not in this excerpt, look further up"),)

    def events(self, case: Case) -> list[LogEvent]:
        """None of a job that did its work: such an optimizer was not the one it trained with."""
        return [] if case.logs is not None and case.logs.end == "finished" else super().events(case)


class StaleExtension(TextDiagnosis):
    """A cached extension was built by another version of DeepSpeed or torch.

    What it is: `~/.cache/torch_extensions` is shared by all environments with the same Python and CUDA. An extension
    built for another release lacks functions, or symbols of torch.

    What proves it: an attribute missing from an op module, or an undefined symbol (or a version of libstdc++ that is
    not there) in a .so of that cache.

    When it could be wrong: a package that was installed with compiled ops for another torch has undefined symbols too;
    then it must be installed again.

    What to do: `rm -rf ~/.cache/torch_extensions/*/OP`, and for each environment a cache of its own:
    `export TORCH_EXTENSIONS_DIR=$CONDA_PREFIX/torch_extensions`.
    """

    id = "build/stale-extension"
    severity = "error"
    title = "a cached extension was built by another version"
    forms = (
        Form(
            types=("AttributeError",),
            message=r"module '(?:deepspeed_\w+|\w+_op)' has no attribute",
        ),
        Form(types=("ImportError", "OSError"), message=r"(?:torch_extensions|deepspeed)\S*\.so: undefined symbol"),
        Form(
            types=("ImportError", "OSError"),
            message=r"version `(?:GLIBCXX|CXXABI)_[\d.]+' not found \(required by \S*(?:torch_extensions|deepspeed)",
        ),
    )
    cause = "an extension in the cache was built by another version of DeepSpeed or torch"
    fixes = (
        Fix(text="delete the extension's folder in ~/.cache/torch_extensions (or $TORCH_EXTENSIONS_DIR) and run again"),
        Fix(text="set TORCH_EXTENSIONS_DIR to a folder of its own for each environment"),
    )


class JitLock(Diagnosis):
    """A stale lock file keeps every later process waiting for an extension that nobody builds.

    What it is: torch locks the folder of an extension while it builds. A build that was killed leaves `lock` behind,
    and the next process waits for ever, without using the CPU.

    What proves it: a stack of the process that stands in torch's `file_baton.py` (py-spy, or the traceback of Ctrl-C).
    Without one: the log ends after "Using ... as PyTorch extensions root" and no extension was loaded afterwards.

    When it could be wrong: a first build takes minutes; one process then uses the CPU while the others wait for its
    lock.

    What to do: end the processes, then `find ~/.cache/torch_extensions -name lock -delete` (or in
    `$TORCH_EXTENSIONS_DIR`).
    """

    id = "build/jit-lock"
    severity = "error"
    title = "a stale lock keeps the extension from being loaded"

    def examine(self, case: Case) -> Iterator[Finding]:
        waits = self._stacks(case)
        if waits:
            yield self.finding(
                cause="a process waits for the lock of an extension's folder; a killed build leaves one behind",
                evidence=waits,
                confidence=0.9,
                caveat="A first build takes minutes, and the other processes wait for it at the same place.",
                fixes=(_UNLOCK,),
            )
        else:
            yield from self._ends_before_loading(case)

    def _stacks(self, case: Case) -> tuple[Evidence, ...]:
        """Stacks that stand in torch's waiting for the lock: of a tracing tool, or of a process stopped by hand."""
        seen = [event.evidence() for event in case.logs.of_kind("waits-for-lock")] if case.logs is not None else []
        stopped = [
            f for f in context.failures(case) if f.type == "KeyboardInterrupt" and passes_through(f.frames, _BATON)
        ]
        return (*map(context.evidence, stopped[:1]), *seen[:1])

    def _ends_before_loading(self, case: Case) -> Iterator[Finding]:
        logs = case.logs
        if logs is None or logs.end == "finished" or logs.failures or logs.exits or logs.steps_seen:
            return
        roots = list(logs.of_kind("extensions-root"))
        if not roots or any(logs.of_kind("extension-loaded")):
            return
        last = max(roots, key=lambda event: event.last_line)
        if logs.last_line is not None and (logs.last_line.line or 0) - last.last_line > _LINES_AFTER:
            return
        folder = last.fields.get("folder", "~/.cache/torch_extensions")
        yield self.finding(
            cause=f"the log ends while extensions in {folder} are to be loaded, as with a stale lock file",
            evidence=(last.evidence(),),
            confidence=0.5,
            caveat="The log ends there, and a first build takes minutes: a process that builds uses the CPU, one that "
            "waits does not.",
            fixes=(_UNLOCK,),
        )


_COMPILER_SAYS = re.compile(r"nvcc fatal|\berror: |cannot find -l")
_LINES_AFTER = 5
_BATON = r"file_baton\.py:wait"
_UNLOCK = Fix(
    text="end the processes and delete the stale file: find ~/.cache/torch_extensions -name lock -delete (or in "
    "$TORCH_EXTENSIONS_DIR)"
)

DIAGNOSES: tuple[Diagnosis, ...] = (CudaMismatch(), CudaHome(), Compiler(), StaleExtension(), JitLock(), OpAttribute())
