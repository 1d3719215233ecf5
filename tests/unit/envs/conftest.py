"""A fixture that gives the fake environment of these tests as an executable."""

from pathlib import Path

import pytest
from fake_player import fake_player


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    return fake_player(tmp_path)
