"""What the communication check found, as the diagnoses tell it: whose fault it is and where the ranks stand."""

from __future__ import annotations

from dataclasses import replace

from dsdoctor.case import Case
from dsdoctor.comm.facts import CommFacts, CommRank
from dsdoctor.comm.reading import CommReading, read
from dsdoctor.finding import Evidence
from dsdoctor.logs.facts import LogFacts
from dsdoctor.runs.facts import Failure

SOURCE = "comm"
MAX_SHOWN = 6
_STACK_LINES = 6


def reading_of(case: Case, *kinds: str) -> CommReading | None:
    """What the check means, if it is one of these kinds."""
    if case.comm is None or not case.comm.ranks:
        return None
    reading = read(case.comm)
    return reading if reading.kind in kinds else None


def as_of_the_job(case: Case) -> Case:
    """The case with the exception that ended the check among those of the job's logs.

    For rules on what NCCL and gloo say: they say the same to the check as to the job.
    """
    reading = reading_of(case, "failed")
    if reading is None or reading.step is None or reading.step.status != "failed":
        return case
    kind, _, message = reading.step.text.partition(": ")
    raised = Failure(rank=reading.ranks[0].rank, type=kind, message=message, source=SOURCE, time=reading.ranks[0].time)
    logs = case.logs or LogFacts()
    return replace(case, logs=replace(logs, failures=(*logs.failures, raised)))


def stands(facts: CommFacts, reading: CommReading) -> tuple[Evidence, ...]:
    """Where the guilty ranks stand, then one of those that wait, then what was printed if nobody says anything."""
    guilty = {rank.rank for rank in reading.ranks}
    others = [rank for rank in facts.ranks if rank.rank not in guilty and not rank.healthy]
    told = [_stand(rank) for rank in (*reading.ranks[:3], *others[:2])]
    if not any(rank.steps for rank in reading.ranks) and facts.output.strip():
        told.append(Evidence(source="launcher output", text="\n".join(facts.output.splitlines()[-8:])))
    return tuple(told[:MAX_SHOWN])


def _stand(rank: CommRank) -> Evidence:
    step = rank.trouble
    where = f"{rank.ending}{rank.where}" + (f" after {step.seconds:.1f} s" if step is not None and step.seconds else "")
    detail = step.text or "\n".join(step.stack.rstrip().splitlines()[-_STACK_LINES:]) if step is not None else ""
    return Evidence(source=SOURCE, rank=rank.rank, text=f"{where}: {detail}" if detail else f"{where}{ended(rank)}")


def names(ranks: tuple[CommRank, ...]) -> str:
    """Their numbers, the first eight of them."""
    numbers = [str(rank.rank) for rank in ranks[:8]]
    more = ", …" if len(ranks) > len(numbers) else ""
    return f"rank {numbers[0]}" if len(ranks) == 1 else f"ranks {', '.join(numbers)}{more}"


def ended(rank: CommRank) -> str:
    """How its process ended, in brackets; empty where it did not."""
    if rank.exit_code is None:
        return ""
    return f" (signal {-rank.exit_code})" if rank.exit_code < 0 else f" (exit code {rank.exit_code})"
