"""A simulator of one's own: pipeline learn own.yaml --env rooms:Rooms."""

import numpy as np

from pipeline import ActionSpec, BehaviorSpec
from pipeline.simulators.games.areas import SoloAreas, vector


class Rooms(SoloAreas):
    """Keep rooms at the temperature that is asked for, each with one agent.

    An agent sees by how many degrees its room is off and how many it loses per step, and heats
    (1) or cools (-1). A step gives up to 1; a room that is off by 10 degrees ends the episode.
    """

    def __init__(self, *, seed=0, n_agents=16):
        spec = BehaviorSpec([vector(2)], ActionSpec.create_continuous(1))
        super().__init__("rooms", "Rooms?team=0", spec, max_step=50, seed=seed, n_agents=n_agents)
        self._off = self._keep("off", (), np.float32)
        self._loss = self._keep("loss", (), np.float32)

    def _place(self, rows):
        """Begin an episode in these rooms."""
        drawn = self._uniform(rows, 2)
        self._off[rows] = 10 * drawn[:, 0] - 5
        self._loss[rows] = drawn[:, 1]

    def _advance(self, action):
        """Take a step in all rooms: rewards [N], and whether each has ended [N]."""
        self._off += 2 * np.clip(action.continuous[:, 0], -1, 1) - self._loss
        reward = np.maximum(1 - np.abs(self._off), 0)
        return reward, np.abs(self._off) > 10

    def _observe(self, rows):
        """What the agents of these rooms see: an array [n, ...] for each observation."""
        return [np.stack([self._off[rows] / 5, self._loss[rows]], axis=1)]
