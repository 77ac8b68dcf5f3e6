"""Findings that hold and yet are not what the job failed of: they come after the other errors."""

from dsdoctor.blame.aside import in_order
from dsdoctor.case import Case
from tests.blame.test_verdict import RAISED, finding


def test_the_exception_of_the_script_comes_before_a_key_that_nobody_reads():
    key, exception = finding("config/unknown-key"), finding("launch/user-exception")
    info = finding("environment/cpu-only", severity="info")
    assert in_order(Case(runs=RAISED), [key, exception, info]) == (exception, key, info)
    assert in_order(Case(runs=RAISED[:1]), [key, exception, info]) == (key, exception, info)
