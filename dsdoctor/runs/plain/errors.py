"""What the plain engine says when it cannot play DeepSpeed's part.

NotPlayed            the script or config needs something that only DeepSpeed has
├ UnsupportedByPlain a DeepSpeed optimizer that has no plain counterpart here
└ MemberNotPlayed    an attribute of DeepSpeed's engine (an AttributeError too, so that `hasattr` says no)
"""

from __future__ import annotations


class NotPlayed(Exception):
    """This part of DeepSpeed has no plain counterpart; the run without DeepSpeed cannot be had."""


class UnsupportedByPlain(NotPlayed):
    """An optimizer of DeepSpeed's own that is not rebuilt here."""


class MemberNotPlayed(NotPlayed, AttributeError):
    """A method or attribute of DeepSpeed's engine that the plain engine lacks."""
