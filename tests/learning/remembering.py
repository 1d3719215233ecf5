"""Toys that only a policy with memory can solve."""

import numpy as np
from toys import Toy

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec


class Waiting(Toy):
    """The cue of an episode's first decision must be answered at the last, 3 to 6 decisions later.

    Decisions between the two observe zeros and change nothing. The last number of an observation is
    1 at the last decision.

    A subclass defines `cue`, which draws new cues for agents, `shown`, which returns them as
    numbers [N, n], and `worth`, which returns the reward [N] of each agent's answer.
    """

    length = 100

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.delay = np.zeros(self.n, dtype=np.int64)

    def begin(self, rows):
        self.delay[rows] = self.rng.integers(3, 7, len(rows))
        self.cue(rows)

    def observe(self):
        is_first, is_question = self.age == 0, self.age == self.delay
        return [np.concatenate((self.shown() * is_first[:, None], is_question[:, None]), axis=1)]

    def advance(self, action):
        is_question = self.age == self.delay
        return np.where(is_question, self.worth(action), 0.0), is_question


class Cue(Waiting):
    """Memory, discrete: answer the shown choice of four. Best return 1; without memory 0.25."""

    spec = BehaviorSpec([ObservationSpec.vector(5)], ActionSpec.create_discrete([4]))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.which = np.zeros(self.n, dtype=np.int64)

    def cue(self, rows):
        self.which[rows] = self.rng.integers(0, 4, len(rows))

    def shown(self):
        return np.eye(4)[self.which]

    def worth(self, action):
        return (action.discrete[:, 0] == self.which).astype(float)


class Level(Waiting):
    """Memory, continuous: answer the shown number in -0.8..0.8. Best return 1; no memory: 0.6."""

    spec = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_continuous(1))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.x = np.zeros(self.n)

    def cue(self, rows):
        self.x[rows] = self.rng.uniform(-0.8, 0.8, len(rows))

    def shown(self):
        return self.x[:, None]

    def worth(self, action):
        return 1.0 - np.abs(action.continuous[:, 0] - self.x)
