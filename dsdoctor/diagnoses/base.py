"""What a diagnosis is: an id, a page, and a pure function from facts to findings."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from dsdoctor.case import Case
from dsdoctor.finding import Evidence, Finding, Fix, Role, Severity


class Diagnosis(ABC):
    """One entry of the catalogue.

    A subclass sets `id`, `severity`, `role` and `title`; its docstring is the page that `dsdoctor explain` prints:
    what it is, what proves it, when it could be wrong (false-positive modes), what to do. `examine` does no I/O.
    """

    id: ClassVar[str]
    severity: ClassVar[Severity]
    role: ClassVar[Role] = "root"
    title: ClassVar[str]

    @abstractmethod
    def examine(self, case: Case) -> Iterator[Finding]:
        """Yield at most one finding a cause, not one a line."""

    @classmethod
    def page(cls) -> str:
        """The text of the page, without the heading."""
        return inspect.cleandoc(cls.__doc__ or "")

    def finding(
        self,
        *,
        cause: str,
        evidence: tuple[Evidence, ...],
        confidence: float,
        severity: Severity | None = None,
        role: Role | None = None,
        title: str | None = None,
        caveat: str | None = None,
        fixes: tuple[Fix, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> Finding:
        """A finding of this diagnosis; what the class says is the default."""
        return Finding(
            id=self.id,
            severity=severity or self.severity,
            role=role or self.role,
            confidence=confidence,
            title=title or self.title,
            cause=cause,
            evidence=evidence,
            caveat=caveat,
            fixes=fixes,
            keys=keys,
        )
