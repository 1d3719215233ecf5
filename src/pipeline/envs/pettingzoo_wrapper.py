"""Wrappers that make an environment a PettingZoo environment, parallel or in turns."""

from bisect import insort
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec_wrapper

from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.envs.base import BaseEnv
from pipeline.envs.gym_wrapper import MAX_EMPTY_STEPS, action_space_of, maker, one_or_all
from pipeline.errors import UnityException

_AGENT = "?agent_id="
# Number of steps without a message about an agent after which the agent counts as gone.
_GONE_AFTER = 1000
# With fewer agents, the wrapper does not look for agents that are gone.
_MIN_AGENTS_TO_SWEEP = 256


class UnityPettingZooException(UnityException):
    """A call comes too early, no agent asks for a decision, or an agent or action is wrong."""


class _StepResult(NamedTuple):
    """The results of one step, by agent, as `ParallelEnv.step` returns them."""

    obs: dict[str, Any]
    rewards: dict[str, float]
    terminations: dict[str, bool]
    truncations: dict[str, bool]
    infos: dict[str, dict[str, Any]]


class UnityParallelEnv(ParallelEnv):  # type: ignore[misc]  # pettingzoo is not typed
    """An environment with any number of agents, which act at the same time, as a `ParallelEnv`.

    Agents are named `<behavior>?agent_id=<id>`. An agent leaves `agents` with its terminal step and
    does not come back before `reset`, even if the environment begins a new episode for it at once.
    An agent that asks for no decision in a step keeps its observation, and `infos[agent]["asked"]`
    is False: its next action has no effect. Agents that appear later are added to `agents`.

    `possible_agents` are all agents that have appeared since the last reset. If there are more than
    256, agents that sent nothing for 1,000 steps are removed from time to time, and are truncated
    if they had not ended.

    One observation is an array; several are a dict by the sensors' names. With discrete actions, an
    observation is `{"observation": ..., "action_mask": ...}`, with an int8 mask, 1 = allowed, for
    `action_space(agent).sample`.

    Args:
        env: an environment; or the path of an executable; or a function that takes a seed and
            returns an environment. With a path or a function, `reset(seed=...)` starts a new
            environment with that seed; an environment that runs already keeps its seed.
        seed: seed of the environment (path or function), and of the action spaces.
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
        # The environment is reset now, because users of PettingZoo read `possible_agents` before
        # their first reset.
        try:
            self.reset(seed=seed)
        except BaseException:
            self.close()
            raise
        self.agents: list[str] = []
        # The reset above does not count: `step` is refused before the user's first reset.
        self._is_reset = False

    @property
    def observation_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Observation space of each of `possible_agents`."""
        return {agent: self.observation_space(agent) for agent in self.possible_agents}

    @property
    def action_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Action space of each of `possible_agents`."""
        return {agent: self.action_space(agent) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the observation space of `agent`."""
        return self._spaces_of(agent)[0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the action space of `agent`, the same object at each call."""
        return self._spaces_of(agent)[1]

    def reset(
        self,
        seed: int | None = None,
        options: dict[str, Any] | None = None,  # noqa: ARG002  # PettingZoo's signature
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begin new episodes; return observations and infos by agent; see the class for `seed`.

        Raises:
            UnityPettingZooException: No agent asks for a decision.
        """
        if self._make is not None and (self._env is None or seed is not None):
            if self._env is not None:
                self._env.close()
            self._env = self._make(0 if seed is None else seed)
        self._env.reset()
        self._begin()
        result = _StepResult({}, {}, {}, {}, {})
        for _ in range(MAX_EMPTY_STEPS):
            for behavior in self._env.behavior_specs:
                self._add_decisions(behavior, self._env.get_steps(behavior)[0], result)
            if result.obs:
                return result.obs, result.infos
            self._env.step()
        raise UnityPettingZooException(
            f"No agent asked for a decision in {MAX_EMPTY_STEPS} steps. In Unity, give each agent "
            "a Decision Requester."
        )

    def _begin(self) -> None:
        """Forget all agents, but keep spaces, because agents often come back with the same id."""
        if len(self._spaces) > 2 * len(self._last_active) + _MIN_AGENTS_TO_SWEEP:
            self._spaces = {
                agent: self._spaces[agent] for agent in self._spaces.keys() & self._last_active
            }
        old, self._specs = self._specs, dict(self._env.behavior_specs)
        # A new process may announce a behavior with other sizes; then all spaces are made again.
        if any(self._specs.get(name, spec) != spec for name, spec in old.items()):
            self._spaces.clear()
        self.agents = []
        self.possible_agents: list[str] = []
        self._last: dict[str, Any] = {}
        self._left: set[str] = set()
        self._last_active = {}
        self._n_steps, self._sweep_at = 0, _MIN_AGENTS_TO_SWEEP
        self._is_reset = True

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Apply actions; return observations, rewards, terminations, truncations and infos.

        All are dicts by agent. Agents without an action get zeros.

        Raises:
            UnityPettingZooException: There was no reset, an agent is unknown, or an action is
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
        # PettingZoo requires every live agent in every dict, even if it asked for no decision.
        ends = dict.fromkeys(alive, False)
        result = _StepResult({}, dict.fromkeys(alive, 0.0), ends, ends.copy(), {})
        for behavior in self._env.behavior_specs:
            decision, terminal = self._env.get_steps(behavior)
            for row, agent in enumerate(self._names(behavior, terminal)):
                if agent not in ends:
                    continue  # the agent has asked for no decision since the reset, or has ended
                self._add_result(agent, behavior, terminal, row, result)
                result.truncations[agent] = bool(terminal.interrupted[row])
                ends[agent] = not result.truncations[agent]
                self._leave(agent)
            self._add_decisions(behavior, decision, result)
        # Agents that asked for no decision keep their last observation, which PettingZoo requires.
        for agent in alive:
            if agent not in result.obs:
                result.obs[agent], result.infos[agent] = self._last[agent], {"asked": False}
        if len(self._last_active) > self._sweep_at:
            result.truncations.update(dict.fromkeys(self._vanished(), True))
        return result

    def render(self) -> None:
        """Do nothing: environments in other processes draw their own windows."""

    def close(self) -> None:
        """Close the environment; a second call does nothing."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _add_decisions(self, behavior: str, decision: DecisionSteps, result: _StepResult) -> None:
        """Add to `result` the agents that ask for a decision and have not ended."""
        for row, agent in enumerate(self._names(behavior, decision)):
            if agent not in self._last_active:
                # The lists stay sorted, because PettingZoo's turns follow them, and an environment
                # may send its agents in any order.
                insort(self.agents, agent)
                insort(self.possible_agents, agent)
            self._last_active[agent] = self._n_steps
            if agent not in self._left:
                self._add_result(agent, behavior, decision, row, result)
                self._last[agent] = result.obs[agent]

    def _leave(self, agent: str) -> None:
        self.agents.remove(agent)
        self._left.add(agent)
        self._last_active[agent] = self._n_steps
        del self._last[agent]

    def _vanished(self) -> list[str]:
        """Remove agents that sent nothing for 1,000 steps; return the agents with open episodes."""
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
        # The next sweep comes when the number of agents has doubled, so the average cost is small.
        self._sweep_at = 2 * len(self._last_active) + _MIN_AGENTS_TO_SWEEP
        return vanished

    def _add_result(
        self,
        agent: str,
        behavior: str,
        steps: DecisionSteps | TerminalSteps,
        row: int,
        result: _StepResult,
    ) -> None:
        result.obs[agent] = self._observation(behavior, steps, row)
        result.terminations.setdefault(agent, False)
        result.truncations.setdefault(agent, False)
        result.rewards[agent] = float(steps.reward[row] + steps.group_reward[row])
        result.infos[agent] = {
            "behavior_name": behavior,
            "group_id": int(steps.group_id[row]),
            "group_reward": float(steps.group_reward[row]),
            "asked": True,
        }

    def _observation(self, behavior: str, steps: DecisionSteps | TerminalSteps, row: int) -> Any:
        # The values are copied, because the next step may reuse the memory of the batch.
        parts = [values[row].copy() for values in steps.obs]
        names = _observation_names(self._specs[behavior])
        obs = parts[0] if len(parts) == 1 else dict(zip(names, parts, strict=True))
        branches = self._specs[behavior].action_spec.discrete_branches
        if not branches:
            return obs
        masks = getattr(steps, "action_mask", None)
        if masks is None:
            allowed = [np.ones(size, np.int8) for size in branches]
        else:
            allowed = [(~mask[row]).astype(np.int8) for mask in masks]
        return {"observation": obs, "action_mask": one_or_all(allowed)}

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
                # An agent in `_left` gets no action: its episode is over until `reset`, even if the
                # environment has begun another.
                if action is None or agent in self._left:
                    continue
                # The action is checked here, because an environment in another process cannot
                # report that an action is wrong.
                if not self.action_space(agent).contains(action):
                    raise UnityPettingZooException(
                        f"Invalid action, got {action} for {agent}; the action must be in "
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
            f"The environment has had no agent '{agent}' since its last reset; `possible_agents` "
            f"has {len(self.possible_agents)} agents, such as {shown}"
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
                masks = one_or_all([spaces.Box(0, 1, (size,), np.int8) for size in branches])
                mask = spaces.Tuple(masks) if isinstance(masks, tuple) else masks
                obs_space = spaces.Dict({"observation": obs_space, "action_mask": mask})
            actions = action_space_of(spec.action_spec)
            if self._seed is not None:
                # Each agent gets another seed, so that agents do not draw the same actions.
                actions.seed(self._seed + self._n_spaces)
            self._n_spaces += 1
            self._spaces[agent] = (obs_space, actions)
        return self._spaces[agent]


class UnityAECEnv(parallel_to_aec_wrapper):  # type: ignore[misc]  # pettingzoo is not typed
    """`UnityParallelEnv`, with its arguments, as an `AECEnv`: agents act in turns.

    The environment steps when the last agent has acted.
    """

    def __init__(
        self, env: BaseEnv | str | Path | Callable[[int], BaseEnv], seed: int | None = None
    ) -> None:
        super().__init__(UnityParallelEnv(env, seed))

    # The property has no setter: with a setter, the constructor of the base class would replace the
    # property by the agents of the first reset.
    @property
    def possible_agents(self) -> list[str]:
        """Agents that have appeared since the last reset; see `UnityParallelEnv`."""
        return list(self.env.possible_agents)

    @property
    def observation_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Observation space of each of `possible_agents`."""
        return dict(self.env.observation_spaces)

    @property
    def action_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Action space of each of `possible_agents`."""
        return dict(self.env.action_spaces)


def _observation_names(spec: BehaviorSpec) -> list[str]:
    """Return the sensors' names, or `obs_` and the index for missing and repeated names."""
    names = [obs_spec.name for obs_spec in spec.observation_specs]
    return [
        name if name and names.count(name) == 1 else f"obs_{index}"
        for index, name in enumerate(names)
    ]
