"""The environment of `unit/envs/fake_environment.py` as an executable, and settings for it."""

from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "unit/envs/fake_environment.py"
START = f'exec "$PIPELINE_PYTHON" "{SCRIPT}"'

CONFIG = """\
behaviors:
  Echo:
    trainer_type: ppo
    hyperparameters: {batch_size: 16, buffer_size: 32}
    network_settings: {hidden_units: 16, num_layers: 1}
    time_horizon: 8
    max_steps: 120
    summary_freq: 60
"""


def fake_player(folder: Path, *arguments: str) -> Path:
    """Write an executable with the behavior Echo: observations (4,), two continuous actions."""
    path = folder / "fake"
    path.write_text(f'#!/bin/sh\n{START} {" ".join(arguments)} "$@"\n')
    path.chmod(0o755)
    return path
