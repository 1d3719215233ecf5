from __future__ import annotations

from pathlib import Path

import pytest
from project import copy_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project, nothing built."""
    return copy_project(tmp_path / "project")
