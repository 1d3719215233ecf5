"""An executable with any number of agents as a PettingZoo environment, parallel or turn by turn."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec_wrapper

from pipeline.envs.base import BaseEnv
from pipeline.envs.gym_wrapper import MAX_EMPTY_STEPS, action_space_of, maker
from pipeline.errors import UnityException
from pipeline.protocol.specs import ActionTuple, BehaviorSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

_AGENT = "?agent_id="
_GONE_AFTER = 1000
"""Steps without a message about an agent after which it counts as gone."""
_FEW = 256
"""Up to this many agents, agents that are gone are not looked for."""


class UnityPettingZooException(UnityException):
    """The wrapper is used in the wrong order, or with an action that does not exist."""


class _StepResult(NamedTuple):
    """The results of one step, by agent."""

    obs: dict[str, Any]
    rewards: dict[str, float]
    infos: dict[str, dict[str, Any]]


class UnityParallelEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo is not typed
    """All agents act at once; they are called `<behavior>?agent_id=<id>`.

    An agent leaves `agents` with its terminal step and does not come back before `reset`, also when
    the environment begins a new episode for it at once. An agent that asks for no decision in a
    step keeps its observation, and `infos[agent]["asked"]` is False: its next action has no effect.
    Agents that appear later are added to `agents`.

    `possible_agents` are those seen since the last reset. Where agents come and go without end,
    agents that sent nothing for 1,000 steps are forgotten now and then, and truncated first if they
    had not ended.

    One observation is an array, several are a dict by the sensors' names. With discrete actions it
    all stands in `{"observation": ..., "action_mask": ...}`, the mask as int8 with 1 = allowed,
    which `action_space(agent).sample` takes.

    Args:
        env: an environment; or the path of an executable, or a function from a seed to an
            environment. With the latter two `reset(seed=...)` starts the environment anew with that
            seed; an environment that runs already keeps its own.
        seed: of the environment (path or function), and of the action spaces.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "unity_v1", "render_modes": []}
    render_mode = None

    def __init__(
        self, env: BaseEnv | str | Path | Callable[[int], BaseEnv], seed: int | None = None
    ) -> None:
        self._make = maker(env)
        self._seed = seed
        self._env: Any = None if self._make is not None else env
        self._specs: dict[str, BehaviorSpec] = {}
        self._spaces: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {}
        self._n_spaces = 0
        self._last_active: dict[str, int] = {}
        # PettingZoo's users ask for `possible_agents` before their first reset.
        try:
            self.reset(seed=seed)
        except BaseException:
            self.close()
            raise
        self.agents: list[str] = []
        # The reset above is our own: a `step` before the caller's is refused.
        self._is_reset = False

    @property
    def observation_spaces(self) -> dict[str, spaces.Space[Any]]:
        """What each of `possible_agents` sees."""
        return {agent: self.observation_space(agent) for agent in self.possible_agents}

    @property
    def action_spaces(self) -> dict[str, spaces.Space[Any]]:
        """What each of `possible_agents` may do."""
        return {agent: self.action_space(agent) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return what `agent` sees."""
        return self._spaces_of(agent)[0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return what `agent` may do; the same object at each call."""
        return self._spaces_of(agent)[1]

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002  # PettingZoo's form
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin new episodes, with a seed as of the class: observations and infos by agent.

        Raises:
            UnityPettingZooException: No agent asks for a decision.
        """
        if self._make is not None and (self._env is None or seed is not None):
            if self._env is not None:
                self._env.close()
            self._env = self._make(0 if seed is None else seed)
        self._env.reset()
        self._begin()
        result = _StepResult({}, {}, {})
        for _ in range(MAX_EMPTY_STEPS):
            for behavior in self._env.behavior_specs:
                self._take(behavior, self._env.get_steps(behavior)[0], result)
            if result.obs:
                return result.obs, result.infos
            self._env.step()
        raise UnityPettingZooException(f"No agent asked for a decision in {MAX_EMPTY_STEPS} steps.")

    def _begin(self) -> None:
        """Forget all agents; keep spaces for those that come back, if there are not too many."""
        if len(self._spaces) > 2 * len(self._last_active) + _FEW:
            self._spaces = {
                agent: self._spaces[agent] for agent in self._spaces.keys() & self._last_active
            }
        old, self._specs = self._specs, dict(self._env.behavior_specs)
        if any(self._specs.get(name, spec) != spec for name, spec in old.items()):
            self._spaces.clear()
        self.agents = []
        self.possible_agents: list[str] = []
        self._last: dict[str, Any] = {}
        self._left: set[str] = set()
        self._last_active = {}
        self._n_steps, self._sweep_at = 0, _FEW
        self._is_reset = True

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Act once: observations, rewards, terminations, truncations and infos by agent.

        Agents without an action do nothing.

        Raises:
            UnityPettingZooException: There was no reset, or an action is of an unknown agent or
                outside of its space.
        """
        if self._env is None or not self._is_reset:
            raise UnityPettingZooException(
                "You must reset the environment before you can perform a step"
            )
        self._act(actions)
        self._env.step()
        self._n_steps += 1
        alive = list(self.agents)
        # PettingZoo wants every live agent in every dictionary, also those that did not ask.
        result = _StepResult({}, dict.fromkeys(alive, 0.0), {})
        terminations = dict.fromkeys(alive, False)
        truncations = dict.fromkeys(alive, False)
        for behavior in self._env.behavior_specs:
            decision, terminal = self._env.get_steps(behavior)
            for row, agent in enumerate(self._names(behavior, terminal)):
                if agent not in terminations:
                    continue  # it has no decision since the reset, or has ended already
                interrupted = bool(terminal.interrupted[row])
                terminations[agent], truncations[agent] = not interrupted, interrupted
                self._note(agent, behavior, terminal, row, result)
                self._leave(agent)
            self._take(behavior, decision, result)
        for agent in self.agents:
            terminations.setdefault(agent, False)
            truncations.setdefault(agent, False)
        for agent in alive:
            if agent not in result.obs:
                result.obs[agent], result.infos[agent] = self._last[agent], {"asked": False}
        if len(self._last_active) > self._sweep_at:
            for agent in self._vanished():
                truncations[agent] = True
        return result.obs, result.rewards, terminations, truncations, result.infos

    def render(self) -> None:
        """Nothing: rendering is the environment's own."""

    def close(self) -> None:
        """Close the environment; a second time does nothing."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _take(self, behavior: str, decision: DecisionSteps, result: _StepResult) -> None:
        """Add the agents that ask for a decision, except for those whose episode has ended."""
        for row, agent in enumerate(self._names(behavior, decision)):
            if agent not in self._last_active:
                # Sorted: PettingZoo's order of turns follows the list, and messages come in any
                # order.
                insort(self.agents, agent)
                insort(self.possible_agents, agent)
            self._last_active[agent] = self._n_steps
            if agent not in self._left:
                self._note(agent, behavior, decision, row, result)
                self._last[agent] = result.obs[agent]

    def _leave(self, agent: str) -> None:
        self.agents.remove(agent)
        self._left.add(agent)
        self._last_active[agent] = self._n_steps
        del self._last[agent]

    def _vanished(self) -> list[str]:
        """Remove agents that sent nothing for long, and return those that had not ended."""
        before = self._n_steps - _GONE_AFTER
        gone = [agent for agent, step in self._last_active.items() if step < before]
        vanished = [agent for agent in gone if agent not in self._left]
        for agent in gone:
            if agent in self._left:
                self._left.remove(agent)
                del self._last_active[agent]
                self._spaces.pop(agent, None)
        for agent in vanished:
            self._leave(agent)
        self.possible_agents = sorted(self._last_active)
        # Looked for again when their number has doubled, so that this costs little on average.
        self._sweep_at = 2 * len(self._last_active) + _FEW
        return vanished

    def _note(
        self,
        agent: str,
        behavior: str,
        steps: DecisionSteps | TerminalSteps,
        row: int,
        result: _StepResult,
    ) -> None:
        result.obs[agent] = self._observation(behavior, steps, row)
        result.rewards[agent] = float(steps.reward[row] + steps.group_reward[row])
        result.infos[agent] = {
            "behavior_name": behavior,
            "group_id": int(steps.group_id[row]),
            "group_reward": float(steps.group_reward[row]),
            "asked": True,
        }

    def _observation(self, behavior: str, steps: DecisionSteps | TerminalSteps, row: int) -> Any:
        # Copies, since the batch of the next step may use the same memory.
        parts = [values[row].copy() for values in steps.obs]
        names = _observation_names(self._specs[behavior])
        obs = parts[0] if len(parts) == 1 else dict(zip(names, parts, strict=True))
        branches = self._specs[behavior].action_spec.discrete_branches
        if not branches:
            return obs
        masks = getattr(steps, "action_mask", None)
        allowed = (
            [np.ones(size, np.int8) for size in branches]
            if masks is None
            else [(~mask[row]).astype(np.int8) for mask in masks]
        )
        return {
            "observation": obs,
            "action_mask": allowed[0] if len(allowed) == 1 else tuple(allowed),
        }

    def _names(self, behavior: str, steps: DecisionSteps | TerminalSteps) -> list[str]:
        if behavior not in self._specs:
            self._specs[behavior] = self._env.behavior_specs[behavior]
        return [f"{behavior}{_AGENT}{agent_id}" for agent_id in steps.agent_id.tolist()]

    def _act(self, actions: Mapping[str, Any]) -> None:
        if unknown := actions.keys() - self._last_active.keys():
            raise self._unknown(min(map(str, unknown)))
        for behavior in self._env.behavior_specs:
            decision, _ = self._env.get_steps(behavior)
            if not len(decision):
                continue
            spec = self._specs[behavior].action_spec
            batch = spec.empty_action(len(decision))
            continuous, discrete = batch.continuous, batch.discrete
            for row, agent in enumerate(self._names(behavior, decision)):
                action = actions.get(agent)
                # Its episode is over until `reset`, though the environment has begun another.
                if action is None or agent in self._left:
                    continue
                if not self.action_space(agent).contains(action):
                    raise UnityPettingZooException(
                        f"Invalid action, got {action} for {agent}; it must lie in "
                        f"{self.action_space(agent)}"
                    )
                parts = action if spec.continuous_size and spec.discrete_size else (action, action)
                if spec.continuous_size:
                    continuous[row] = parts[0]
                if spec.discrete_size:
                    discrete[row] = parts[1]
            self._env.set_actions(behavior, ActionTuple(continuous, discrete))

    def _unknown(self, agent: str) -> UnityPettingZooException:
        shown = ", ".join(self.possible_agents[:3])
        return UnityPettingZooException(
            f"The environment has had no agent '{agent}' since its last reset; there are "
            f"{len(self.possible_agents)} in `possible_agents`, such as {shown}"
        )

    def _spaces_of(self, agent: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        if agent not in self._spaces:
            spec = self._specs.get(agent.rpartition(_AGENT)[0])
            if spec is None:
                raise self._unknown(agent)
            parts = [
                spaces.Box(-np.inf, np.inf, tuple(obs_spec.shape), np.float32)
                for obs_spec in spec.observation_specs
            ]
            obs_space: spaces.Space[Any] = parts[0]
            if len(parts) > 1:
                obs_space = spaces.Dict(dict(zip(_observation_names(spec), parts, strict=True)))
            branches = spec.action_spec.discrete_branches
            if branches:
                masks = [spaces.Box(0, 1, (size,), np.int8) for size in branches]
                mask = masks[0] if len(masks) == 1 else spaces.Tuple(masks)
                obs_space = spaces.Dict({"observation": obs_space, "action_mask": mask})
            actions = action_space_of(spec.action_spec)
            if self._seed is not None:
                # A seed for each, or all agents would draw the same actions.
                actions.seed(self._seed + self._n_spaces)
            self._n_spaces += 1
            self._spaces[agent] = (obs_space, actions)
        return self._spaces[agent]


class UnityAECEnv(parallel_to_aec_wrapper):  # type: ignore[misc]  # pettingzoo is not typed
    """The same, turn by turn: the environment steps when the last agent has acted.

    Takes what `UnityParallelEnv` takes.
    """

    def __init__(
        self, env: BaseEnv | str | Path | Callable[[int], BaseEnv], seed: int | None = None
    ) -> None:
        super().__init__(UnityParallelEnv(env, seed))

    # A property without a setter, or the wrapper would keep the list from its construction.
    @property
    def possible_agents(self) -> list[str]:
        """Agents seen since the last reset; see `UnityParallelEnv`."""
        return list(self.env.possible_agents)

    @property
    def observation_spaces(self) -> dict[str, spaces.Space[Any]]:
        """What each of `possible_agents` sees."""
        return dict(self.env.observation_spaces)

    @property
    def action_spaces(self) -> dict[str, spaces.Space[Any]]:
        """What each of `possible_agents` may do."""
        return dict(self.env.action_spaces)


def _observation_names(spec: BehaviorSpec) -> list[str]:
    """Return the sensors' names, or their numbers where a name is missing or stands twice."""
    names = [obs_spec.name for obs_spec in spec.observation_specs]
    return [
        name if name and names.count(name) == 1 else f"obs_{index}"
        for index, name in enumerate(names)
    ]
