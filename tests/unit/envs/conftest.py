"""The fake environment as an executable."""

from __future__ import annotations

from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_environment.py")


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake"
    path.write_text(f'#!/bin/sh\nexec "$PIPELINE_PYTHON" "{SCRIPT}" "$@"\n')
    path.chmod(0o755)
    return path
