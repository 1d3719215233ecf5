"""Any environment of PettingZoo, in several copies, as one simulator of many agents."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.protocol.parameters import Parameters
from pipeline.seeding import stream
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.copies import ParallelCopy, TurnCopy
from pipeline.simulators.bridges.roles import Batch, check_groups, group_numbers, roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.arrays import AnyArray
    from pipeline.protocol.specs import ActionTuple, BehaviorSpec
    from pipeline.protocol.steps import Steps


class PettingZooSimulator:
    """Copies of one environment, stepped together; each begins anew when no agent is left.

    Agents whose names differ by their number only, and whose spaces are the same, share a behavior:
    `adversary_0` and `adversary_1` are `adversary`. Agent ids count through copies, then through
    `possible_agents`.

    Args:
        id: the environment's module, such as `pettingzoo.classic.tictactoe_v3`; or the copies
            themselves.
        kwargs: keywords for the environment.
        seed: copy k draws the seeds of its episodes from this and k.
        n_agents: number of copies, each with all its agents.
        api: one of `naming.APIS`.
        teams: `none` for one team; `index` for a team of its own for each agent; or the team of
            each agent, by name or by name without number.
        groups: one of `roles.GROUPS`; other than `none` it takes the parallel interface.
        visual: one of `spaces.VISUAL`.
        action_scale: what an action of 1 means where a Box has no finite bounds.
        render_mode: `rgb_array` for copies that can be drawn; None draws nothing.

    Raises:
        SettingsError: The environment cannot be made, one of its spaces cannot be carried, or an
            option does not fit it.
    """

    def __init__(
        self,
        *,
        id: str | Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        n_agents: int = 1,
        api: str = "auto",
        teams: str | Mapping[str, int] = "none",
        groups: str = "none",
        visual: str = "auto",
        action_scale: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.parameters = Parameters()
        if isinstance(id, str):
            create, kind = naming.creator(id, api)
            given = naming.keywords(id, kwargs or {}, render_mode)
            envs = [_made(create, id, given) for _ in range(n_agents)]
        else:
            envs, n_agents, id = list(id), len(id), str(id[0])
            kind = "aec" if hasattr(envs[0], "agent_iter") else "parallel"
        self._where = id
        check_groups(id, groups, kind)
        if not getattr(envs[0], "possible_agents", None):
            raise SettingsError(
                f"{id}: it has no possible_agents, so its behaviors cannot be known before it "
                "runs; wrap the environment so that it lists them."
            )
        # `possible_agents` is fixed, unlike `agents`; places in it serve as numbers.
        agents = list(envs[0].possible_agents)
        self._roles = roles_of(envs[0], agents, id, teams, visual, action_scale)
        self._specs = {role.behavior: role.spec for role in self._roles}
        self._group = group_numbers(self._roles, groups)
        sharing = [
            [name for name, number in zip(agents, self._group, strict=True) if number == group]
            for group in sorted(set(self._group) - {0})
        ]
        self._copies: list[ParallelCopy | TurnCopy] = []
        for copy, env in enumerate(envs):
            shared: dict[str, Any] = {
                "rng": stream(seed, "pettingzoo", copy),
                "where": id,
                "parameters": self.parameters,
                "decide": partial(self._decide, copy),
                "end": partial(self._end, copy),
            }
            self._copies.append(
                ParallelCopy(env, groups=sharing, **shared)
                if kind == "parallel"
                else TurnCopy(env, **shared)
            )
        self._sizes = {
            name: n_agents * sum(role.behavior == name for role in self._roles)
            for name in self._specs
        }
        self._batches: dict[str, Batch] = {}

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """One behavior for each kind of agent and team."""
        return self._specs

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every copy."""
        self._new_batches()
        for copy in self._copies:
            copy.reset()
        return self._steps()

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Apply one action per agent that asked, in each copy.

        Raises:
            ValueError: The number of actions is not that of agents that asked.
            UnityObservationException: An observation does not fit its space.
            UnityEnvironmentException: The environment breaks PettingZoo's rules.
        """
        by_copy: list[dict[int, Any]] = [{} for _ in self._copies]
        for name, batch in self._batches.items():
            if not batch.asked:
                continue
            native = batch.role.actions.native(actions[name])
            for (copy, agent), action in zip(batch.asked, native, strict=True):
                by_copy[copy][agent] = action
        # After the actions were read: they belong to those who asked last time.
        self._new_batches()
        for one, acting in zip(self._copies, by_copy, strict=True):
            one.step(acting)
        return self._steps()

    def set_parameter(self, name: str, value: float) -> None:
        """Set one of the `options` of the resets from now on."""
        self.parameters.set_value(name, value)

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's copy."""
        from pipeline.simulators.bridges.pictures import picture

        return picture(self._copies[agent // len(self._roles)].env, self._where)

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None where a copy does not give it."""
        copies = []
        for one in self._copies:
            copies.append(one.state_dict())
            if copies[-1] is None:
                return None
        asked = {name: [list(one) for one in batch.asked] for name, batch in self._batches.items()}
        return {"copies": copies, "asked": asked, "parameters": self.parameters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.parameters.load_state_dict(state["parameters"])
        for one, saved in zip(self._copies, state["copies"], strict=True):
            one.load_state_dict(saved)
        self._new_batches()
        for name, asked in state["asked"].items():
            self._batches[name].asked.extend((copy, agent) for copy, agent in asked)

    def close(self) -> None:
        """Close every copy."""
        for copy in self._copies:
            copy.env.close()

    def _new_batches(self) -> None:
        roles = {role.behavior: role for role in self._roles}
        self._batches = {name: Batch(roles[name], self._sizes[name]) for name in self._specs}

    def _steps(self) -> dict[str, Steps]:
        return {name: batch.steps() for name, batch in self._batches.items()}

    def _decide(
        self,
        copy: int,
        agent: int,
        obs: Any,
        info: Mapping[str, Any],
        reward: float,
        group_reward: float,
    ) -> None:
        """Add an agent that asks for a decision to its behavior's batch."""
        batch = self._batches[self._roles[agent].behavior]
        mask = info.get("action_mask")
        if batch.role.masked:
            obs, mask = obs["observation"], obs["action_mask"]
        if mask is not None and batch.role.actions.spec.discrete_branches:
            # Before the row is added, so that `n` is its number.
            batch.forbid(batch.decisions.n, mask)
        batch.asked.append((copy, agent))
        batch.decisions.add(obs, reward, group_reward, **self._identity(copy, agent))

    def _end(
        self, copy: int, agent: int, obs: Any, cut: bool, reward: float, group_reward: float
    ) -> None:
        """Add an agent whose episode has ended to its behavior's batch."""
        batch = self._batches[self._roles[agent].behavior]
        batch.interrupted.append(cut)
        if batch.role.masked:
            obs = obs["observation"]
        batch.terminals.add(obs, reward, group_reward, **self._identity(copy, agent))

    def _identity(self, copy: int, agent: int) -> dict[str, int]:
        group, n_groups = self._group[agent], max(self._group)
        return {
            "agent_id": copy * len(self._roles) + agent,
            # 0 means no group on the wire, so groups are counted from 1, through all copies.
            "group_id": copy * n_groups + group if group else 0,
        }


def _made(create: Any, env_id: str, kwargs: Mapping[str, Any]) -> Any:
    expected: tuple[type[Exception], ...] = naming.registry_errors()
    expected += (ImportError, TypeError, ValueError, AssertionError, OSError)
    try:
        return create(**kwargs)
    except expected as error:
        # PettingZoo wraps what an import raises; the cause says which package is missing.
        cause = error.__cause__
        raise naming.unfit(env_id, cause if isinstance(cause, Exception) else error) from error
