"""Games with a known best policy: two sides answer questions; more right answers win."""

from typing import ClassVar

import numpy as np
from steps import decision_steps, terminal_steps
from toys import Environment

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import TerminalSteps

CHOICES = 4
PICK = BehaviorSpec([ObservationSpec.vector(CHOICES)], ActionSpec.create_discrete([CHOICES]))
AIM = BehaviorSpec([ObservationSpec.vector(CHOICES)], ActionSpec.create_continuous(1))
PLACES = np.linspace(-0.75, 0.75, CHOICES)


class Duel(Environment):
    """In each area an agent of each side answers `length` questions; more right answers win.

    The winner gets the reward 1, the loser -1.

    A side with the specification `PICK` answers with a choice, a side with `AIM` with a number that
    may be wrong by 0.25. Equal numbers of right answers are a draw, with a reward of 0. So equal
    policies have a mean return of 0, and an untrained policy is right in one of four answers.
    """

    specs: ClassVar = {"Duel?team=0": PICK, "Duel?team=1": PICK}
    length = 4
    shown = 4
    """Number of steps of an episode with a new question; later steps keep the last question."""

    def __init__(self, *, seed: int = 0, n_areas: int = 8) -> None:
        super().__init__(np.random.default_rng([seed, 79]))
        self.n = n_areas
        self.behavior_specs = dict(self.specs)
        self.question = np.zeros((2, n_areas), dtype=np.int64)
        self.right = np.zeros((2, n_areas), dtype=np.int64)
        self.age = np.zeros(n_areas, dtype=np.int64)
        self.n_resets = 0
        self.lengths: list[int] = []

    def reset(self):
        self.n_resets += 1
        self._begin(np.arange(self.n))
        return self._steps({})

    def step(self, actions):
        for side, name in enumerate(self.behavior_specs):
            self.right[side] += self._answers(actions[name], self.question[side])
        self.age += 1
        ended = np.flatnonzero(self.age >= self.length)
        terminals = {}
        if len(ended):
            lead = np.sign(self.right[0, ended] - self.right[1, ended]).astype(np.float32)
            terminals = {
                name: self._terminal(side, ended, lead if side == 0 else -lead)
                for side, name in enumerate(self.behavior_specs)
            }
        self._ask(np.flatnonzero(self.age < self.shown))
        self._begin(ended)
        return self._steps(terminals)

    def _answers(self, action, question):
        if action.continuous.shape[1]:
            return np.abs(action.continuous[:, 0] - PLACES[question]) <= 0.25
        return action.discrete[:, 0] == question

    def _begin(self, areas):
        self.age[areas] = 0
        self.right[:, areas] = 0
        self._ask(areas)

    def _ask(self, areas):
        self.question[:, areas] = self.rng.integers(0, CHOICES, (2, len(areas)))

    def _obs(self, side):
        obs = np.eye(CHOICES, dtype=np.float32)[self.question[side]]
        obs[self.age >= self.shown] = 0.0
        return obs

    def _ids(self, side):
        return 2 * np.arange(self.n, dtype=np.int32) + np.int32(side)

    def _terminal(self, side, areas, reward):
        return terminal_steps([self._obs(side)[areas]], self._ids(side)[areas], reward=reward)

    def _steps(self, ended):
        steps = {}
        for side, (name, spec) in enumerate(self.behavior_specs.items()):
            masks = [np.zeros((self.n, CHOICES), dtype=np.bool_)] if spec is PICK else None
            decision = decision_steps([self._obs(side)], self._ids(side), masks=masks)
            steps[name] = (decision, ended.get(name) or TerminalSteps.empty(spec))
        return steps


class Uneven(Duel):
    """One side answers with a choice, the other with a number: two behaviors."""

    specs: ClassVar = {"Pick?team=0": PICK, "Aim?team=1": AIM}


class Recall(Duel):
    """A question is shown once and has to be answered three times, at best from memory."""

    length = 3
    shown = 1
