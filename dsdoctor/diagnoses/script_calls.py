"""Scripts that call what a rank cannot answer, or in an order that the engine does not take."""

from __future__ import annotations

from collections.abc import Iterator

from dsdoctor.case import Case
from dsdoctor.diagnoses import context
from dsdoctor.diagnoses.base import Diagnosis
from dsdoctor.diagnoses.forms import MAX_EVIDENCE, users_lines
from dsdoctor.finding import Finding, Fix

_READ = "EOF when reading a line"
"""What `input()` raises where there is nothing to read from."""


class ReadsInput(Diagnosis):
    """The script asks a person for input.

    What it is: `input()` raises EOFError in a run of dsdoctor, which gives scripts no standard input; nor do most
    launchers and schedulers to their ranks.

    What proves it: the EOFError of a read from standard input.

    When it could be wrong: started by hand as one process the question can be answered, and the script may be sound
    otherwise.

    What to do: pass the answer as an argument or an environment variable, and ask only where `sys.stdin.isatty()`.
    """

    id = "script/reads-input"
    severity = "error"
    title = "the script asks for input"

    def examine(self, case: Case) -> Iterator[Finding]:
        asked = [
            failure for failure in context.failures(case) if failure.type == "EOFError" and _READ in failure.message
        ]
        if asked:
            yield self.finding(
                cause="the script reads from standard input, which the ranks of a job do not have",
                evidence=(*map(context.evidence, asked), *users_lines(asked[0]))[:MAX_EVIDENCE],
                confidence=0.85,
                caveat="With an answer, which nobody can give it there, the script may be sound.",
                fixes=(Fix(text="pass the answer as an argument of the script; ask only where sys.stdin.isatty()"),),
            )


class StepBeforeBackward(Diagnosis):
    """`engine.step()` is called before the first `engine.backward(loss)`.

    What it is: the optimizer has no gradients yet, and DeepSpeed fails inside its own code for want of them. Plain
    PyTorch lets such a step pass without a word.

    What proves it: no backward pass of the engine had begun on that rank when `step` raised.

    When it could be wrong: an older release does not show a `loss.backward()` that the script calls itself; there the
    right call is `engine.backward(loss)` anyway.

    What to do: in each iteration `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()`, in this order.
    """

    id = "script/step-before-backward"
    severity = "error"
    title = "step is called before backward"

    def examine(self, case: Case) -> Iterator[Finding]:
        run = context.own_run(case)
        early = [rank.failure for rank in run.ranks if rank.misuse and rank.failure] if run is not None else []
        if early:
            yield self.finding(
                cause="the script calls engine.step() before any engine.backward(loss), so there are no gradients",
                evidence=(*map(context.evidence, early), *users_lines(early[0]))[:MAX_EVIDENCE],
                confidence=0.9,
                fixes=(Fix(text="call engine.backward(loss) before engine.step()"),),
            )


DIAGNOSES: tuple[Diagnosis, ...] = (ReadsInput(), StepBeforeBackward())
