"""Every diagnosis of the ds_config itself; the rules live in the modules `config_*`."""

from __future__ import annotations

from dsdoctor.diagnoses import (
    config_auto,
    config_batch,
    config_conflict,
    config_framework,
    config_hf,
    config_ineffective,
    config_keys,
    config_optimizer,
    config_outdated,
    config_text,
    config_types,
)
from dsdoctor.diagnoses.base import Diagnosis

DIAGNOSES: tuple[Diagnosis, ...] = (
    *config_text.DIAGNOSES,
    *config_batch.DIAGNOSES,
    *config_auto.DIAGNOSES,
    *config_hf.DIAGNOSES,
    *config_framework.DIAGNOSES,
    *config_keys.DIAGNOSES,
    *config_outdated.DIAGNOSES,
    *config_types.DIAGNOSES,
    *config_ineffective.DIAGNOSES,
    *config_optimizer.DIAGNOSES,
    *config_conflict.DIAGNOSES,
)
