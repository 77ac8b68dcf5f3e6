"""The ds_config as a text: it does not parse, a key stands twice, or a strict JSON reader refuses it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.config_evidence import as_list, at_error, described, matching, raised
from dsdoctor.dsconfig.facts import ConfigFacts
from dsdoctor.finding import Evidence, Finding, Fix
from dsdoctor.runs.facts import Failure

_NO_FILE = (
    r"Expected a string path to an existing deepspeed config"
    r"|binascii\.Error|Invalid base64-encoded string|Incorrect padding"
)


class Syntax(Diagnosis):
    """The ds_config cannot be read: it is not HJSON (JSON with comments and trailing commas, which DeepSpeed takes),
    it is empty, it is not UTF-8, it is another file (a model's config.json, TrainingArguments, a config of Accelerate
    without DeepSpeed, Python), or the path that the script passes does not exist.

    What proves it: the file itself, read the way DeepSpeed reads it, with the line and column of the mistake; or
    DeepSpeed's exception. For a path that does not exist DeepSpeed takes the path for base64 and complains about that.

    When it could be wrong: the script may pass another file than the one given here. Text after a missing quote is
    read to the end of its line, so the place shown is where the reading failed, sometimes a little after the mistake.

    What to do: mend the line shown; write strict JSON, which every reader takes.
    """

    id = "config/syntax"
    severity = "error"
    title = "the ds_config cannot be read"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = [raised(failure) for failure, _ in matching(case, r"HjsonDecodeError")]
        if config is not None and config.syntax_error is not None:
            error = config.syntax_error
            yield self.finding(
                cause=described(error),
                evidence=(at_error(config, error), *exceptions),
                confidence=1.0,
                fixes=(Fix(text=error.instead or f"mend line {error.line} of {config.path}"),),
            )
        elif exceptions:
            yield self.finding(
                cause=f"DeepSpeed's parser stopped: {exceptions[0].text.partition(': ')[2]}",
                evidence=tuple(exceptions),
                confidence=0.95,
                fixes=(Fix(text="mend the place that the message names"),),
            )
        yield from self._no_file(case)

    def _no_file(self, case: Case) -> Iterator[Finding]:
        found = [raised(f) for f, _ in matching(case, _NO_FILE) if _in_config_reader(f)]
        if found:
            yield self.finding(
                title="the ds_config that the script names does not exist",
                cause="DeepSpeed found no file at the path it was given and took the path for a base64 text",
                evidence=tuple(found),
                confidence=0.9,
                fixes=(Fix(text="pass the path of the ds_config, relative to the folder the job runs in"),),
            )


def _in_config_reader(failure: Failure) -> bool:
    named = "existing deepspeed config" in failure.message
    return named or any(re.search(r"deepspeed[/\\]runtime[/\\]config\.py", frame.file) for frame in failure.frames)


class DuplicateKey(Diagnosis):
    """A key stands twice in the same object of the ds_config.

    What proves it: both places in the file, or DeepSpeed's message `Duplicate keys in DeepSpeed config`. DeepSpeed
    refuses such a file. Transformers, Accelerate and Lightning read the file themselves and silently keep the last one.

    When it could be wrong: not where the file is the one that is used; a script that reads the file itself may keep
    either value.

    What to do: keep one of the two.
    """

    id = "config/duplicate-key"
    severity = "error"
    title = "a key stands twice in the ds_config"

    def examine(self, case: Case) -> Iterator[Finding]:
        config = case.config
        exceptions = tuple(raised(f) for f, _ in matching(case, r"Duplicate keys in DeepSpeed config"))
        if config is not None and config.duplicates:
            yield self._in_file(config, exceptions)
        elif exceptions:
            yield self.finding(
                cause=f"DeepSpeed refuses the file: {exceptions[0].text.partition(': ')[2]}",
                evidence=exceptions,
                confidence=0.95,
                fixes=(Fix(text="keep one of the two"),),
            )

    def _in_file(self, config: ConfigFacts, exceptions: tuple[Evidence, ...]) -> Finding:
        names = [duplicate.key for duplicate in config.duplicates]
        evidence = [
            Evidence(source=config.path, line=place.line, column=place.column, text=duplicate.key)
            for duplicate in config.duplicates
            for place in duplicate.positions
        ]
        reads_itself = config.framework not in (None, "deepspeed")
        return self.finding(
            severity="warning" if reads_itself else "error",
            cause=f"{as_list(names)} {'stands' if len(names) == 1 else 'stand'} twice in the same object",
            evidence=(*evidence, *exceptions),
            confidence=1.0,
            caveat=f"{config.framework} keeps the last value without a word" if reads_itself else None,
            fixes=(Fix(text="keep the one that is meant"),),
            keys=tuple(names),
        )


DIAGNOSES: tuple[Diagnosis, ...] = (Syntax(), DuplicateKey())
