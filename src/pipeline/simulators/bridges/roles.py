"""What each agent of a PettingZoo environment is to a trainer, and what the agents observe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from pipeline.errors import SettingsError
from pipeline.protocol.specs import BehaviorSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.spaces import Actions, Observations

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.arrays import BoolArray
    from pipeline.protocol.steps import Steps

GROUPS = ("none", "all", "behavior")
"""Who shares a group and its reward: nobody, all agents of a copy, those of the same behavior."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What an agent is to a trainer."""

    behavior: str
    spec: BehaviorSpec
    observations: Observations
    actions: Actions
    masked: bool
    """Whether the observation is a map of `observation` and `action_mask`."""


def check_groups(env_id: str, groups: str, kind: str) -> None:
    """Refuse groups that there are not, and groups of agents that act in turns.

    Raises:
        SettingsError: It is one of these; `kind` is the interface, `parallel` or `aec`.
    """
    if groups not in GROUPS:
        raise SettingsError(f"{env_id}: groups is '{groups}'; choose one of {', '.join(GROUPS)}.")
    if groups != "none" and kind != "parallel":
        raise SettingsError(
            f"{env_id}: groups is '{groups}', but its agents act in turns, so that there is no "
            "common step to share a reward of; leave groups out."
        )


def roles_of(
    env: Any,
    agents: Sequence[str],
    env_id: str,
    teams: str | Mapping[str, Any],
    visual: str,
    action_scale: float | None,
) -> list[Role]:
    """Return the role of each agent: behavior names, and one codec for each behavior."""
    team_of = _teams(agents, env_id, teams)
    found: dict[str, Role] = {}
    spaces_of: dict[str, tuple[Any, Any]] = {}
    roles = []
    for agent in agents:
        own = (env.observation_space(agent), env.action_space(agent))
        name = _stem(agent)
        if spaces_of.setdefault(name, own) != own:
            name = naming.behavior_name(agent)  # as its kind, but it observes or does other things
            spaces_of[name] = own
        behavior = f"{name}?team={team_of[agent]}"
        if behavior not in found:
            where = f"{env_id}, agent {agent}"
            space, masked = _without_mask(own[0])
            observations = Observations(space, where=where, visual=visual)
            actions = Actions(own[1], where=where, scale=action_scale)
            found[behavior] = Role(
                behavior=behavior,
                spec=BehaviorSpec(observations.specs, actions.spec),
                observations=observations,
                actions=actions,
                masked=masked,
            )
        roles.append(found[behavior])
    return roles


def _without_mask(space: Any) -> tuple[Any, bool]:
    if isinstance(space, spaces.Dict) and set(space.spaces) == {"observation", "action_mask"}:
        return space["observation"], True
    return space, False


def _stem(agent: str) -> str:
    """`adversary` of `adversary_0`."""
    without: str = re.sub(r"[_-]?\d+\Z", "", str(agent))
    return naming.behavior_name(without or "agent")


def _teams(agents: Sequence[str], env_id: str, teams: str | Mapping[str, Any]) -> dict[str, int]:
    if teams in ("none", "index"):
        return {agent: number if teams == "index" else 0 for number, agent in enumerate(agents)}
    known = {*agents, *map(_stem, agents)}
    if isinstance(teams, str) or not set(teams) <= known:
        raise SettingsError(
            f"{env_id}: teams is {teams!r}; give none, index, or a whole number for each of "
            f"{', '.join(agents)}."
        )
    given = {agent: teams.get(agent, teams.get(_stem(agent), 0)) for agent in agents}
    for agent, team in given.items():
        if isinstance(team, bool) or not isinstance(team, int) or team < 0:
            raise SettingsError(
                f"{env_id}: teams.{agent} is {team!r}; give a whole number, 0 or up."
            )
    return given


def group_numbers(roles: Sequence[Role], groups: str) -> list[int]:
    """Return the group of each agent within its copy, counted from 1; 0 for none."""
    if groups == "none":
        return [0] * len(roles)
    if groups == "all":
        return [1] * len(roles)
    behaviors = list(dict.fromkeys(role.behavior for role in roles))
    return [behaviors.index(role.behavior) + 1 for role in roles]


class StepRows:
    """Arrays for as many agents as a behavior can have in one step, and how many are filled."""

    def __init__(self, observations: Observations, size: int) -> None:
        self.n = 0
        self._observations = observations
        self._obs = observations.empty(size)
        self._reward = np.zeros(size, dtype=np.float32)
        self._group_reward = np.zeros(size, dtype=np.float32)
        self._agent_id = np.zeros(size, dtype=np.int32)
        self._group_id = np.zeros(size, dtype=np.int32)

    def add(
        self, obs: Any, reward: float, group_reward: float, *, agent_id: int, group_id: int
    ) -> None:
        """Fill the next row."""
        row = self.n
        self.n += 1
        self._observations.put(self._obs, row, obs)
        self._reward[row], self._group_reward[row] = reward, group_reward
        self._agent_id[row], self._group_id[row] = agent_id, group_id

    def filled(self) -> dict[str, Any]:
        """Return the filled rows of what decision and terminal steps have in common."""
        n = self.n
        return {
            # Views: the arrays are made anew for each step, so nothing writes into them later.
            "obs": [values[:n] for values in self._obs],
            "reward": self._reward[:n],
            "agent_id": self._agent_id[:n],
            "group_id": self._group_id[:n],
            "group_reward": self._group_reward[:n],
        }


class Batch:
    """What the agents of one behavior observe in one step; there are at most `size`."""

    def __init__(self, role: Role, size: int) -> None:
        self.role = role
        self.asked: list[tuple[int, int]] = []
        """Copy and agent of each decision."""
        self.decisions = StepRows(role.observations, size)
        self.terminals = StepRows(role.observations, size)
        self.interrupted: list[bool] = []
        self._size = size
        self._forbidden: BoolArray | None = None

    def forbid(self, row: int, mask: Any) -> None:
        """Set the mask of a decision; 1 means allowed in it."""
        if self._forbidden is None:
            choices = sum(self.role.actions.spec.discrete_branches)
            self._forbidden = np.zeros((self._size, choices), dtype=np.bool_)
        self._forbidden[row] = self.role.actions.forbidden(mask)

    def steps(self) -> Steps:
        """Return all that was collected."""
        masks = None
        if self._forbidden is not None:
            masks = self.role.actions.masks(self._forbidden[: self.decisions.n])
        interrupted = np.array(self.interrupted, dtype=np.bool_)
        return (
            DecisionSteps(**self.decisions.filled(), action_mask=masks),
            TerminalSteps(**self.terminals.filled(), interrupted=interrupted),
        )
