"""An environment with SoccerTwos' shapes, for `profiles.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.core.arrays import IntArray
    from pipeline.core.specs import ActionTuple
    from pipeline.core.steps import Steps


class Pitches:
    """Nothing but SoccerTwos' shapes: random games of two against two, 12 players in all.

    Args:
        seed: of the games.
        n_agents: players, four on each pitch.
    """

    LENGTH = 300
    """Decisions of a game, on average."""

    def __init__(self, *, seed: int, n_agents: int) -> None:
        self._rng = np.random.default_rng(seed)
        spec = BehaviorSpec(
            [ObservationSpec.vector(264), ObservationSpec.vector(72)],
            ActionSpec.create_discrete([3, 3, 3]),
        )
        self.behavior_specs = {f"SoccerTwos?team={team}": spec for team in (0, 1)}
        n = n_agents // 2
        self._observations = [
            self._rng.random((997 + n, *obs_spec.shape)) for obs_spec in spec.observation_specs
        ]
        self._observations = [array.astype(np.float32) for array in self._observations]
        self._ids = {name: k * n + np.arange(n) for k, name in enumerate(self.behavior_specs)}

    def reset(self) -> dict[str, Steps]:
        """New games everywhere."""
        return self._steps(np.zeros(0, np.int64))

    def step(self, actions: Mapping[str, ActionTuple]) -> dict[str, Steps]:
        """Advance all games; some end, and one of their teams has won."""
        n_pitches = len(actions["SoccerTwos?team=0"].discrete) // 2
        return self._steps(np.flatnonzero(self._rng.random(n_pitches) < 1.0 / self.LENGTH))

    def set_parameter(self, name: str, value: float) -> None:
        """Do nothing: there is no parameter."""

    def close(self) -> None:
        """Nothing to free."""

    def _steps(self, over: IntArray) -> dict[str, Steps]:
        result = {}
        won = self._rng.random() < 0.5
        for name, ids in self._ids.items():
            group = (ids // 2 + 1).astype(np.int32)
            ended = (2 * over[:, None] + np.arange(2)).flatten()
            nothing = np.zeros(len(ids), np.float32)
            first = int(self._rng.integers(997))
            obs = [array[first : first + len(ids)] for array in self._observations]
            masks = [np.zeros((len(ids), 3), np.bool_) for _ in range(3)]
            agent_ids = ids.astype(np.int32)
            # a player keeps its id: it begins the next game in the same message
            decisions = DecisionSteps(obs, nothing, agent_ids, masks, group, nothing)
            gained = np.full(len(ended), 1.0 if won else -1.0, np.float32)
            stopped = np.zeros(len(ended), np.bool_)
            last = [array[ended] for array in obs]
            rest = (nothing[ended], stopped, agent_ids[ended], group[ended], gained)
            result[name] = (decisions, TerminalSteps(last, *rest))
            won = not won
        return result
