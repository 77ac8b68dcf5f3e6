"""How much memory an allocation that failed had asked for, and requests that no machine could ever grant."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsdoctor.case import Case
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import Form, TextDiagnosis
from dsdoctor.finding import Fix
from dsdoctor.runs.facts import Failure

PINNED = Form(message=r"CUDA error: (?:out of memory|invalid argument)", frames=r"pin_memory")
"""Host memory could not be pinned (page-locked): CUDA answers as if its own memory were meant."""
ABSURD_BYTES = 2**48
"""256 TiB: more than any device or host has. A request above it is a corrupt size."""

_OVERFLOWED = r"Storage size calculation overflowed with sizes="
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_ASKED = re.compile(
    r"(?:[Tt]ried to allocate|[Uu]nable to allocate|failed to allocate) (?:more than )?"
    r"(?P<size>[\d.]+) ?(?P<prefix>[KMGTPE]?)i?[Bb]"
)


class BogusAllocation(TextDiagnosis):
    """An absurd amount of memory was asked for: a corrupt size, not a lack of memory.

    What it is: a shape or an index that was computed from garbage (uninitialised values, an overflow, labels used as
    sizes) asks for exabytes.

    What proves it: a request above 256 TiB, more than any machine has, or one whose bytes no 64-bit number can count.

    When it could be wrong: it is not memory in any case.

    What to do: print the shapes at the line of the traceback; look for sizes taken from data, for `torch.empty` that
    nothing was written to, and for extensions that were compiled for another torch.
    """

    id = "memory/bogus-allocation"
    severity = "error"
    title = "an absurd amount of memory was asked for"
    forms = (Form(message=_ASKED.pattern), Form(message=_OVERFLOWED))
    confidence = 0.95
    cause = "an allocation of {size} {prefix}B was asked for: a corrupt size, not a lack of memory"
    fixes = (Fix(text="print the sizes at that line: one of them comes from data or overflowed"),)

    def applies(self, failure: Failure, case: Case) -> bool:
        return is_absurd(failure)

    def tell(self, groups: Mapping[str, str]) -> str:
        if not groups:
            return (
                "a tensor of more bytes than a 64-bit number counts was asked for: a corrupt size, not a lack of memory"
            )
        return super().tell(groups)


def asked_bytes(failure: Failure) -> float | None:
    """How many bytes an allocation that failed had asked for, None if the message does not say."""
    match = _ASKED.search(failure.message)
    return float(match["size"]) * 1024.0 ** _PREFIXES[match["prefix"]] if match else None


def is_absurd(failure: Failure) -> bool:
    """True if the size asked for cannot be meant."""
    if re.search(_OVERFLOWED, failure.message):
        return True
    size = asked_bytes(failure)
    return size is not None and size >= ABSURD_BYTES


DIAGNOSES: tuple[Diagnosis, ...] = (BogusAllocation(),)
