"""Error messages of refused calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(kind: type[Exception], call: Callable[..., object], /, *args, **options) -> str:
    """Return the message of the error that a call raises; check that it is one line."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
