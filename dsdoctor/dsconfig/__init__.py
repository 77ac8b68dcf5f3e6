"""The ds_config: load it with positions, know DeepSpeed's schema by release, patch it, and see what it comes to."""

from dsdoctor.dsconfig.effective import Effective
from dsdoctor.dsconfig.facts import ConfigFacts, ConfigSyntaxError, DuplicateKey, Framework, Position
from dsdoctor.dsconfig.load import ConfigUnreadable, load_config, load_data
from dsdoctor.dsconfig.schema import Schema, schema_for

__all__ = [
    "ConfigFacts",
    "ConfigSyntaxError",
    "ConfigUnreadable",
    "DuplicateKey",
    "Effective",
    "Framework",
    "Position",
    "Schema",
    "load_config",
    "load_data",
    "schema_for",
]
