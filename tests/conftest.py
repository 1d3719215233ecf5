"""What several tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tests use the general gRPC runtime before the pipeline could set this; see protocol.grpc_server.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of files that Unity and ML-Agents made."""
    named = os.environ.get("PIPELINE_FIXTURES")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "fixtures"
    if not folder.is_dir():
        pytest.skip("fixtures are not here")
    return folder
