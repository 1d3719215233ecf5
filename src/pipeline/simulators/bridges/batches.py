"""Base classes of the bridges, and helpers that draw pictures and collect agents' steps."""

import contextlib
import functools
import importlib
import logging
import math
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces

from pipeline.core.arrays import AnyArray, BoolArray
from pipeline.core.specs import SPACES, BehaviorSpec, ScaledSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.errors import SettingsError, UnityEnvironmentException, UnityObservationException
from pipeline.simulators.bridges.space_text import to_text
from pipeline.simulators.bridges.spaces import Actions, Observations, parts_of
from pipeline.simulators.games.drawing import AMBER, BLUE, FLOOR, GRAY, Canvas
from pipeline.wire.channels.parameters import Parameters

_log = logging.getLogger(__name__)

MISUSE = (AttributeError, TypeError, ValueError)
"""Errors that Python raises if a method's result has another form than expected."""
_ONE = ("observation", "reward", "terminated", "truncated", "info")
_BY_AGENT = ("observations", "rewards", "terminations", "truncations", "infos")


def refuse_returned(
    env: Any, method: str, result: Any, error: Exception, *, where: str
) -> NoReturn:
    """Raise a UnityEnvironmentException that names the library's rule that a method broke.

    `method` is `reset`, `step`, or `last` of PettingZoo's `AECEnv`; `result` is its result, or None
    if it raised `error`. `error` is raised if the method broke no rule.
    """
    library = "PettingZoo" if hasattr(env, "possible_agents") else "Gymnasium"
    names: tuple[str, ...] = _BY_AGENT if library == "PettingZoo" and method != "last" else _ONE
    # `reset` returns observation and info only.
    names = (names[0], names[-1]) if method == "reset" else names
    rule = _broken_rule(names, result, error)
    if rule is None:
        raise error
    given, asked = rule
    code = getattr(getattr(getattr(env, "unwrapped", env), method, None), "__code__", None)
    line = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
    raise UnityEnvironmentException(
        f"{where}: {method}(){line} {given}, and {library} asks for {asked}; repair the environment"
    ) from error


