"""A simulator: find the lit end of a corridor that is seen from above."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.simulators.games.areas import SoloAreas

if TYPE_CHECKING:
    from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.core.steps import DecisionSteps
    from pipeline.simulators.games.areas import Rows

LENGTH, MAX_STEP = 12, 40
BEHAVIOR = "Corridor?team=0"
SPEC = BehaviorSpec([ObservationSpec.visual(2, 2, LENGTH, "view")], ActionSpec.create_discrete([2]))


class Corridor(SoloAreas):
    """Find the lit end of a corridor (image, two actions).

    Channel 0 of the image shows the agent, channel 1 the light. Each step costs 0.01, the light
    gives 1, the dark end -1; both end the episode.
    """

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__(
            "corridor", BEHAVIOR, SPEC, max_step=MAX_STEP, seed=seed, n_agents=n_agents
        )
        self._place_of = self._keep("place", ())
        self._light = self._keep("light", ())

    def _place(self, rows: AnyArray) -> None:
        """Begin an episode in these areas."""
        uniform = self._uniform(rows, 2)
        self._place_of[rows] = 3 + (uniform[:, 0] * (LENGTH - 6)).astype(np.int64)
        self._light[rows] = np.where(uniform[:, 1] < 0.5, 0, LENGTH - 1)

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Go left (0) or right (1); gives rewards [N] and whether the episode ends."""
        self._place_of += 2 * action.discrete[:, 0] - 1
        ended = (self._place_of == 0) | (self._place_of == LENGTH - 1)
        goal = np.where(self._place_of == self._light, 1.0, -1.0)
        return np.where(ended, goal, -0.01).astype(np.float32), ended

    def _observe(self, rows: Rows) -> list[FloatArray]:
        """[n, 2, 2, LENGTH] what these agents see."""
        place, light = self._place_of[rows], self._light[rows]
        image = np.zeros((len(place), 2, 2, LENGTH), dtype=np.float32)
        each = np.arange(len(place))
        image[each, 0, :, place] = 1.0
        image[each, 1, :, light] = 1.0
        return [image]


def expert(steps: DecisionSteps) -> ActionTuple:
    """Walk to the light."""
    place, light = steps.obs[0].max(axis=2).argmax(axis=2).T
    return ActionTuple(discrete=(light > place).astype(np.int32)[:, None])
