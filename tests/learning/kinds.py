"""Which kinds of a toy `make test` leaves to `make test-learning`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def but_in_full(names: Iterable[str], *left_out: str) -> list:
    """The names, of which those left out are `in_full`: test_every_kind has their kinds as well."""
    return [
        pytest.param(name, marks=[pytest.mark.in_full] if name in left_out else [])
        for name in names
    ]
