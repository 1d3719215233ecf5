"""Fixtures that write and load configuration files of older formats."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.settings import RunSettings, load_run_settings


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a file, by default `old.yaml`."""

    def write(text: str, name: str = "old.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def loaded(written: Callable[..., Path]) -> Callable[..., RunSettings]:
    """Load a trainer configuration, with optional curriculum and sampler files."""
    return lambda text, **paths: load_run_settings(written(text), **paths)
