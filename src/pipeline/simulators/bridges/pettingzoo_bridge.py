"""Any environment of PettingZoo, in several copies, as one simulator of many agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError
from pipeline.protocol.parameters import Parameters
from pipeline.seeding import stream
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.batches import Batch
from pipeline.simulators.bridges.games import ParallelGame, Setting, TurnGame
from pipeline.simulators.bridges.roles import check_groups, group_numbers, roles_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.protocol.specs import ActionTuple, BehaviorSpec
    from pipeline.protocol.steps import Steps


class PettingZooSimulator:
    """Copies of one environment, stepped together; each begins anew when no agent is left.

    Agents whose names differ by their number only, and whose spaces are the same, share a behavior:
    `adversary_0` and `adversary_1` are `adversary`. Agent ids count through copies, then through
    `possible_agents`.

    Args:
        id: the environment's module, such as `pettingzoo.classic.tictactoe_v3`.
        kwargs: keywords for the environment.
        seed: copy k draws the seeds of its episodes from this and k.
        n_agents: number of copies, each with all its agents.
        api: one of `naming.APIS`.
        teams: `none` for one team; `index` for a team of its own for each agent; or the team of
            each agent, by name or by name without number.
        groups: one of `roles.GROUPS`; other than `none` it takes the parallel interface.
        visual: one of `observations.VISUAL`.
        action_scale: what an action of 1 means where a Box has no finite bounds.

    Raises:
        SettingsError: The environment cannot be made, one of its spaces cannot be carried, or an
            option does not fit it.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        n_agents: int = 1,
        api: str = "auto",
        teams: str | Mapping[str, int] = "none",
        groups: str = "none",
        visual: str = "auto",
        action_scale: float | None = None,
    ) -> None:
        self.parameters = Parameters()
        create, kind = naming.creator(id, api)
        check_groups(id, groups, kind)
        envs = [_made(create, id, kwargs or {}) for _ in range(n_agents)]
        agents = list(envs[0].possible_agents)
        self._roles = roles_of(envs[0], agents, id, teams, visual, action_scale)
        self._specs = {role.behavior: role.spec for role in self._roles}
        self._group = group_numbers(self._roles, groups)
        sharing = [
            [name for name, number in zip(agents, self._group, strict=True) if number == group]
            for group in sorted(set(self._group) - {0})
        ]
        self._games: list[ParallelGame | TurnGame] = []
        for copy, env in enumerate(envs):
            setting = Setting(
                env=env, rng=stream(seed, "pettingzoo", copy), where=id, parameters=self.parameters
            )
            self._games.append(
                ParallelGame(setting, groups=sharing) if kind == "parallel" else TurnGame(setting)
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
        for copy, game in enumerate(self._games):
            game.reset(_CopySink(self, copy))
        return self._steps()

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Apply one action per agent that asked, in each copy.

        Raises:
            ValueError: The number of actions is not that of agents that asked.
            UnityObservationException: An observation does not fit its space.
            UnityEnvironmentException: The environment breaks PettingZoo's rules.
        """
        by_copy: list[dict[int, Any]] = [{} for _ in self._games]
        for name, batch in self._batches.items():
            if not batch.asked:
                continue
            native = batch.role.actions.native(actions[name])
            for (copy, agent), action in zip(batch.asked, native, strict=True):
                by_copy[copy][agent] = action
        self._new_batches()
        for copy, game in enumerate(self._games):
            game.step(by_copy[copy], _CopySink(self, copy))
        return self._steps()

    def set_parameter(self, name: str, value: float) -> None:
        """Set one of the `options` of the resets from now on."""
        self.parameters.set_value(name, value)

    def close(self) -> None:
        """Close every copy."""
        for game in self._games:
            game.close()

    def batch_of(self, agent: int) -> Batch:
        """The batch that this step collects for the agent's behavior."""
        return self._batches[self._roles[agent].behavior]

    def identity(self, copy: int, agent: int) -> tuple[int, int]:
        """Agent id and group id."""
        group = self._group[agent]
        n_groups = max(self._group)
        return copy * len(self._roles) + agent, copy * n_groups + group if group else 0

    def _new_batches(self) -> None:
        roles = {role.behavior: role for role in self._roles}
        self._batches = {name: Batch(roles[name], self._sizes[name]) for name in self._specs}

    def _steps(self) -> dict[str, Steps]:
        return {name: batch.steps() for name, batch in self._batches.items()}


class _CopySink:
    """Adds what the agents of one copy observe to the batches of this step."""

    def __init__(self, simulator: PettingZooSimulator, copy: int) -> None:
        self._simulator = simulator
        self._copy = copy

    def decide(
        self, agent: int, obs: Any, info: Mapping[str, Any], reward: float, group_reward: float
    ) -> None:
        batch = self._simulator.batch_of(agent)
        rows, row = batch.decisions, batch.decisions.n
        mask = info.get("action_mask")
        if batch.role.masked:
            obs, mask = obs["observation"], obs["action_mask"]
        if mask is not None and batch.role.actions.spec.discrete_branches:
            batch.forbid(row, mask)
        batch.asked.append((self._copy, agent))
        rows.add(batch.role, obs, reward, group_reward, self._simulator.identity(self._copy, agent))

    def end(
        self, agent: int, obs: Any, interrupted: bool, reward: float, group_reward: float
    ) -> None:
        batch = self._simulator.batch_of(agent)
        rows = batch.terminals
        rows.interrupted[rows.n] = interrupted
        if batch.role.masked:
            obs = obs["observation"]
        rows.add(batch.role, obs, reward, group_reward, self._simulator.identity(self._copy, agent))


def _made(create: Any, env_id: str, kwargs: Mapping[str, Any]) -> Any:
    if "render_mode" in kwargs:
        raise SettingsError(f"{env_id}: render_mode cannot be set; an executable draws nothing.")
    expected: tuple[type[Exception], ...] = naming.registry_errors()
    expected += (ImportError, TypeError, ValueError, AssertionError, OSError)
    try:
        env = create(**kwargs)
    except expected as error:
        cause = error.__cause__
        raise naming.unfit(env_id, cause if isinstance(cause, Exception) else error) from error
    if not getattr(env, "possible_agents", None):
        raise SettingsError(
            f"{env_id}: it has no possible_agents, so its behaviors cannot be known before it "
            "runs; wrap the environment so that it lists them."
        )
    return env
