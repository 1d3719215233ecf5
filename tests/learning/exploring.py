"""Small environments that random actions hardly ever solve."""

import numpy as np
from toys import Toy

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec

CODE = np.array([2, 0, 3, 1, 1, 0, 2, 3, 0, 2, 1, 3])
"""The right choice of four at each dial."""


class Lock(Toy):
    """Discrete, sparse: ten dials, each with one right choice of four; errors turn back one dial.

    The reward is 1 for opening the lock, else 0. Random actions hardly ever open it within an
    episode, so that a policy learns nothing from this reward alone. An open lock stays open:
    an imitating policy gains nothing by opening it late. A policy that knows the code
    gets a return of 1.
    """

    n_dials = 10
    spec = BehaviorSpec([ObservationSpec.vector(11)], ActionSpec.create_discrete([4]))
    length = 40

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.dial = np.zeros(self.n, dtype=np.int64)

    def begin(self, rows):
        self.dial[rows] = 0

    def observe(self):
        return [np.eye(self.n_dials + 1)[self.dial]]

    def advance(self, action):
        was_open = self.dial == self.n_dials
        right = action.discrete[:, 0] == CODE[self.dial % self.n_dials]
        turned = np.maximum(self.dial + np.where(right, 1, -1), 0)
        self.dial = np.where(was_open, self.n_dials, turned)
        opened = (self.dial == self.n_dials) & ~was_open
        return opened.astype(float), np.zeros(self.n, dtype=np.bool_)


class LongLock(Lock):
    """A lock with twelve dials, which random actions open nine times more rarely."""

    n_dials = 12
    spec = BehaviorSpec([ObservationSpec.vector(13)], ActionSpec.create_discrete([4]))


def expert(decision):
    """Return the right choice for each agent of `Lock`."""
    dial = decision.obs[0].argmax(axis=1)
    return ActionTuple(discrete=CODE[dial % Lock.n_dials][:, None].astype(np.int32))
