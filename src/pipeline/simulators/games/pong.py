"""Two paddles and a ball: a symmetric game, of which an episode is one point.

Shaped like the symmetric examples of Unity's self-play (Tennis, Soccer Twos). Both teams share one
behavior; each team observes the court as if its own paddle were on the left, so one policy can play
both sides.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.simulators.games.areas import Areas, agent_fields, checked, vector
from pipeline.simulators.games.drawing import AMBER, BLUE, FLOOR, RED, Canvas

BEHAVIORS = ("Pong?team=0", "Pong?team=1")  # behaviors of the left and of the right paddle
MAX_STEP = 400  # number of decisions after which a point ends as a draw
HALF_PADDLE = 0.2
PADDLE_SPEED = 0.06  # distance per decision; the court is 2 wide and 2 high
SERVE_SPEED, SPEED_UP, MAX_SPEED = 0.08, 1.1, 0.25
"""The ball's speed along x: at the serve, its growth factor at each return, and its maximum."""
SLOPE = 1.0  # ratio of the ball's speeds along y and x after a return with the end of the paddle

_DIRECTIONS = np.array([0.0, 1.0, -1.0], dtype=np.float32)
# Signs of x, y, vx and vy after a reflection of the court in x, for the right paddle.
_MIRROR = np.array([-1.0, 1.0, -1.0, 1.0], dtype=np.float32)
_SCALE = np.array([1.0, 1.0, MAX_SPEED, MAX_SPEED], dtype=np.float32)

_SPEC = BehaviorSpec([vector(6)], ActionSpec.create_discrete([len(_DIRECTIONS)]))


class Pong(Areas):
    """Areas with a ball and two paddles each; `n_agents` counts paddles."""

    def __init__(self, *, seed: int = 0, n_agents: int = 32) -> None:
        specs = dict.fromkeys(BEHAVIORS, _SPEC)
        super().__init__("pong", specs, seed=seed, n_agents=n_agents, per_area=2)
        self._ball = self._keep("ball", (4,), np.float32)
        self._paddle = self._keep("paddle", (2,), np.float32)
        self._n_steps = self._keep("n_steps", ())
        first = 2 * np.arange(self._n_areas, dtype=np.int32)
        self._agent_id = (first, first + np.int32(1))

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode, the play for one point, in every area."""
        self._begin(self._areas)
        return self._steps([TerminalSteps.empty(_SPEC)] * 2)

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Move the paddles by int32 actions [areas, 1] (0 stay, 1 up, 2 down), then the ball."""
        for team, name in enumerate(BEHAVIORS):
            chosen = checked(actions[name].discrete, (self._n_areas, 1), name)[:, 0]
            self._paddle[:, team] += PADDLE_SPEED * _DIRECTIONS[chosen]
        np.clip(self._paddle, HALF_PADDLE - 1.0, 1.0 - HALF_PADDLE, out=self._paddle)
        missed = self._fly()
        self._n_steps += 1
        lost = np.asarray(missed.any(axis=1))
        ended = np.asarray(lost | (self._n_steps >= MAX_STEP))
        if not ended.any():
            return self._steps([TerminalSteps.empty(_SPEC)] * 2)
        rows = np.flatnonzero(ended)
        # The left team's reward: 1 if the right team missed the ball, -1 if the left team missed
        # it, 0 for a draw.
        won = missed[rows, 1].astype(np.float32) - missed[rows, 0]
        terminals = []
        for team, (reward, ids) in enumerate(zip((won, -won), self._agent_id, strict=True)):
            fields = agent_fields([self._observe(team)[rows]], reward, ids[rows])
            terminals.append(TerminalSteps(**fields, interrupted=~lost[rows]))
        self._begin(rows)
        return self._steps(terminals)

    def _fly(self) -> BoolArray:
        """Advance the ball by one decision; return bool [areas, 2], True if a team missed it."""
        ball = self._ball
        arrives = np.abs(ball[:, 0] + ball[:, 2]) >= 1.0
        # The ball stops at the paddles' line, where it is either returned or missed.
        travel = np.where(arrives, (1.0 - np.abs(ball[:, 0])) / np.abs(ball[:, 2]), 1.0)
        ball[:, :2] += ball[:, 2:] * travel[:, None]
        _bounce(ball)
        side = (ball[:, 2] > 0).astype(np.int64)
        offset = (ball[:, 1] - self._paddle[self._areas, side]) / HALF_PADDLE
        returned = arrives & (np.abs(offset) <= 1.0)
        if returned.any():
            # The ball gets faster with each return, so that good players also miss it.
            speed = np.minimum(np.abs(ball[:, 2]) * SPEED_UP, MAX_SPEED)
            back = np.stack((-np.sign(ball[:, 2]) * speed, SLOPE * offset * speed), axis=1)
            np.copyto(ball[:, 2:], back.astype(np.float32), where=returned[:, None])
        missed = np.zeros((self._n_areas, 2), dtype=np.bool_)
        missed[self._areas, side] = arrives & ~returned
        return missed

    def _begin(self, rows: AnyArray) -> None:
        for row in rows.tolist():
            y, slope, side = self._rngs[row].uniform((-0.5, -0.5, -1.0), (0.5, 0.5, 1.0))
            vx = SERVE_SPEED if side > 0 else -SERVE_SPEED
            self._ball[row] = (0.0, y, vx, slope * SERVE_SPEED)
        self._paddle[rows] = 0.0
        self._n_steps[rows] = 0

    def _steps(self, terminals: list[TerminalSteps]) -> dict[str, Steps]:
        steps = {}
        for team, name in enumerate(BEHAVIORS):
            reward = np.zeros(self._n_areas, dtype=np.float32)
            fields = agent_fields([self._observe(team)], reward, self._agent_id[team])
            mask = np.zeros((self._n_areas, len(_DIRECTIONS)), dtype=np.bool_)
            steps[name] = (DecisionSteps(**fields, action_mask=[mask]), terminals[team])
        return steps

    def _observe(self, team: int) -> FloatArray:
        """Return float32 [areas, 6]: own paddle, other paddle, and the ball's x, y, vx and vy."""
        # A team sees the court from its own side, which is at x = -1.
        obs = np.empty((self._n_areas, 6), dtype=np.float32)
        obs[:, :2] = self._paddle if team == 0 else self._paddle[:, ::-1]
        obs[:, 2:] = self._ball / _SCALE
        if team == 1:
            obs[:, 2:] *= _MIRROR
        return obs

    def render(self, agent: int) -> AnyArray:
        """Return a picture of a paddle's court."""
        area = agent // 2
        canvas = Canvas((-1.1, -1.0), (1.1, 1.0))
        canvas.box((-1.1, -1.0), (1.1, 1.0), FLOOR)
        for x, y, color in zip((-1.04, 1.04), self._paddle[area], (BLUE, RED), strict=True):
            canvas.box((x - 0.03, y - HALF_PADDLE), (x + 0.03, y + HALF_PADDLE), color)
        canvas.disc(self._ball[area, :2], 0.04, AMBER)
        return canvas.pixels()


