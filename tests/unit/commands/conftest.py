"""`pipeline learn` in this process, with the fake environment as its executable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import cli

FAKE = Path(__file__).parents[1] / "envs/fake_environment.py"

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


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Make an executable: behavior Echo, observations (4,), two continuous actions."""

    def make(*arguments: str) -> Path:
        path = tmp_path / "fake"
        options = " ".join(arguments)
        path.write_text(f'#!/bin/sh\nexec "$PIPELINE_PYTHON" "{FAKE}" --quiet {options} "$@"\n')
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `pipeline learn` in a folder of its own, on a configuration for the fake environment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*arguments: str | Path) -> int:
        return cli.main(["learn", "config.yaml", "--seed", "1", *map(str, arguments)])

    return run
