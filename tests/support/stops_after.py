"""Requests to stop a run after a number of steps or checks."""

from collections.abc import Callable

from pipeline import Callback
from pipeline.trainer.stopping import StopRequest


class StopsAfter(StopRequest):
    """A request to stop, as by a signal, at the check number `n_asked`."""

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
    """A callback that ends a run after `n_steps` steps of the environment."""

    def __init__(self, n_steps: int) -> None:
        self.n_steps = n_steps

    @property
    def stop(self) -> bool:
        self.n_steps -= 1
        return self.n_steps <= 0
