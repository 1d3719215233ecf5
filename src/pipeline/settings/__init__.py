"""Settings files: a typed schema, one YAML reader, and errors that name file and line."""

from pipeline.settings.trainer.run_file import load_run_settings as load_run_settings
from pipeline.settings.trainer.run_file import to_mapping as to_mapping
from pipeline.settings.trainer.schema import RunSettings as RunSettings
from pipeline.settings.trainer.schema import TrainerSettings as TrainerSettings
from pipeline.settings.yaml_file import dump_yaml as dump_yaml
from pipeline.settings.yaml_file import parse_yaml as parse_yaml
from pipeline.settings.yaml_file import read_yaml as read_yaml
