"""Wrappers that make an environment with one agent a Gymnasium environment for users' code."""

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from pipeline.core.arrays import AnyArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, Steps, TerminalSteps
from pipeline.envs.base import BaseEnv
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import UnityException

_log = logging.getLogger(__name__)

# Number of consecutive messages without agents after which the wrapper raises an error.
MAX_EMPTY_STEPS = 10_000


class UnityGymException(UnityException):
    """The environment does not have exactly one agent, or a method is called too early."""


class UnityToGymWrapper(gymnasium.Env[Any, Any]):
    """One agent of one behavior with Gymnasium's interface.

    A terminal step of the environment sets `terminated`, or `truncated` if it was interrupted. If
    the environment masks actions, `info["action_mask"]` has the mask as int8, 1 = allowed, in the
    form that `action_space.sample` takes. `last_step` is the DecisionSteps or TerminalSteps from
    which the last observation was made.

    Args:
        unity_env: an environment; or the path of an executable; or a function that takes a seed and
            returns an environment. With a path or a function, `reset(seed=...)` starts a new
            environment with that seed; an environment that runs already keeps its seed.
        uint8_visual: return images as uint8 from 0 to 255 instead of float32 from 0 to 1.
        flatten_branched: use one Discrete that numbers all combinations of the branches' choices;
            the choice of the last branch changes fastest.
        allow_multiple_obs: return a tuple of all images and one vector that joins all vector
            observations; else only the first image, or the vector if there is no image.
        action_space_seed: seed of `action_space.sample`.

    Raises:
        UnityGymException: There is not exactly one behavior with one agent, or no observation.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # as in Gymnasium
    reward_range = (-float("inf"), float("inf"))

    def __init__(
        self,
        unity_env: Any,
        uint8_visual: bool = False,
        flatten_branched: bool = False,
        allow_multiple_obs: bool = False,
        action_space_seed: int | None = None,
    ) -> None:
        self.render_mode = None
        self._uint8 = uint8_visual
        self._multiple = allow_multiple_obs
        self._make = maker(unity_env, "--num-agents", "1")
        self._env: Any = unity_env if self._make is None else self._make(0)
        self.last_step: DecisionSteps | TerminalSteps | None = None
        self._begun: Steps | None = None
        self._image: AnyArray | None = None
        self._over = True
        try:
            self._env.reset()
            self.name, self.spec_of_behavior = self._only_behavior()
            # The first call of `reset` returns these steps, and does not reset the environment a
            # second time.
            self._begun = self._wait()
            _check_one(len(self._begun[0]) + len(self._begun[1]))
            self.observation_space = self._observation_space()
            actions = self.spec_of_behavior.action_spec
            self._flat: AnyArray | None = None
            if flatten_branched:
                # The rows of `_flat` [product of sizes, branches] are all combinations of choices;
                # the choice of the last branch changes fastest.
                choices = itertools.product(*map(range, actions.discrete_branches))
                self._flat = np.array(list(choices), dtype=np.int32)
            self.action_space = action_space_of(actions, self._flat)
        # Nobody can call `close` after the constructor has raised, so the environment is closed
        # here.
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self.action_space.seed(action_space_seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode, and return its observation and info; see the class for `seed`."""
        super().reset(seed=seed, options=options)
        if seed is not None and self._make is not None:
            # An executable reads its seed only when it starts.
            self._env.close()
            self._env = self._make(seed)
            self._begun = None
        elif seed is not None:
            _log.warning(
                "The environment was started with its own seed, which reset(seed=%d) cannot change;"
                " give the wrapper the executable's path instead.",
                seed,
            )
        if self._begun is None:
            self._env.reset()
            self._begun = self._wait()
        decision, terminal = self._begun
        self._begun = None
        _check_one(len(decision) + len(terminal))
        self._over = False
        return self._observation(decision), self._info(decision)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Apply an action; return observation, reward, terminated, truncated and info.

        Raises:
            UnityGymException: The episode has ended, or other agents have appeared.
        """
        if self._over:
            raise UnityGymException(
                "The episode has ended (or has not begun): call reset() before step()."
            )
        self._env.set_actions(self.name, self._action(action))
        self._env.step()
        decision, terminal = self._wait()
        # A terminal step may come with the first decision of the next episode. This decision is
        # dropped, because `reset` begins another episode.
        _check_one(len(terminal) or len(decision))
        if len(terminal):
            self._over = True
            interrupted = bool(terminal.interrupted[0])
            # Gymnasium has one reward, so the group's reward is added.
            reward = float(terminal.reward[0] + terminal.group_reward[0])
            self.last_step = terminal
            return self._observation(terminal), reward, not interrupted, interrupted, {}
        reward = float(decision.reward[0] + decision.group_reward[0])
        return self._observation(decision), reward, False, False, self._info(decision)

    def render(self) -> Any:
        """Return the first image of the last observation, uint8 [height, width, 3], or None."""
        if self._image is None:
            return None
        # The axes are changed from [C, H, W], as in ML-Agents, to [H, W, C], as in Gymnasium.
        image = np.moveaxis(_bytes_of(self._image), 0, -1)
        return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image[:, :, :3]

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def __exit__(self, *error: Any) -> Literal[False]:
        env, self._env = self._env, None
        if isinstance(env, BaseEnv):  # `__exit__` does not wait for the environment after an error
            env.__exit__(*error)
        elif env is not None:
            env.close()
        return False

    def _only_behavior(self) -> tuple[str, BehaviorSpec]:
        specs = self._env.behavior_specs
        if len(specs) != 1:
            raise UnityGymException(
                "There can only be one behavior in a UnityEnvironment if it is wrapped in a gym; "
                f"the environment has {len(specs)}: {', '.join(specs) or 'none yet'}."
            )
        (name,) = specs
        return str(name), specs[name]

    def _wait(self) -> Steps:
        """Step the environment until its steps have an agent, and return these steps."""
        for _ in range(MAX_EMPTY_STEPS):
            steps: Steps = self._env.get_steps(self.name)
            if len(steps[0]) or len(steps[1]):
                return steps
            self._env.step()
        raise UnityGymException(
            f"{self.name}: no agent asked for a decision in {MAX_EMPTY_STEPS} steps. In Unity, "
            "give the agent a Decision Requester."
        )

    def _observation_space(self) -> spaces.Space[Any]:
        specs = self.spec_of_behavior.observation_specs
        self._images = [i for i, spec in enumerate(specs) if len(spec.shape) == 3]
        self._vectors = [i for i, spec in enumerate(specs) if len(spec.shape) == 1]
        if not self._images and not self._vectors:
            raise UnityGymException("There are no observations provided by the environment.")
        if not self._multiple and len(self._images) + len(self._vectors) > 1:
            _log.warning(
                "The environment has several observations, but only %s is returned; pass "
                "allow_multiple_obs=True for all observations.",
                "the first image" if self._images else "the vector of all numbers",
            )
        size = sum(specs[i].shape[0] for i in self._vectors)
        vector = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        top, dtype = (255, np.uint8) if self._uint8 else (1.0, np.float32)
        images = [spaces.Box(0, top, specs[i].shape, dtype) for i in self._images]
        parts = [*images, vector] if self._vectors else images
        return spaces.Tuple(parts) if self._multiple else parts[0]

    def _observation(self, steps: DecisionSteps | TerminalSteps) -> Any:
        images = [steps.obs[i][0] for i in self._images]
        if images:
            self._image = images[0]
        parts = [_bytes_of(image) for image in images] if self._uint8 else images
        if vectors := [steps.obs[i][0] for i in self._vectors]:
            parts.append(np.concatenate(vectors))
        return tuple(parts) if self._multiple else parts[0]

    def _info(self, decision: DecisionSteps) -> dict[str, Any]:
        self.last_step = decision
        info: dict[str, Any] = {}
        if decision.action_mask is not None:
            # In ML-Agents' masks True means forbidden, in Gymnasium's masks 1 means allowed.
            allowed = [(~mask[0]).astype(np.int8) for mask in decision.action_mask]
            if self._flat is not None:
                pairs = zip(allowed, self._flat.T, strict=True)
                # A combination is allowed if each of its choices is allowed.
                allowed = [np.min([mask[column] for mask, column in pairs], axis=0)]
            info["action_mask"] = one_or_all(allowed)
        return info

    def _action(self, action: Any) -> ActionTuple:
        actions = self.spec_of_behavior.action_spec
        continuous: Any = np.zeros((1, 0), np.float32)
        discrete: Any = np.zeros((1, 0), np.int32)
        parts = action if isinstance(self.action_space, spaces.Tuple) else (action, action)
        if actions.continuous_size:
            continuous = np.asarray(parts[0], np.float32).reshape(1, -1)
        if actions.discrete_size:
            chosen = np.asarray(parts[1], np.int32)
            if self._flat is not None:
                chosen = self._flat[int(chosen)]
            discrete = chosen.reshape(1, -1)
        return ActionTuple(continuous, discrete)


class UnityToOldGymWrapper(UnityToGymWrapper):
    """`UnityToGymWrapper` with the interface of Gym before 0.26, as in `gym_unity`.

    `reset()` returns the observation only; `step()` returns observation, reward, done and info, and
    `info["step"]` is the DecisionSteps or TerminalSteps.
    """

    def seed(self, seed: Any = None) -> None:
        """Log a warning that says how to set a seed: `seed` has no effect, as in ML-Agents."""
        _log.warning(
            "seed(%s) has no effect: give the wrapper the executable's path, and pass the seed to "
            "reset().",
            seed,
        )

    def reset(self, **options: Any) -> Any:
        """Begin a new episode, and return its first observation."""
        return super().reset(**options)[0]

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:  # type: ignore[override]  # the old form
        """Apply an action; return observation, reward, done and info."""
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info | {"step": self.last_step}


def maker(source: Any, *args: str) -> Callable[[int], BaseEnv] | None:
    """Return a function that starts an environment with a seed; None for a running environment.

    `source` is the path of an executable, which gets `args`, such a function, or an environment.
    """
    if isinstance(source, str | Path):
        return lambda seed: UnityEnvironment(
            source, seed=seed, no_graphics=True, additional_args=list(args)
        )
    return None if hasattr(source, "behavior_specs") else source


def one_or_all(parts: list[Any]) -> Any:
    """Return the only part, or a tuple of several."""
    return parts[0] if len(parts) == 1 else tuple(parts)


def _bytes_of(image: AnyArray) -> AnyArray:
    # The values are rounded, because truncation would darken an image by half a step on average.
    return np.asarray(np.rint(np.clip(image, 0.0, 1.0) * 255), dtype=np.uint8)


class HybridSpace(spaces.Tuple):  # type: ignore[type-arg]  # generic only in some versions
    """Space of continuous and discrete actions; `sample` also takes a mask of the discrete part."""

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Any, ...]:
        """Draw an action; `mask` is a mask of the discrete actions, or a pair (None, mask)."""
        if mask is not None and not (isinstance(mask, tuple) and mask[0] is None):
            mask = (None, mask)
        return super().sample(mask, probability)


def action_space_of(actions: ActionSpec, flat: AnyArray | None = None) -> spaces.Space[Any]:
    """Return the Gymnasium space of one agent's actions.

    `flat` [product of sizes, branches] lists all combinations of choices: with `flat`, an action is
    the number of a combination.
    """
    continuous = spaces.Box(-1.0, 1.0, (actions.continuous_size,), np.float32)
    branches = actions.discrete_branches
    discrete: spaces.Space[Any]
    if flat is not None and branches:
        discrete = spaces.Discrete(len(flat))
    # A single branch is a Discrete, as in ML-Agents' wrapper.
    elif len(branches) == 1:
        discrete = spaces.Discrete(branches[0])
    else:
        # Without branches this space is not returned, so its size has no meaning.
        discrete = spaces.MultiDiscrete(list(branches) or [1])
    if actions.continuous_size and branches:
        return HybridSpace([continuous, discrete])
    return discrete if branches else continuous


def _check_one(n_agents: int) -> None:
    if n_agents != 1:
        raise UnityGymException(
            f"There can only be one Agent in the environment but {n_agents} were detected. For a "
            "built-in simulator pass additional_args=['--num-agents', '1']; otherwise use the "
            "PettingZoo wrappers."
        )
