"""A ball on a tilting platform, simulated by MuJoCo and shaped like Unity's 3DBall.

Coordinates are as in Unity: y is up, and rotations are composed as by Unity's `Transform.Rotate`.
Unity's frame is left-handed and MuJoCo's right-handed, but the formulas of quaternions and cross
products are the same in both frames, and the task equals its mirror image. So nothing is converted.

Every platform has its own model, because mass, scale and gravity may differ; one native call per
decision advances all platforms (`mujoco.rollout`). A platform is a mocap body: it is moved directly
and collides, but its motion does not drag the ball, as in 3DBall.
"""

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps
from pipeline.errors import SettingsError
from pipeline.simulators.games.areas import Rows, SoloAreas, vector
from pipeline.simulators.games.drawing import RED, Canvas

BEHAVIOR = "3DBall?team=0"
DECISION_PERIOD = 5  # number of physics steps per decision
MAX_STEP = 5000  # number of physics steps after which an episode is interrupted
TURN_DEGREES = 2.0  # degrees by which an action of 1 turns the platform per physics step
TURN_LIMIT = 0.25  # quaternion component beyond which the platform turns no further
TIME_STEP_S = 0.01333

# The rewards of Unity's 3DBall, for each decision and for the ball's fall.
_REWARD, _FALL_REWARD = 0.1, -1.0
# If a quaternion q = (w, x, y, z), written as the matrix [[w, x], [y, z]], is multiplied from the
# right by a turn about z or x, the result is cos * q + sin * `_SIGNS` * p. For a turn about z, p is
# q with reversed rows and columns; for a turn about x, p is q with reversed columns.
_SIGNS = np.array([[[-1.0, 1.0], [-1.0, 1.0]], [[-1.0, 1.0], [1.0, -1.0]]])[..., None]
_QPOS, _QVEL = slice(1, 8), slice(8, 14)
# Ranges of an episode's first tilts about x and z, in degrees, and of the ball's first x and z.
_FROM, _TO = np.array([(-10.0, -10.0, -1.5, -1.5), (10.0, 10.0, 1.5, 1.5)])
# MuJoCo's initial time, position and velocity: the ball is above the middle, and at rest.
_FIRST = np.zeros(_QVEL.stop)
_FIRST[_QPOS] = (0.0, 4.0, 0.0, 1.0, 0.0, 0.0, 0.0)

_MODEL = """
<mujoco model="balance_ball">
  <option timestep="{time_step}" gravity="0 -9.81 0" cone="elliptic" jacobian="dense">
    <flag midphase="disable" island="disable" eulerdamp="disable"/>
  </option>
  <size memory="200K"/>
  <default><geom friction="0.6 0.005 0.0001"/></default>
  <worldbody>
    <body mocap="true"><geom type="box" size="2.5 2.5 2.5"/></body>
    <body><freejoint/><geom type="sphere" size="{radius}" mass="{mass}"/></body>
  </worldbody>
</mujoco>
"""

_SPEC = BehaviorSpec([vector(8)], ActionSpec.create_continuous(2))


