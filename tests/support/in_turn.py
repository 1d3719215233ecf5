"""Environments of this process whose steps have two halves, as those of executables have."""

from __future__ import annotations

from pipeline.envs.in_process import InProcessEnvironment


class InTurn(InProcessEnvironment):
    """Does all of a step or reset while it is waited for; several are groups that take turns."""

    def step_send(self):
        pass

    def step_wait(self):
        self.step()

    def reset_send(self):
        pass

    def reset_wait(self):
        self.reset()