def _broken_rule(names: tuple[str, ...], result: Any, error: Exception) -> tuple[str, str] | None:
    """Return a method's result and the required result as text; None if no rule is broken."""
    n_asked = f"{len(names)} values: {', '.join(names)}"
    if result is None:
        keyword = re.search(r"reset\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if keyword and keyword[1] in ("seed", "options"):
            return f"takes no '{keyword[1]}'", "reset(*, seed=None, options=None)"
        # The error may come from a wrapper of Gymnasium that unpacks the returned values.
        last = traceback.extract_tb(error.__traceback__)[-1]
        if " to unpack (" in str(error) and "gymnasium" in Path(last.filename).parts:
            return f"returns another number of values ({error})", n_asked
        return None
    if not isinstance(result, tuple | list):
        return f"returns one {type(result).__name__}", n_asked
    if len(result) != len(names):
        return f"returns {len(result)} values", n_asked
    for name, value in zip(names, result, strict=True):
        if (asked := _required_form(value, name)) is not None:
            text = " ".join(repr(value).split())
            text = text if len(text) <= 80 else f"{text[:77]}..."
            return f"returns {text} as {name}", asked
    return None


def _required_form(value: Any, name: str) -> str | None:
    """Return a text with the form that `name` must have; None if `value` has this form."""
    if name in _BY_AGENT:
        one = name.removesuffix("s")
        if not isinstance(value, Mapping):
            return "a dict with the value of each agent"
        wrong = (_required_form(of_agent, one) for of_agent in value.values())
        asked = next((asked for asked in wrong if asked is not None), None)
        return None if asked is None else f"{asked} for each agent"
    if name == "info":
        return None if isinstance(value, Mapping) else "a dict"
    try:
        if name == "reward":
            float(value)
        elif name != "observation":
            bool(value)
    except (TypeError, ValueError):
        return "one number" if name == "reward" else "True or False"
    return None


# Reward, agent id, group id (0 for none) and group reward of an agent in a step.
Row = tuple[float, int, int, float]

# Keys of PettingZoo, RLlib, TorchRL and Tianshou for an observation that comes with a mask.
_OBSERVATION = ("observation", "observations", "obs")


class Bridge:
    """Base class of simulators that run copies of an environment, each with `per_copy` agents."""

    def __init__(self, envs: Sequence[Any], where: str, per_copy: int = 1) -> None:
        self.parameters = Parameters()
        self._envs, self._where, self._per_copy = envs, where, per_copy
        self.n_copies = len(envs)

    def set_parameter(self, name: str, value: float) -> None:
        """Set an environment parameter, which later resets get as one of their `options`."""
        self.parameters.set_value(name, value)

    def render(self, agent: int) -> AnyArray:
        """Return a picture of the environment copy of `agent`: uint8 [height, width, 3], RGB."""
        return picture(self._envs[agent // self._per_copy], self._where)

    @property
    def render_fps(self) -> float | None:
        """Frames per second for videos, from the environment's metadata; None if unknown."""
        rate = (getattr(self._envs[0], "metadata", None) or {}).get("render_fps")
        return float(rate) if isinstance(rate, int | float) and 0 < rate < math.inf else None

    def close(self) -> None:
        """Close every copy."""
        for env in self._envs:
            env.close()


class Codec:
    """Converts the observations of an environment and the actions of its behavior.

    The arguments are those of `Observations` and `Actions`.

    Attributes:
        mask_key: key of the observation's part that is the action mask and not an input; or None.
    """

    def __init__(
        self, obs_space: Any, action_space: Any, *, where: str, visual: str, scale: float | None
    ) -> None:
        self._where = where
        self.actions = Actions(action_space, where=where, scale=scale)
        self.mask_key = _mask_key(obs_space, sum(self.actions.spec.discrete_branches), where)
        seen, root = obs_space, tuple[str, ...]()
        if self.mask_key is not None:
            rest = [part for part in obs_space.spaces.items() if part[0] != self.mask_key]
            # If only one part such as `observation` remains, it is the whole observation.
            if len(rest) == 1 and rest[0][0] in _OBSERVATION:
                seen, root = rest[0][1], (rest[0][0],)
            else:
                seen = spaces.Dict(rest)
        self.observations = Observations(seen, where=where, visual=visual, root=root)
        text = to_text(observation=obs_space, action=action_space, visual=visual, scale=scale)
        self.spec = ScaledSpec.of(
            BehaviorSpec(self.observations.specs, self.actions.spec),
            [*self.observations.scales, *self.actions.scales, SPACES + text],
        )

    def mask(self, obs: Any, info: Mapping[str, Any]) -> Any:
        """Return an agent's action mask, 1 = allowed, from its observation or `info`; or None."""
        if self.mask_key is None:
            return info.get("action_mask")
        try:
            return obs[self.mask_key]
        except (KeyError, TypeError, IndexError) as error:
            raise UnityObservationException(
                f"{self._where}: the observation has no part '{self.mask_key}', although its "
                "space has it; repair the environment."
            ) from error


def _mask_key(space: Any, n_choices: int, where: str) -> str | None:
    """Return the key of an observation's part that is the mask of the discrete actions, or None."""
    if not isinstance(space, spaces.Dict) or not n_choices:
        return None
    # Tianshou's key "mask" may mean something else, so the observation must have only one other
    # part, and the number of entries must fit.
    is_pair = len(space.spaces) == 2 and any(name in space.spaces for name in _OBSERVATION)
    key = "mask" if is_pair and "mask" in space.spaces else "action_mask"
    if key not in space.spaces:
        return None
    n_entries = _n_entries(space[key])
    if n_entries == n_choices:
        _log.info("%s: the observation's '%s' is the action mask, not an input.", where, key)
        return key
    if key == "mask":
        return None
    raise SettingsError(
        f"{where}: the observation's '{key}' has {n_entries} entries, but the discrete actions "
        f"have {n_choices} choices; give one entry for each choice, 1 where it is allowed, or "
        "another name to a part that is not a mask."
    )


def _n_entries(space: Any) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(_n_entries(part) for _, part in parts_of(space))
    return math.prod(space.shape or ())


class StepRows:
    """Collects observations, rewards and ids of at most `size` agents of a behavior, row by row."""

    def __init__(self, observations: Observations, size: int) -> None:
        self._observations = observations
        self._obs = observations.empty(size)
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, obs: Any, row: Row) -> None:
        """Add an agent; its observation is copied, because environments may reuse their arrays."""
        self._observations.put(self._obs, len(self._rows), obs)
        self._rows.append(row)

    def fields(self) -> dict[str, Any]:
        """Return the fields that decision and terminal steps have in common."""
        # Ids are converted to float64, too, which represents every int32 exactly.
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 4).T
        return {
            "obs": [values[: len(self._rows)] for values in self._obs],
            "reward": columns[0].astype(np.float32),
            "agent_id": columns[1].astype(np.int32),
            "group_id": columns[2].astype(np.int32),
            "group_reward": columns[3].astype(np.float32),
        }


class Batch:
    """Collects the step of at most `size` agents of one behavior."""

    def __init__(self, codec: Codec, size: int) -> None:
        self._codec, self._size = codec, size
        self._decisions = StepRows(codec.observations, size)
        self._terminals: StepRows | None = None
        self._interrupted: list[bool] = []
        self._forbidden: BoolArray | None = None

    def decide(self, obs: Any, info: Mapping[str, Any], row: Row) -> None:
        """Add an agent that asks for a decision."""
        mask, branches = self._codec.mask(obs, info), self._codec.actions.spec.discrete_branches
        if mask is not None and branches:
            # The array is made at the first mask. If an environment gives no masks it stays None,
            # and the policy skips masking.
            if self._forbidden is None:
                self._forbidden = np.zeros((self._size, sum(branches)), dtype=np.bool_)
            self._forbidden[len(self._decisions)] = self._codec.actions.forbidden(mask)
        self._decisions.add(obs, row)

    def end(self, obs: Any, interrupted: bool, row: Row) -> None:
        """Add an agent whose episode has ended."""
        self._interrupted.append(interrupted)
        if self._terminals is None:
            self._terminals = StepRows(self._codec.observations, self._size)
        self._terminals.add(obs, row)

    def decisions(self) -> DecisionSteps:
        """Return the collected agents that ask for a decision."""
        masks = None
        if self._forbidden is not None:
            masks = self._codec.actions.masks(self._forbidden[: len(self._decisions)])
        return DecisionSteps(**self._decisions.fields(), action_mask=masks)

    def steps(self) -> Steps:
        """Return the collected agents as decision and terminal steps."""
        if self._terminals is None:
            return self.decisions(), TerminalSteps.empty(self._codec.spec)
        interrupted = np.array(self._interrupted, dtype=np.bool_)
        terminals = TerminalSteps(**self._terminals.fields(), interrupted=interrupted)
        return self.decisions(), terminals


# Values of `mjtGeom` (https://mujoco.readthedocs.io/en/stable/APIreference/APItypes.html#mjtgeom).
_PLANE, _SPHERE, _CAPSULE, _CYLINDER, _BOX = 0, 2, 3, 5, 6
_CORNERS = np.array(np.meshgrid((-1, 1), (-1, 1), (-1, 1))).reshape(3, -1).T
# For each of a box's six faces, the indices of its four corners in `_CORNERS`.
_FACES = [np.flatnonzero(_CORNERS[:, k] == side) for k in range(3) for side in (-1, 1)]


def picture(env: Any, where: str) -> AnyArray:
    """Return a rendered picture of an environment, uint8 [height, width, 3].

    MuJoCo renders without a GPU if EGL or OSMesa is installed; else `side_view` draws the bodies.
    """
    inner = getattr(env, "unwrapped", env)
    if getattr(inner, "mujoco_renderer", None) is not None and not _has_off_screen_gl():
        return side_view(inner.model, inner.data)
    image = None
    # Gymnasium's and PettingZoo's `render` raises NotImplementedError if nothing is drawn.
    with contextlib.suppress(NotImplementedError):
        image = env.render()
    if not isinstance(image, np.ndarray) or image.ndim != 3 or image.shape[2] != 3:
        modes = getattr(env, "metadata", {}).get("render_modes", ())
        raise SettingsError(
            f"{where}: cannot be filmed: render() gives no picture [height, width, 3]. The "
            f"environment's render modes are {', '.join(map(str, modes)) or 'none'}; 'rgb_array' "
            "is needed."
        )
    # Images of floats from 0 to 1, or of truth values, would become black as bytes.
    if image.dtype.kind in "bf" and image.max(initial=0) <= 1:
        image = np.rint(image * np.float32(255))
    return image.astype(np.uint8)


@functools.cache
def _has_off_screen_gl() -> bool:
    """Return whether MuJoCo can render without a screen, and choose its graphics library if so."""
    requested = os.environ.get("MUJOCO_GL")
    for name in (requested,) if requested else ("egl", "osmesa"):
        try:
            # A context is created, because a library that can be imported may lack a driver.
            importlib.import_module(f"mujoco.{name}").GLContext(8, 8).free()
        except Exception:  # noqa: BLE001, S112  # a missing library may raise any error
            continue
        os.environ["MUJOCO_GL"] = name
        return True
    return False


def side_view(model: Any, data: Any) -> AnyArray:
    """Return a picture of MuJoCo's bodies from the side, or from above if they move in a plane."""
    from mujoco import MjData, mj_forward

    # The frame is computed from the first pose, so that the scale stays the same in an episode.
    begin = MjData(model)
    mj_forward(model, begin)
    # Body 0 is the world, which never moves.
    moving = model.geom_bodyid > 0
    start = begin.geom_xpos[moving]
    spread = start.max(axis=0) - start.min(axis=0) + 2 * model.geom_rbound[moving].max()
    # If all bodies are at the same height, such as in Reacher, they are drawn from above.
    axes = [0, 1] if np.ptp(start[:, 2]) < 0.1 * spread[:2].max() else [0, 2]
    half = 0.9 * float(spread.max())
    middle = (start.max(axis=0) + start.min(axis=0))[axes] / 2
    # The picture follows the first body along x, because runners would leave the frame.
    middle[0] += (data.xpos[1] - begin.xpos[1])[0]
    canvas = Canvas(middle - half, middle + half)
    # Bodies are drawn from back to front, so that near bodies cover far bodies.
    for geom in np.argsort(-data.geom_xpos[:, 1], kind="stable").tolist():
        _draw_geom(canvas, model, data, geom, axes)
    return canvas.pixels()


def _draw_geom(canvas: Canvas, model: Any, data: Any, geom: int, axes: list[int]) -> None:
    kind, size = int(model.geom_type[geom]), model.geom_size[geom]
    place, turn = data.geom_xpos[geom], data.geom_xmat[geom].reshape(3, 3)
    color = BLUE if model.geom_bodyid[geom] > 0 else GRAY
    # A plane is infinite: it is drawn as the ground of a side view, and not from above.
    if kind == _PLANE:
        if axes == [0, 2]:
            far = (1e3, 1e3)
            canvas.box((-far[0], place[2] - far[1]), (far[0], place[2]), FLOOR)
    elif kind in (_CAPSULE, _CYLINDER):
        # MuJoCo gives the radius and half of the length along the body's own z axis.
        along = turn[:, 2] * size[1]
        ends = np.stack((place - along, place + along))[:, axes]
        canvas.line(ends, 2 * size[0], color)
        for end in ends:
            canvas.disc(end, size[0], color)
            canvas.disc(end, 0.4 * size[0], AMBER)
    elif kind == _BOX:
        corners = (place + (_CORNERS * size) @ turn.T)[:, axes]
        for face in _FACES:
            # The order goes around the face; in the order of `_CORNERS` the edges would cross.
            canvas.polygon(corners[face[[0, 1, 3, 2]]], color)
    # All other kinds, such as meshes, are drawn as their bounding sphere.
    else:
        radius = size[0] if kind == _SPHERE else model.geom_rbound[geom]
        canvas.disc(place[axes], float(radius), color)
