"""Toys that observe a list of entities, of changing length and in random order."""

import numpy as np
from toys import Toy

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec

MOST = 5


class Crowded(Toy):
    """Of 1 to 5 entities, the one with the largest number must be found in every decision."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.count = np.zeros(self.n, dtype=np.int64)
        self.number = np.zeros((self.n, MOST))
        self.label = np.zeros((self.n, MOST), dtype=np.int64)
        self.place = np.zeros((self.n, MOST))

    def begin(self, rows):
        shape = (len(rows), MOST)
        self.count[rows] = self.rng.integers(1, MOST + 1, len(rows))
        self.number[rows] = self.rng.uniform(0.2, 1.0, shape)
        self.label[rows] = self.rng.random(shape).argsort(axis=1)
        self.place[rows] = self.rng.uniform(-0.9, 0.9, shape)

    def observe(self):
        entities = np.concatenate((self.number[:, :, None], self.told()), axis=2)
        entities[np.arange(MOST) >= self.count[:, None]] = 0.0
        return [entities]

    def advance(self, action):
        present = np.arange(MOST) < self.count[:, None]
        largest = np.where(present, self.number, 0.0).argmax(axis=1)
        reward = self.worth(action, np.arange(self.n), largest)
        self.begin(np.arange(self.n))
        return reward, np.zeros(self.n, dtype=np.bool_)

    def told(self):
        """Return the other numbers of each entity, [N, 5, n]."""
        raise AssertionError

    def worth(self, action, agents, largest):
        """Return the reward of each agent's answer, [N]."""
        raise AssertionError((action, agents, largest))


class LargestName(Crowded):
    """Entities, discrete: answer the name of the largest entity. Best return 4; guessing 0.8."""

    spec = BehaviorSpec(
        [ObservationSpec.entities(MOST, 1 + MOST)], ActionSpec.create_discrete([MOST])
    )

    def told(self):
        return np.eye(MOST)[self.label]

    def worth(self, action, agents, largest):
        return (action.discrete[:, 0] == self.label[agents, largest]).astype(float)


class LargestPlace(Crowded):
    """Entities, continuous: answer the largest entity's place. Best return 4; the place 0: 2.2."""

    spec = BehaviorSpec([ObservationSpec.entities(MOST, 2)], ActionSpec.create_continuous(1))

    def told(self):
        return self.place[:, :, None]

    def worth(self, action, agents, largest):
        return 1.0 - np.abs(action.continuous[:, 0] - self.place[agents, largest])
