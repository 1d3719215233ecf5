"""Two hunters try to catch a faster runner before the time is over.

Shaped like the asymmetric example of Unity's self-play (Strikers vs. Goalie): two behaviors with
different observations, actions and rewards. The hunters are a group and win or lose together.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.core.arrays import AnyArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.simulators.games.areas import Areas, agent_fields, checked, vector
from pipeline.simulators.games.drawing import BLUE, FLOOR, RED, Canvas

HUNTER, RUNNER = "Hunter?team=0", "Runner?team=1"
N_HUNTERS = 2
PER_AREA = N_HUNTERS + 1
MAX_STEP = 100  # number of decisions for which the runner must not be caught
HUNTER_SPEED, RUNNER_SPEED = 0.06, 0.08  # distance per decision; the field is 2 wide and 2 high
FULL_SPEED = 0.25  # smallest length of an action at which an agent moves at full speed
REACH = 0.15  # distance at which a hunter has caught the runner
LEAST_X = 0.2  # smallest distance of all agents from the middle line at the beginning
OBS_SIZE = 7

_SPEC = BehaviorSpec([vector(OBS_SIZE)], ActionSpec.create_continuous(2))


class Tag(Areas):
    """Areas with two hunters and a runner each; `n_agents` counts all three."""

    def __init__(self, *, seed: int = 0, n_agents: int = 24) -> None:
        specs = {HUNTER: _SPEC, RUNNER: _SPEC}
        super().__init__("tag", specs, seed=seed, n_agents=n_agents, per_area=PER_AREA)
        self._place = self._keep("place", (PER_AREA, 2), np.float32)
        self._n_steps = self._keep("n_steps", ())

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every area."""
        self._begin(self._areas)
        return self._steps({})

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Move all agents at the same time.

        Actions are float32 [N, 2] of each behavior: direction in x and y. Vectors of the length
        `FULL_SPEED` or more mean full speed; the speed of shorter vectors is proportional to their
        length.
        """
        hunters = checked(actions[HUNTER].continuous, (N_HUNTERS * self._n_areas, 2), HUNTER)
        runners = checked(actions[RUNNER].continuous, (self._n_areas, 2), RUNNER)
        self._place[:, :N_HUNTERS] += HUNTER_SPEED * _velocity(hunters).reshape(-1, N_HUNTERS, 2)
        self._place[:, N_HUNTERS] += RUNNER_SPEED * _velocity(runners)
        np.clip(self._place, -1.0, 1.0, out=self._place)
        self._n_steps += 1
        gap = self._place[:, :N_HUNTERS] - self._place[:, N_HUNTERS:]
        caught = ((gap * gap).sum(axis=2) <= REACH * REACH).any(axis=1)
        rows = np.flatnonzero(caught | (self._n_steps >= MAX_STEP))
        if not len(rows):
            return self._steps({})
        won = np.where(caught[rows], 1.0, -1.0).astype(np.float32)
        terminals = {
            HUNTER: self._terminals(HUNTER, rows, np.repeat(won, N_HUNTERS)),
            RUNNER: self._terminals(RUNNER, rows, -won),
        }
        self._begin(rows)
        return self._steps(terminals)

    def _terminals(self, name: str, areas: AnyArray, result: FloatArray) -> TerminalSteps:
        """Return the last steps of one behavior's agents in `areas`.

        `result` [n] is the group reward of hunters, or the runners' own reward.
        """
        obs, agent_id, group_id = self._observed(name, areas)
        none = np.zeros(len(agent_id), dtype=np.float32)
        reward, shared = (none, result) if name == HUNTER else (result, none)
        fields = agent_fields([obs], reward, agent_id, group_id=group_id, group_reward=shared)
        # No episode is interrupted: when the time is over, the runner has won.
        return TerminalSteps(**fields, interrupted=np.zeros(len(agent_id), dtype=np.bool_))

    def _steps(self, terminals: Mapping[str, TerminalSteps]) -> dict[str, Steps]:
        steps = {}
        for name, spec in self._specs.items():
            obs, agent_id, group_id = self._observed(name, self._areas)
            none = np.zeros(len(agent_id), dtype=np.float32)
            fields = agent_fields([obs], none, agent_id, group_id=group_id)
            decisions = DecisionSteps(**fields, action_mask=None)
            steps[name] = (decisions, terminals.get(name) or TerminalSteps.empty(spec))
        return steps

    def _begin(self, areas: AnyArray) -> None:
        for area in areas.tolist():
            rng = self._rngs[area]
            # All agents are drawn on one side; then the runner is moved to the other side.
            x, y = rng.uniform((LEAST_X, -1.0), (1.0, 1.0), (PER_AREA, 2)).T
            side = 1.0 if rng.random() < 0.5 else -1.0
            self._place[area, :, 0] = side * x
            self._place[area, :, 1] = y
            self._place[area, N_HUNTERS, 0] *= -1.0
        self._n_steps[areas] = 0

    def _observed(self, name: str, areas: AnyArray) -> tuple[FloatArray, AnyArray, AnyArray]:
        """Return observations [n, 7], agent ids and group ids of one behavior's agents in `areas`.

        A hunter observes its place, the relative places of its mate and of the runner, and the time
        left. A runner observes its place, the relative places of the nearer and the farther hunter,
        and the time left.
        """
        place = self._place[areas]
        hunters, runner = place[:, :N_HUNTERS], place[:, N_HUNTERS:]
        is_hunter = name == HUNTER
        obs = np.empty((len(areas), N_HUNTERS if is_hunter else 1, OBS_SIZE), dtype=np.float32)
        obs[..., 6] = 1.0 - self._n_steps[areas, None] / MAX_STEP
        first = PER_AREA * areas[:, None]
        if is_hunter:
            obs[..., 0:2] = hunters
            obs[..., 2:4] = hunters[:, ::-1] - hunters
            obs[..., 4:6] = runner - hunters
            ids = (first + np.arange(N_HUNTERS)).ravel()
            groups = np.repeat(areas + 1, N_HUNTERS)
        else:
            gaps = hunters - runner
            # The order of hunters must not depend on their numbers, so it is by distance.
            order = (gaps * gaps).sum(axis=2).argsort(axis=1, kind="stable")
            obs[:, 0, 0:2] = runner[:, 0]
            obs[:, 0, 2:6] = np.take_along_axis(gaps, order[..., None], axis=1).reshape(-1, 4)
            ids = (first + N_HUNTERS).ravel()
            groups = np.zeros(len(areas))
        return obs.reshape(-1, OBS_SIZE), ids.astype(np.int32), groups.astype(np.int32)

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's field: hunters are red, the runner is blue."""
        canvas = Canvas((-1.1, -1.1), (1.1, 1.1))
        canvas.box((-1.1, -1.1), (1.1, 1.1), FLOOR)
        colors = [RED] * N_HUNTERS + [BLUE]
        for place, color in zip(self._place[agent // PER_AREA], colors, strict=True):
            canvas.disc(place, REACH / 2, color)
        return canvas.pixels()


def _velocity(action: AnyArray) -> FloatArray:
    """Return [N, 2] velocities as fractions of the full speed, with a length of at most 1."""
    length = np.sqrt((action * action).sum(axis=1, keepdims=True))
    return np.asarray(action / np.maximum(length, FULL_SPEED), dtype=np.float32)


_N_DIRECTIONS = 16
_ANGLES = np.arange(_N_DIRECTIONS) * (2 * np.pi / _N_DIRECTIONS)
_DIRECTIONS = np.stack((np.cos(_ANGLES), np.sin(_ANGLES)), axis=1)
# Number of decisions that the runner looks ahead.
_LOOK_AHEAD = 4
# Weight with which the runner avoids corners; and the place to which the farther hunter runs, as a
# part of the way from the runner to the field's center.
_CORNER_FEAR, _DETOUR = 0.35, 0.5


def hunter(steps: DecisionSteps) -> ActionTuple:
    """Run to the runner, or, for the farther hunter, to a place between runner and field center."""
    position, mate, runner = np.split(steps.obs[0][:, :6], 3, axis=1)
    nearer = _length(runner) <= _length(runner - mate)
    cut_off = runner - _DETOUR * (position + runner)
    goal = np.where((nearer | (_length(runner) < 2 * REACH))[:, None], runner, cut_off)
    return ActionTuple(continuous=goal / np.maximum(_length(goal), 1e-6)[:, None])


def runner(steps: DecisionSteps) -> ActionTuple:
    """Run in the direction, one of sixteen, that leads farthest from hunters and corners."""
    position, near, far = np.split(steps.obs[0][:, :6], 3, axis=1)
    place = np.clip(position[:, None] + _LOOK_AHEAD * RUNNER_SPEED * _DIRECTIONS, -1.0, 1.0)
    moved = place - position[:, None]
    to_near, to_far = _length(near[:, None] - moved), _length(far[:, None] - moved)
    safety = np.minimum(to_near, to_far) + 0.3 * np.maximum(to_near, to_far)
    # `corner` is large where both coordinates are large, because a runner in a corner is trapped.
    corner = np.abs(place).min(axis=2) + 0.5 * np.abs(place).max(axis=2)
    best = (safety - _CORNER_FEAR * corner).argmax(axis=1)
    return ActionTuple(continuous=_DIRECTIONS[best])


def _length(vectors: AnyArray) -> AnyArray:
    return np.asarray(np.sqrt((vectors * vectors).sum(axis=-1)))


expert = {"Hunter": hunter, "Runner": runner}
