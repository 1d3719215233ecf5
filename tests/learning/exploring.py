"""A small environment that chance does not solve."""

from __future__ import annotations

import numpy as np
from toys import Toy

from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec

N_DIALS, N_CHOICES = 10, 4
CODE = np.array([2, 0, 3, 1, 1, 0, 2, 3, 0, 2])
"""The right choice at each dial."""


class Lock(Toy):
    """Discrete, sparse: ten dials, each with one right choice of four; a wrong one turns back one.

    Reward is 1 for opening, else 0, so that nothing is learned before chance has opened it, which
    it hardly ever does within an episode. It then stays open: whoever imitates gains nothing by
    putting off the end. A policy that knows the code gets 1.
    """

    spec = BehaviorSpec(
        [ObservationSpec.vector(N_DIALS + 1)], ActionSpec.create_discrete([N_CHOICES])
    )
    length = 40

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.dial = np.zeros(self.n, dtype=np.int64)

    def begin(self, rows):
        self.dial[rows] = 0

    def observe(self):
        return [np.eye(N_DIALS + 1)[self.dial]]

    def advance(self, action):
        was_open = self.dial == N_DIALS
        right = action.discrete[:, 0] == CODE[self.dial % N_DIALS]
        turned = np.maximum(self.dial + np.where(right, 1, -1), 0)
        self.dial = np.where(was_open, N_DIALS, turned)
        opened = (self.dial == N_DIALS) & ~was_open
        return opened.astype(float), np.zeros(self.n, dtype=np.bool_)


def expert(decision):
    """The right choice for each agent."""
    dial = decision.obs[0].argmax(axis=1)
    return ActionTuple(discrete=CODE[dial % N_DIALS][:, None].astype(np.int32))
