"""Environments of which one worker has to be started again."""

from __future__ import annotations

from toys import Chase

from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import UnityTimeOutException


class Long(Chase):
    """Episodes that end in no test."""

    length = 1000


class FailsAt(InProcessEnvironment):
    """Does not answer at a step of its own."""

    def __init__(self, simulator, at) -> None:
        super().__init__(simulator)
        self.left = at

    def step(self):
        self.left -= 1
        if self.left == 0:
            raise UnityTimeOutException("no answer")
        super().step()
