"""A toy that observes a list of entities, of changing length and in random order."""

import numpy as np
from toys import Toy

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec

MOST = 5


class LargestName(Toy):
    """Entities, discrete: answer the name of the one of 1 to 5 entities with the largest number.

    The best return is 4; guessing gives 0.8.
    """

    spec = BehaviorSpec(
        [ObservationSpec.entities(MOST, 1 + MOST)], ActionSpec.create_discrete([MOST])
    )

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.count = np.zeros(self.n, dtype=np.int64)
        self.number = np.zeros((self.n, MOST))
        self.label = np.zeros((self.n, MOST), dtype=np.int64)

    def begin(self, rows):
        shape = (len(rows), MOST)
        self.count[rows] = self.rng.integers(1, MOST + 1, len(rows))
        self.number[rows] = self.rng.uniform(0.2, 1.0, shape)
        self.label[rows] = self.rng.random(shape).argsort(axis=1)

    def observe(self):
        entities = np.concatenate((self.number[:, :, None], np.eye(MOST)[self.label]), axis=2)
        entities[np.arange(MOST) >= self.count[:, None]] = 0.0
        return [entities]

    def advance(self, action):
        present = np.arange(MOST) < self.count[:, None]
        largest = np.where(present, self.number, 0.0).argmax(axis=1)
        right = action.discrete[:, 0] == self.label[np.arange(self.n), largest]
        self.begin(np.arange(self.n))
        return right.astype(float), np.zeros(self.n, dtype=np.bool_)
