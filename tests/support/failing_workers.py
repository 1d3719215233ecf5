"""Environments for tests of restarts: a worker that does not answer, and long episodes."""

from toys import Chase

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import UnityTimeOutException


class Long(Chase):
    """A game with episodes that are longer than any test."""

    length = 1000


class FailsAt(InProcessEnvironment):
    """An environment that does not answer in step number `at`."""

    def __init__(self, simulator, at) -> None:
        super().__init__(simulator)
        self.left = at

    def step(self):
        self.left -= 1
        if self.left == 0:
            raise UnityTimeOutException("no answer")
        super().step()
