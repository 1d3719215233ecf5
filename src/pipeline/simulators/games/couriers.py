"""Couriers carry parcels through a town, and decide only where roads meet.

Roads take different times, so decisions last different numbers of simulation steps, and an agent
asks for a decision only when it arrives, as Unity's agents with on-demand decisions. A courier
works for a limited time, its shift, and leaves. After a break, a new agent with a new id takes the
courier's seat, which is its row in the arrays.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.errors import SettingsError
from pipeline.simulators.games.areas import Areas, agent_fields, checked, vector
from pipeline.simulators.games.drawing import AMBER, BLUE, FLOOR, GRAY, Canvas

BEHAVIOR = "Couriers?team=0"
ROADS = np.array(
    [
        [0, 3, 9, 0, 12, 2],
        [2, 0, 2, 10, 0, 8],
        [0, 3, 0, 2, 11, 0],
        [12, 0, 3, 0, 3, 4],
        [0, 9, 0, 2, 0, 12],
        [3, 0, 10, 4, 8, 0],
    ]
)
"""Number of simulation steps from each place (row) to each other (column); 0: no road."""
N_PLACES = len(ROADS)
SHIFT = 60  # number of simulation steps in a courier's shift; the default of the parameter `shift`
MAX_SHIFT = 200
MAX_BREAK = 12  # largest number of simulation steps for which a seat is empty between two couriers
OBS_SIZE = 2 * N_PLACES + 1

_SPEC = BehaviorSpec([vector(OBS_SIZE)], ActionSpec.create_discrete([N_PLACES]))


class Couriers(Areas):
    """`n_agents` independent seats, each empty or taken by one courier.

    At most `n_agents` couriers work at the same time.
    """

    def __init__(self, *, seed: int = 0, n_agents: int = 64) -> None:
        super().__init__("couriers", {BEHAVIOR: _SPEC}, seed=seed, n_agents=n_agents)
        self._at = self._keep("at", ())
        # Steps until the courier arrives at the place `_at`; with 0 steps it has arrived, and asks
        # for a decision.
        self._way = self._keep("way", ())
        self._left = self._keep("left", ())  # steps until the shift ends
        self._break = self._keep("break", ())  # steps until the next courier; 0 if there is one
        self._life = self._keep("life", ())  # number of earlier couriers in this seat
        self._n_delivered = self._keep("n_delivered", ())
        self._address = self._keep("address", ())
        # For each parcel, how many places its address comes after the place where the courier gets
        # the parcel.
        self._hops = self._keep("hops", (MAX_SHIFT,))

    def reset(self) -> Mapping[str, Steps]:
        """Begin a shift in every seat; couriers at work are removed."""
        # Couriers at work are counted as earlier couriers now; `_leave` has counted the couriers of
        # empty seats already.
        self._life += self._left > 0
        self._begin(self._areas)
        decisions = self._decisions(np.zeros(self._n_areas, np.float32))
        return {BEHAVIOR: (decisions, TerminalSteps.empty(_SPEC))}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Send the asking couriers on their way, and advance to the next event of any courier.

        Actions are int32 [N, 1], the next place of every courier that asked. A place without a
        road, which the mask forbids, means waiting for one simulation step.
        """
        asking = np.flatnonzero(self._asks())
        if len(asking):  # without asking couriers `actions` may be empty
            chosen = checked(actions[BEHAVIOR].discrete, (len(asking), 1), BEHAVIOR)[:, 0]
            time = ROADS[self._at[asking], chosen]
            self._at[asking] = np.where(time > 0, chosen, self._at[asking])
            self._way[asking] = np.maximum(time, 1)
        self._advance()
        # Deliveries come before shifts end, so a delivery in the last step counts.
        reward = self._deliver()
        over = (self._break == 0) & (self._left == 0)  # `left` is 0 in empty seats, too
        if not over.any():
            return {BEHAVIOR: (self._decisions(reward), TerminalSteps.empty(_SPEC))}
        rows = np.flatnonzero(over)
        fields = self._fields(rows, reward)
        terminals = TerminalSteps(**fields, interrupted=np.zeros(len(rows), dtype=np.bool_))
        self._leave(rows)
        return {BEHAVIOR: (self._decisions(reward), terminals)}

    def _asks(self) -> BoolArray:
        """Return bool [seats], True if the seat's courier has arrived and asks for a decision."""
        return np.asarray((self._break == 0) & (self._way == 0))

    def _advance(self) -> None:
        """Advance the time to the next event in any seat."""
        is_present = self._break == 0
        until = np.where(is_present, np.minimum(self._way, self._left), self._break)
        # All seats share one clock, so all advance to the earliest event.
        passed = until.min() * is_present
        self._way -= passed
        self._left -= passed
        self._break -= until.min() * ~is_present
        self._begin(np.flatnonzero(~is_present & (self._break == 0)))

    def _deliver(self) -> FloatArray:
        """Exchange delivered parcels for new parcels; return float32 [seats] rewards."""
        delivered = self._asks() & (self._at == self._address)
        self._n_delivered += delivered
        rows = np.flatnonzero(delivered)
        self._address[rows] += self._hops[rows, self._n_delivered[rows]]
        self._address[rows] %= N_PLACES
        return np.asarray(delivered, dtype=np.float32)

    def _begin(self, rows: AnyArray) -> None:
        for row in rows.tolist():
            rng, shift = self._rngs[row], self.parameters.read("shift", SHIFT)
            if not 1 <= shift <= MAX_SHIFT:
                raise SettingsError(
                    f"couriers: the environment parameter shift must be between 1 and {MAX_SHIFT}, "
                    f"got {shift}; change it in the configuration's environment_parameters."
                )
            self._left[row] = int(shift)
            self._at[row] = rng.integers(N_PLACES)
            # A hop is at least 1 place, because no parcel is addressed to the place where it is
            # handed out.
            self._hops[row] = rng.integers(1, N_PLACES, MAX_SHIFT)
        self._way[rows] = 0
        self._break[rows] = 0
        self._n_delivered[rows] = 0
        self._address[rows] = (self._at[rows] + self._hops[rows, 0]) % N_PLACES

    def _leave(self, rows: AnyArray) -> None:
        """Empty the seats `rows` for a random number of steps, at most `MAX_BREAK`."""
        for row in rows.tolist():
            self._break[row] = self._rngs[row].integers(1, MAX_BREAK + 1)
        self._life[rows] += 1

    def _decisions(self, reward: FloatArray) -> DecisionSteps:
        rows = np.flatnonzero(self._asks())
        masks = [ROADS[self._at[rows]] == 0]
        return DecisionSteps(**self._fields(rows, reward), action_mask=masks)

    def _fields(self, rows: AnyArray, reward: FloatArray) -> dict[str, Any]:
        # The ids of successive couriers in a seat differ by the number of seats, so that no two
        # couriers have the same id.
        ids = np.asarray(rows + self._n_areas * self._life[rows], dtype=np.int32)
        return agent_fields([self._observe(rows)], reward[rows], ids)

    def _observe(self, rows: AnyArray) -> FloatArray:
        """Return observations, float32 [n, 13]: one-hot place and address, and the time left."""
        obs = np.zeros((len(rows), OBS_SIZE), dtype=np.float32)
        index = np.arange(len(rows))
        obs[index, self._at[rows]] = 1.0
        obs[index, N_PLACES + self._address[rows]] = 1.0
        obs[:, -1] = self._left[rows] / SHIFT
        return obs

    def render(self, agent: int) -> AnyArray:
        """Return a picture of the town, the parcel's address and the courier of a seat.

        A courier on the way is drawn at a distance from its next place that shows the remaining
        time.
        """
        seat = agent % self._n_areas
        canvas = Canvas((-1.25, -1.25), (1.25, 1.25))
        for start, end in zip(*np.nonzero(ROADS), strict=True):
            canvas.line(_PLACES[[start, end]], 0.03, FLOOR)
        for place in _PLACES:
            canvas.disc(place, 0.14, GRAY)
        canvas.disc(_PLACES[self._address[seat]], 0.2, AMBER)
        if self._break[seat] == 0:
            way = 1.0 - self._way[seat] / (ROADS.max() + 1)
            canvas.disc(way * _PLACES[self._at[seat]], 0.1, BLUE)
        return canvas.pixels()


