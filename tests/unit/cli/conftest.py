"""`pipeline learn` with the fake environment as its executable."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from fake_player import CONFIG, fake_player

from pipeline.cli import main as cli


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    return partial(fake_player, tmp_path, "--quiet")


@pytest.fixture
def learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `pipeline learn` in a folder of its own, on a configuration for the fake environment."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*arguments: str | Path) -> int:
        return cli.main(["learn", "config.yaml", "--seed", "1", *map(str, arguments)])

    return run
