"""Environments in this process with steps in two halves, like executables."""

from pipeline.envs.in_process import InProcessEnvironment


class InTurn(InProcessEnvironment):
    """An environment that computes in the second half; workers of this class form two groups."""

    def step_send(self):
        pass

    def step_wait(self):
        self.step()

    def reset_send(self):
        pass

    def reset_wait(self):
        self.reset()
