"""A request to stop that comes after it was polled a number of times."""

from __future__ import annotations

from collections.abc import Callable

from pipeline import Callback
from pipeline.trainer.stopping import StopRequest


class StopsAfter(StopRequest):
    """Stands in for signals."""

    def __init__(self, n_asked):
        super().__init__()
        self.n_left = n_asked

    def __call__(self):
        self.n_left -= 1
        self.signal_number = 15 if self.n_left <= 0 else None
        return super().__call__()


class EndsWhen(Callback):
    """Ends a run when a function, called after every step, returns True."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self.is_due = is_due

    @property
    def stop(self) -> bool:
        return self.is_due()


class EndsAfter(Callback):
    """Ends a run after so many steps of the environment."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps

    @property
    def stop(self) -> bool:
        self.n_steps -= 1
        return self.n_steps <= 0