def _bounce(ball: AnyArray) -> None:
    """Reflect balls [N, 4] that went through the upper or the lower wall, in place."""
    over = np.abs(ball[:, 1]) > 1.0
    inside = np.copysign(2.0, ball[:, 1]) - ball[:, 1]
    ball[:, 1] = np.where(over, inside, ball[:, 1])
    ball[:, 3] = np.where(over, -ball[:, 3], ball[:, 3])


_AIM = 0.7
_STAY, _UP, _DOWN = 0, 1, 2


def expert(steps: DecisionSteps) -> ActionTuple:
    """Move to the place where the ball will arrive; wait in the middle while it flies away."""
    paddle, opponent, x, y, vx, vy = steps.obs[0].T
    comes = vx < 0
    # Observed speeds are divided by MAX_SPEED, and the own paddle is at x = -1.
    n_decisions = (x + 1.0) / np.where(comes, -vx * MAX_SPEED, 1.0)
    arrival = folded(y + vy * MAX_SPEED * n_decisions)
    # A ball that hits the paddle above its middle flies up, away from a low opponent.
    aim = np.where(opponent > 0, _AIM, -_AIM) * HALF_PADDLE
    target = np.where(comes, arrival + aim, 0.0)
    limit = 1.0 - HALF_PADDLE
    off = np.clip(target, -limit, limit) - paddle
    action = np.where(off > 0, _UP, _DOWN)
    action = np.where(np.abs(off) <= PADDLE_SPEED / 2, _STAY, action)
    return ActionTuple(discrete=action[:, None])


def folded(y: AnyArray) -> AnyArray:
    """Return the height of a ball that is reflected by walls at -1 and 1.

    `y` is the height that the ball would have without walls.
    """
    # Reflections at both walls are a triangle wave with a period of twice the court's height.
    phase = np.mod(y + 1.0, 4.0)
    return np.where(phase > 2.0, 4.0 - phase, phase) - 1.0
