"""Who speaks for a check that a launcher started, and how the other processes learn its exit code."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dsdoctor.comm.facts import CommFacts
from dsdoctor.comm.meeting import MESSAGE_SECONDS, CannotMeet, Meeting, loss_of_rank_0


class Speaker:
    """What a process does once its rank's part is over: speak, or learn what was said."""

    def __init__(
        self,
        meeting: Meeting | None,
        facts: CommFacts | None,
        heard_by: int,
        deadline: float,
        nccl_logs: Path | None = None,
        trouble: str = "",
    ) -> None:
        self.facts = facts
        """All that is known, for the process that speaks; None for one that is silent."""
        self.nccl_logs = nccl_logs
        """The folder of what NCCL logged on the ranks that failed, until the part is over; None for nothing."""
        self.trouble = trouble
        """Why a silent process could not meet the others."""
        self._meeting = meeting
        self._heard_by = heard_by
        self._deadline = deadline

    def say(self, code: int) -> None:
        """Tell all processes the exit code; wait a moment until they have heard it, since the store dies with us."""
        if self._meeting is None:
            return
        with contextlib.suppress(CannotMeet), loss_of_rank_0():
            self._meeting.tell("verdict", code)
            self._meeting.count("heard", self._heard_by, MESSAGE_SECONDS)

    def listen(self) -> int:
        """The exit code that rank 0 said; 1 where nothing was heard of it any more."""
        if self._meeting is None:
            return 1
        with contextlib.suppress(CannotMeet), loss_of_rank_0():
            code = self._meeting.hear("verdict", self._deadline + 3 * MESSAGE_SECONDS)
            self._meeting.add("heard")
            return 1 if code is None else int(code)
        return 1
