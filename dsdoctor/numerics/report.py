"""The text of a hit: where and why in a few lines, then the frames in the well-known layout. No torch."""

from __future__ import annotations

from dsdoctor.numerics.events import Event
from dsdoctor.numerics.frames import hit_text


def hit_report(event: Event, rank: int) -> str:
    """What is printed for the first bad value of a rank. Frames follow where some were taken."""
    place = f"{event.module or 'the model itself'}: {event.tensor}"
    lines = [
        f"First {event.kind} on rank {rank}: optimizer step {event.step}, micro-step {event.micro_step}, "
        f"phase {event.phase}, {place} ({event.dtype})"
    ]
    if event.origin.op is not None or event.origin.detail:
        lines.append(f"{event.origin.op or 'operation unknown'}, cause {event.origin.cause}: {event.origin.detail}")
    if event.origin.line is not None:
        lines.append(f"at {event.origin.line}")
    if event.turned is not None:
        lines.append(f"Born as inf there, it became NaN in {event.turned}.")
    if event.frames:
        lines += ["", hit_text(event.frames, event.batch)]
    return "\n".join(lines)