_TURNS = np.arange(N_PLACES) * (2.0 * np.pi / N_PLACES)
# Positions of the places in the picture.
_PLACES = np.stack((np.sin(_TURNS), np.cos(_TURNS)), axis=1)


def fastest(roads: AnyArray = ROADS) -> AnyArray:
    """Return the steps [P, P] of the fastest way from each place (row) to each place (column)."""
    # Floyd's algorithm (Floyd 1962, Algorithm 97). Places without a road get the sum of all roads,
    # which no way exceeds.
    times = np.where(roads > 0, roads, roads.sum())
    np.fill_diagonal(times, 0)
    for via in range(len(times)):
        times = np.minimum(times, times[:, via, None] + times[via])
    return times


def expert(steps: DecisionSteps) -> ActionTuple:
    """Take the first road of a fastest way to the address; of equal ways, the shorter road."""
    obs = steps.obs[0]
    roads = ROADS[obs[:, :N_PLACES].argmax(axis=1)]
    address = obs[:, N_PLACES:-1].argmax(axis=1)
    # The small last term decides between equal ways: a shorter road lets the courier decide sooner.
    cost = roads + fastest()[:, address].T + 0.01 * roads
    return ActionTuple(discrete=np.where(roads > 0, cost, np.inf).argmin(axis=1)[:, None])
