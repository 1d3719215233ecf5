"""One task for every kind of action and observation: answer the shown name and level.

A name (one of three) and a level (-0.8 to 0.8) are drawn for each answer. A discrete action
answers the name, a continuous action the level, a hybrid action both. Name and level are shown as
numbers, as an image, in a list of entities of which a goal signal selects one, or some steps
earlier.
"""

from dataclasses import replace

import numpy as np
from toys import BEHAVIOR, Toy

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType

N_NAMES = 3
N_KEYS = 2
SIDE = 20
ANSWERS = 4
# Number of decisions of an episode with memory: the first shows the answer, the last asks for it.
WAIT = 3

ACTIONS = {
    "continuous": ActionSpec.create_continuous(1),
    "discrete": ActionSpec.create_discrete([N_NAMES]),
    "hybrid": ActionSpec.create_hybrid(1, [N_NAMES]),
}
OBSERVATIONS = {
    "vector": [ObservationSpec.vector(N_NAMES + 1)],
    "visual": [ObservationSpec.visual(1, SIDE, SIDE)],
    "entities": [
        ObservationSpec.entities(N_KEYS, N_KEYS + N_NAMES + 1),
        ObservationSpec.vector(N_KEYS, "goal", ObservationType.GOAL_SIGNAL),
    ],
    "memory": [ObservationSpec.vector(N_NAMES + 2)],
}

# Largest mean return of answers that ignore the observation, with 1 as the best return: the name is
# right in a third of the cases, and the level 0 is wrong by 0.4 on average.
BLIND = {"discrete": 1 / N_NAMES, "continuous": 0.5, "hybrid": 0.5 * (1 / N_NAMES + 0.5)}


class Answer(Toy):
    """An environment with a best return of 1; `BLIND` has the best returns without observing.

    Args:
        action: kind of action.
        observation: how the answer is shown.
        team_size: agents that share their rewards as group rewards; 1 for none.
    """

    def __init__(self, action: str, observation: str, *, team_size: int = 1, **options) -> None:
        super().__init__(**options)
        self.action, self.observation, self.team_size = action, observation, team_size
        self.spec = BehaviorSpec(OBSERVATIONS[observation], ACTIONS[action])
        self.remembers = observation == "memory"
        self.length = WAIT if self.remembers else ANSWERS
        self.name = np.zeros(self.n, dtype=np.int64)
        self.level = np.zeros(self.n)
        self.other_name = np.zeros(self.n, dtype=np.int64)
        self.other_level = np.zeros(self.n)
        self.key = np.zeros(self.n, dtype=np.int64)
        self.first = np.zeros(self.n, dtype=np.int64)
        self.alone = np.zeros(self.n, dtype=np.bool_)

    def begin(self, rows):
        n = len(rows)
        self.name[rows], self.other_name[rows] = self.rng.integers(0, N_NAMES, (2, n))
        self.level[rows], self.other_level[rows] = self.rng.uniform(-0.8, 0.8, (2, n))
        self.key[rows], self.first[rows] = self.rng.integers(0, N_KEYS, (2, n))
        self.alone[rows] = self.rng.random(n) < 0.3

    def observe(self):
        numbers = np.concatenate((np.eye(N_NAMES)[self.name], self.level[:, None]), axis=1)
        if self.remembers:
            visible = numbers * (self.age == 0)[:, None]
            return [np.concatenate((visible, (self.age == WAIT - 1)[:, None]), axis=1)]
        if self.observation == "visual":
            return [self._image()]
        if self.observation == "entities":
            return [self._entities(numbers), np.eye(N_KEYS)[self.key]]
        return [numbers]

    def advance(self, action):
        parts = []
        if action.discrete.shape[1]:
            parts.append((action.discrete[:, 0] == self.name).astype(float))
        if action.continuous.shape[1]:
            parts.append(1.0 - np.abs(action.continuous[:, 0] - self.level) / 0.8)
        worth = np.mean(parts, axis=0)
        if self.remembers:
            is_question = self.age == WAIT - 1
            return np.where(is_question, worth, 0.0), is_question
        self.begin(np.arange(self.n))
        return worth / ANSWERS, self.age == ANSWERS - 1

    def reset(self):
        return self._as_teams(super().reset())

    def step(self, actions):
        return self._as_teams(super().step(actions))

    def _image(self):
        """Return images [N, 1, 20, 20] with a bar: its row is the name, its column the level."""
        image = np.zeros((self.n, 1, SIDE, SIDE))
        column = np.rint((self.level + 0.8) / 1.6 * (SIDE - 4)).astype(int)
        for agent in range(self.n):
            top = 1 + 6 * self.name[agent]
            image[agent, 0, top : top + 6, column[agent] : column[agent] + 4] = 1.0
        return image

    def _entities(self, numbers):
        """Return the selected entity and, in 70 % of cases, a second entity, in random order."""
        wished = np.concatenate((np.eye(N_KEYS)[self.key], numbers), axis=1)
        others = np.eye(N_NAMES)[self.other_name], self.other_level[:, None]
        distractors = np.concatenate((np.eye(N_KEYS)[1 - self.key], *others), axis=1)
        swapped = (self.first == 1) & ~self.alone
        distractors[self.alone] = 0.0
        first = np.where(swapped[:, None], distractors, wished)
        second = np.where(swapped[:, None], wished, distractors)
        return np.stack((first, second), axis=1)

    def _as_teams(self, steps):
        """Replace rewards by group rewards, if agents are in teams."""
        if self.team_size == 1:
            return steps
        return {BEHAVIOR: tuple(map(self._shared, steps[BEHAVIOR]))}

    def _shared(self, steps):
        """Replace rewards by the mean of the team; the episodes of a team end together."""
        teams = steps.reward.reshape(-1, self.team_size).mean(axis=1)
        return replace(
            steps,
            reward=np.zeros_like(steps.reward),
            group_id=(1 + steps.agent_id // self.team_size).astype(np.int32),
            group_reward=np.repeat(teams, self.team_size).astype(np.float32),
        )
