"""What a user may write: a typed schema, one YAML reader, and errors that name file and line."""

from pipeline.settings.run_file import load_run_settings, to_mapping
from pipeline.settings.schema import RunSettings, TrainerSettings
from pipeline.settings.yaml_file import dump_yaml, parse_yaml, read_yaml

__all__ = [
    "RunSettings",
    "TrainerSettings",
    "dump_yaml",
    "load_run_settings",
    "parse_yaml",
    "read_yaml",
    "to_mapping",
]
