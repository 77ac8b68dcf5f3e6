"""The knowledge: every diagnosis there is, in one tuple, and the function that runs them over a case."""

from __future__ import annotations

from dsdoctor.diagnoses.base import Diagnosis

ALL: tuple[Diagnosis, ...] = ()
"""Each family module exports its own tuple `DIAGNOSES`; they are joined here, by hand."""
