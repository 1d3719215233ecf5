"""What a user reads when a call is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


def refusal(kind: type[Exception], call: Callable[..., object], /, *args, **options) -> str:
    """Return the message with which a call is refused; fails unless it is one line."""
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
