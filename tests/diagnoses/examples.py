"""How every family's examples are checked: `POSITIVE` and `NEGATIVE` map an id to hand-made cases."""

from dsdoctor.case import Case
from dsdoctor.diagnoses import diagnose
from dsdoctor.finding import Finding


def found(case: Case, identifier: str) -> list[Finding]:
    """The findings of that id, every rule having run over the case."""
    return [finding for finding in diagnose(case, strict=True).findings if finding.id == identifier]
