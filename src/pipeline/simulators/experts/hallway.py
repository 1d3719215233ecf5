"""A walker that remembers the symbol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.simulators import hallway as game
from pipeline.simulators.experts.sighted import nearest_ahead, sights, walk

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import DecisionSteps


class HallwayExpert:
    """Looks at the symbol, walks to the end and takes the goal that it remembers."""

    def __init__(self) -> None:
        self._cue = np.zeros(0, dtype=np.int64)

    def __call__(self, steps: DecisionSteps) -> ActionTuple:
        """One move per agent."""
        tag, _ = sights(steps.obs[0], game.RAY_DEGREES, 5)
        cue = self._remember(steps.agent_id, tag)
        goal, bearing = nearest_ahead(tag == (game.GOAL_O + cue)[:, None], game.RAY_DEGREES)
        compass = np.degrees(np.arctan2(steps.obs[1][:, 0], steps.obs[1][:, 1]))
        is_past = steps.obs[1][:, 2] > 0.5
        return walk(np.where(goal & is_past, bearing, -compass), game.TURN_DEGREES)

    def _remember(self, agents: AnyArray, tag: AnyArray) -> AnyArray:
        """[N] symbol last seen by each agent: 0 for O, 1 for X."""
        missing = int(agents.max(initial=-1)) + 1 - len(self._cue)
        self._cue = np.pad(self._cue, (0, max(0, missing)))
        for symbol in (game.SYMBOL_O, game.SYMBOL_X):
            self._cue[agents[(tag == symbol).any(axis=1)]] = symbol - game.SYMBOL_O
        return self._cue[agents]