class BalanceBall(SoloAreas):
    """N independent platforms, each with a ball that must not fall."""

    _decision_period = DECISION_PERIOD

    def __init__(self, *, seed: int = 0, n_agents: int = 12) -> None:
        from mujoco import MjData, mjtState, rollout

        super().__init__("balance_ball", BEHAVIOR, _SPEC, MAX_STEP, seed=seed, n_agents=n_agents)
        self._shape = [(1.0, 1.0)] * n_agents
        # The model is copied, because each platform may have another gravity.
        self._models = [copy.copy(_model(1.0, 1.0)) for _ in range(n_agents)]
        # One `MjData` is enough, because there is one thread and all models have equal sizes.
        self._data = [MjData(self._models[0])]
        # The rollout has no threads of its own, because several environments share the processors.
        self._rollout = rollout.Rollout(nthread=0)
        self._control_spec = int(mjtState.mjSTATE_MOCAP_QUAT)
        # `_platform` is not made by `_keep`, because the area is its last axis and not its first.
        # `state_dict` adds `_platform` to the state.
        self._platform = np.zeros((4, n_agents))
        self._poses = np.zeros((n_agents, DECISION_PERIOD, 4))
        self._state = self._keep("physics", (_QVEL.stop,), np.float64)
        self._states = np.zeros((n_agents, DECISION_PERIOD, _QVEL.stop))
        self._sensors = np.zeros((n_agents, DECISION_PERIOD, 0))
        self._left = np.zeros((n_agents, DECISION_PERIOD), dtype=np.bool_)

    def set_parameter(self, name: str, value: float) -> None:
        """Set `mass` or `scale`, from the next episode on, or `gravity`, at once."""
        super().set_parameter(name, value)
        if name == "gravity":
            for model in self._models:
                model.opt.gravity[1] = -value

    def close(self) -> None:
        """Free the memory of MuJoCo's rollout."""
        self._rollout.close()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later steps depend on."""
        return super().state_dict() | {
            "shape": [list(shape) for shape in self._shape],
            "gravity": [float(model.opt.gravity[1]) for model in self._models],
            "platform": self._platform.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        super().load_state_dict(state)
        for row, (mass, scale) in enumerate(state["shape"]):
            self._shape[row] = (mass, scale)
            self._models[row] = copy.copy(_model(mass, scale))
            self._models[row].opt.gravity[1] = state["gravity"][row]
        self._platform[:] = state["platform"]

    def _advance(self, action: ActionTuple) -> tuple[FloatArray, BoolArray]:
        """Turn every platform about its z axis and its x axis, by actions in [-1, 1]."""
        self._turn(action.continuous)
        self._rollout.rollout(
            self._models,
            self._data,
            self._state,
            self._poses,
            control_spec=self._control_spec,
            skip_checks=True,
            nstep=DECISION_PERIOD,
            state=self._states,
            sensordata=self._sensors,
        )
        self._state[:] = self._states[:, -1]
        # A fall is looked for at every physics step, because a ball may leave and return within a
        # decision.
        x, y, z = np.moveaxis(self._states[:, :, _QPOS], 2, 0)[:3]
        self._left = (np.maximum(np.abs(x), np.abs(z)) > 3.0) | (y < -2.0)
        fallen = np.asarray(self._left.any(axis=1))
        return np.where(fallen, _FALL_REWARD, _REWARD).astype(np.float32), fallen

    def _place(self, rows: AnyArray) -> None:
        read = self.parameters.read
        for row in rows.tolist():
            shape = (read("mass", 1.0), read("scale", 1.0))
            # Making a model takes time, so a model is replaced only if mass or scale have changed.
            if shape != self._shape[row]:
                self._models[row] = copy.copy(_model(*shape))
                self._shape[row] = shape
            self._models[row].opt.gravity[1] = -read("gravity", 9.81)
        drawn = _FROM + (_TO - _FROM) * self._uniform(rows, len(_FROM))
        half_x, half_z = np.radians(drawn[:, :2].T) / 2
        cos, sin, cos_z, sin_z = np.cos(half_x), np.sin(half_x), np.cos(half_z), np.sin(half_z)
        # This is the quaternion (w, x, y, z) of a turn about x, then about z.
        self._platform[:, rows] = (cos_z * cos, cos_z * sin, -sin_z * sin, sin_z * cos)
        self._state[rows] = _FIRST
        self._state[rows, 1], self._state[rows, 3] = drawn[:, 2:].T

    def _turn(self, action: FloatArray) -> None:
        """Store the platforms' poses at each physics step of a decision with these actions."""
        degrees = np.minimum(np.maximum(action, -1.0), 1.0).T.astype(np.float64) * TURN_DEGREES
        half = np.radians(degrees) / 2
        cos, direction = np.cos(half), np.sign(half)
        sin = np.sin(half)[:, None, None] * _SIGNS
        platform = self._platform.copy()
        pairs = platform.reshape(2, 2, -1)
        about_z = (platform[3], pairs[::-1, ::-1], cos[0], sin[0], direction[0])
        about_x = (platform[1], pairs[:, ::-1], cos[1], sin[1], direction[1])
        # All poses of a decision are computed first, because MuJoCo runs all physics steps of the
        # decision in one call.
        for k in range(DECISION_PERIOD):
            for component, partner, c, s, d in (about_z, about_x):
                # At the limit, turns away from the middle are stopped; turns back are not.
                free = d * component < TURN_LIMIT
                turned = c * pairs
                turned += s * partner
                np.copyto(pairs, turned, where=free)
            self._poses[:, k] = platform.T
        # Quaternions are normalized, because rounding would change their length over many turns.
        self._platform = platform / np.sqrt((platform * platform).sum(axis=0))

    def _observe(self, rows: Rows) -> list[FloatArray]:
        return [_observation(self._platform.T[rows], self._state[rows])]

    def _last_observation(self, rows: AnyArray) -> list[FloatArray]:
        """Return observations of the physics step in which the ball fell, or of the last step."""
        left = self._left[rows]
        last = np.where(left.any(axis=1), left.argmax(axis=1), DECISION_PERIOD - 1)
        return [_observation(self._poses[rows, last], self._states[rows, last])]

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's platform, seen from the front and above."""
        canvas = Canvas((-4.6, -3.9), (4.6, 5.3))
        ball = self._state[agent, 1:4]
        turn = _rotation(self._platform[:, agent])
        for face, color in _FACES:
            corners = face @ turn.T
            if (corners.mean(axis=0) @ _VIEW)[2] > 0.0:
                canvas.polygon((corners @ _VIEW)[:, :2], color)
        # A point that moves straight down from the ball to the platform's top changes its y by
        # `height`.
        height = (_HALF_SIDE - turn[:, 1] @ ball) / turn[1, 1]
        shadow = ball + (0.0, height, 0.0) + 0.5 * self._shape[agent][1] * _CIRCLE @ turn.T
        if np.abs(shadow.mean(axis=0) @ turn).max() <= _HALF_SIDE + 1e-9:
            canvas.polygon((shadow @ _VIEW)[:, :2], _SHADE)
        canvas.disc((ball @ _VIEW)[:2], 0.5 * self._shape[agent][1], RED)
        return canvas.pixels()


_HALF_SIDE = 2.5
_SHADE = "#7d9bcb"
# Rotation from world to picture; its columns are right, up, and towards the viewer.
_VIEW = np.array([[0.88, -0.24, 0.41], [0.0, 0.87, 0.5], [0.47, 0.44, -0.76]])
_CIRCLE = np.array([(np.cos(a), 0.0, np.sin(a)) for a in np.linspace(0.0, 2.0 * np.pi, 24)])


def _face(axis: int, side: float) -> AnyArray:
    """Return the corners [4, 3] of the platform's face at `side`, -1 or 1, of `axis`."""
    corners = np.array([(-1, -1), (-1, 1), (1, 1), (1, -1)]) * _HALF_SIDE
    return np.insert(corners, axis, side * _HALF_SIDE, axis=1).astype(np.float64)


_COLORS = ("#4a6797", "#a9c1e8", "#5f7fb3")
_FACES = [(_face(axis, side), _COLORS[axis]) for axis in range(3) for side in (-1.0, 1.0)]


def _rotation(quaternion: AnyArray) -> AnyArray:
    """Return the [3, 3] rotation matrix of a unit quaternion, w first."""
    w, *xyz = quaternion
    x, y, z = xyz
    cross = np.array([(0.0, -z, y), (z, 0.0, -x), (-y, x, 0.0)])
    return np.asarray(np.eye(3) + 2.0 * w * cross + 2.0 * cross @ cross)


def _observation(platform: AnyArray, state: AnyArray) -> FloatArray:
    """Return float32 [N, 8]: platform rotation z and x, ball position and velocity.

    `platform` [N, 4] is a quaternion, w first; `state` [N, 14] MuJoCo's time, position, velocity.
    """
    obs = np.empty((len(platform), 8), dtype=np.float32)
    obs[:, 0] = platform[:, 3]
    obs[:, 1] = platform[:, 1]
    obs[:, 2:5] = state[:, 1:4]
    obs[:, 5:8] = state[:, 8:11]
    return obs


@lru_cache(maxsize=64)
def _model(mass: float, scale: float) -> Any:
    from mujoco import MjModel

    if mass <= 0 or scale <= 0:
        raise SettingsError(
            f"balance_ball: the environment parameters mass and scale must be positive, got {mass} "
            f"and {scale}; change them or their samplers in the configuration's "
            "environment_parameters."
        )
    text = _MODEL.format(time_step=TIME_STEP_S, radius=0.5 * scale, mass=mass)
    return MjModel.from_xml_string(text)


# Tilt in radians per unit of the ball's offset and of its velocity.
_GAIN, _DAMPING = 0.1, 0.15
_MAX_TILT, _TURN_PER_DECISION = 0.5, np.radians(TURN_DEGREES * DECISION_PERIOD)


def expert(steps: DecisionSteps) -> ActionTuple:
    """Tilt the platform against the ball's offset and velocity (a PD controller).

    A positive tilt about z rolls the ball towards -x; a positive tilt about x towards +z.
    """
    obs = steps.obs[0]
    # The wanted tilt is proportional to offset and velocity; the action is the missing turn.
    goal_tilt = _GAIN * obs[:, [2, 4]] + _DAMPING * obs[:, [5, 7]]
    goal_tilt = np.clip(goal_tilt * (1.0, -1.0), -_MAX_TILT, _MAX_TILT)
    # For small angles, a quaternion's component is half of the angle in radians.
    tilt = 2.0 * obs[:, :2]
    return ActionTuple(continuous=np.clip((goal_tilt - tilt) / _TURN_PER_DECISION, -1.0, 1.0))
