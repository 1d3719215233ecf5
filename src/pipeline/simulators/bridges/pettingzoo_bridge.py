"""A simulator of several copies of any environment of PettingZoo."""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import Steps
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.seeding import stream
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.batches import MISUSE, Batch, Bridge, Codec, refuse_returned
from pipeline.simulators.bridges.states import copy_state, restore_copy
from pipeline.wire.channels.parameters import Parameters


class Event(NamedTuple):
    """The step of an agent that asks for a decision, or of an agent at the end of its episode.

    Read it before the next step, because an environment may reuse its arrays.
    """

    agent: int  # index of the agent in `possible_agents`
    obs: Any
    reward: float  # the agent's own reward since its last decision
    group_reward: float = 0.0  # the agent's share of its group's reward since its last decision
    info: Mapping[str, Any] = {}
    interrupted: bool | None = None
    """Whether the episode was truncated; None if the episode has not ended."""


class Copy:
    """Base class of the copies of an `AECEnv` and of a `ParallelEnv`.

    `rng` draws the seed of each episode. `parameters` are the `options` of each reset.
    """

    def __init__(
        self, env: Any, *, rng: np.random.Generator, where: str, parameters: Parameters
    ) -> None:
        self.env = env
        self._rng, self._where, self._parameters = rng, where, parameters
        self._index = {name: k for k, name in enumerate(env.possible_agents)}
        self._playing: set[str] = set()
        """Agents that have asked for a decision in this episode, and have not ended."""
        self._ended: set[str] = set()  # agents that have ended in this episode

    def state_dict(self) -> dict[str, Any] | None:
        """Return all that later steps depend on; None if the environment cannot give its state."""
        env, stream = copy_state(self.env), self._rng.bit_generator.state
        agents = {"playing": sorted(self._playing), "ended": sorted(self._ended)}
        return None if env is None else {"env": env, "stream": stream, **agents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        self.env.reset(seed=0)  # PettingZoo's wrappers refuse to step before a reset
        restore_copy(self.env, state["env"])
        self._rng.bit_generator.state = state["stream"]
        self._playing = set(state["playing"])
        self._ended = set(state.get("ended", ()))  # older checkpoints have no "ended"

    def _begin(self) -> Any:
        self._playing.clear()
        self._ended.clear()
        # Each episode gets a seed, because environments differ in how a reset without a seed draws
        # random numbers.
        seed = int(self._rng.integers(2**31))
        # Without parameters `options` is None, because many environments refuse an empty map.
        options = self._parameters.values() or None
        try:
            begun = self.env.reset(seed=seed, options=options)
        except TypeError as error:
            refuse_returned(self.env, "reset", None, error, where=self._where)
        if not self.env.agents:
            raise UnityEnvironmentException(
                f"{self._where}: there are no agents after a reset; repair the environment."
            )
        return begun

    def _number(self, agent: str) -> int:
        if agent not in self._index:
            raise UnityEnvironmentException(
                f"{self._where}: the agent '{agent}' is not one of its possible_agents "
                f"{list(self._index)}; repair the environment."
            )
        return self._index[agent]

    def _decide(
        self, agent: str, obs: Any, info: Any, reward: float, group_reward: float = 0.0
    ) -> Event:
        self._playing.add(agent)
        self._ended.discard(agent)
        return Event(self._number(agent), obs, reward, group_reward, info=info)

    def _end(
        self, agent: str, obs: Any, cut: bool, reward: float, group_reward: float = 0.0
    ) -> Iterator[Event]:
        """Yield the last event of an agent's episode; a second call in the episode yields none."""
        if agent not in self._ended:
            self._playing.discard(agent)
            self._ended.add(agent)
            yield Event(self._number(agent), obs, reward, group_reward, interrupted=cut)

    def _check_ends(self) -> None:
        missing = self._playing.difference(self.env.agents)
        if missing:
            raise UnityEnvironmentException(
                f"{self._where}: the agent '{min(missing)}' has left without a last observation "
                "with a termination or truncation; repair the environment."
            )

    def _ended_stay(self, agents: Sequence[str], remedy: str) -> UnityEnvironmentException:
        return UnityEnvironmentException(
            f"{self._where}: the agents {sorted(agents)} have ended, but stay in `agents`, so that "
            f"nobody is left to act and no episode can begin; {remedy}."
        )


class ParallelCopy(Copy):
    """A `ParallelEnv`: all living agents act at the same time.

    `groups` has the names of each group's agents. A group's reward is the mean of its members'
    rewards in a step; the difference between an agent's reward and this mean is its own reward.
    """

    def __init__(self, env: Any, *, groups: Sequence[Sequence[str]] = (), **shared: Any) -> None:
        super().__init__(env, **shared)
        self._groups = groups
        self._pending: dict[str, tuple[float, float]] = {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return all that later steps depend on; None if the environment cannot give its state."""
        state = super().state_dict()
        pending = {agent: list(rewards) for agent, rewards in self._pending.items()}
        return None if state is None else {**state, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        super().load_state_dict(state)
        self._pending = {agent: tuple(rewards) for agent, rewards in state["pending"].items()}

    def reset(self) -> Iterator[Event]:
        """Begin a new episode."""
        self._pending.clear()
        begun = self._begin()
        try:
            observations, infos = begun
            for agent in self.env.agents:
                yield self._decide(agent, observations[agent], infos.get(agent, {}), 0.0)
        except MISUSE as error:
            refuse_returned(self.env, "reset", begun, error, where=self._where)

    def step(self, actions: Mapping[int, Any]) -> Iterator[Event]:
        """Apply the living agents' actions; begin a new episode if no agent is left."""
        env = self.env
        named = {env.possible_agents[agent]: action for agent, action in actions.items()}
        # The call is outside of `try`, because an environment's own errors must not be reported as
        # broken rules of PettingZoo.
        result = env.step(named)
        try:
            # Agents without an observation in this step get their rewards with their next
            # observation.
            self._pending = yield from self._events(*result)
        except MISUSE as error:
            refuse_returned(env, "step", result, error, where=self._where)
        self._check_ends()
        # The environment is reset at once, so that the first decisions of the new episode are in
        # the same message as the last steps of the old episode.
        if not env.agents:
            yield from self.reset()
        elif self._ended.issuperset(env.agents):
            remedy = "remove an agent in the step in which it is terminated or truncated"
            raise self._ended_stay(env.agents, remedy)

    def _events(
        self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any
    ) -> Generator[Event, None, dict[str, tuple[float, float]]]:
        """Yield an event for each agent with an observation; return the other agents' rewards."""
        gained = self._add_rewards(rewards)
        for agent, observation in observations.items():
            own_reward, shared_reward = gained.pop(agent, (0.0, 0.0))
            # `terminations` and `truncations` may lack agents whose episodes go on.
            terminated = terminations.get(agent, False)
            if terminated or truncations.get(agent, False):
                yield from self._end(agent, observation, not terminated, own_reward, shared_reward)
            # An agent that is observed, but is not in `agents` any more, has ended before and asks
            # for no decision.
            elif agent in self.env.agents:
                info = infos.get(agent, {})
                yield self._decide(agent, observation, info, own_reward, shared_reward)
        return gained

    def _add_rewards(self, rewards: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Add a step's rewards; return each agent's own and group reward since its last event."""
        shared: dict[str, float] = {}
        for group in self._groups:
            members = [agent for agent in group if agent in rewards]
            total = sum(float(rewards[member]) for member in members)
            shared |= {agent: total / len(members) for agent in members}
        gained = self._pending
        for agent, reward in rewards.items():
            own_reward, shared_reward = gained.get(agent, (0.0, 0.0))
            part = shared.get(agent, 0.0)
            # The own reward and the group's part must sum to the environment's reward.
            gained[agent] = (own_reward + float(reward) - part, shared_reward + part)
        return gained


class TurnCopy(Copy):
    """An `AECEnv`: agents act in turn, and only the current agent asks for a decision.

    An agent's reward in a step is the sum of its rewards since its own last action.
    """

    def reset(self) -> Iterator[Event]:
        """Begin a new episode."""
        self._begin()
        yield from self._advance()

    def step(self, actions: Mapping[int, Any]) -> Iterator[Event]:
        """Apply the current agent's action, and advance to the next living agent."""
        ((_, action),) = actions.items()
        self.env.step(action)
        yield from self._advance()

    def _advance(self) -> Iterator[Event]:
        env = self.env
        begun = False
        while True:
            self._check_ends()
            if not env.agents:
                if begun:
                    raise UnityEnvironmentException(
                        f"{self._where}: an episode ended before any agent could act; repair the "
                        "environment."
                    )
                self._begin()
                # If the new episode also ends before an action, an error is raised, because the
                # resets would never stop.
                begun = True
            # `agent_selection` also names agents that have ended and must still be removed.
            agent = env.agent_selection
            result = None
            try:
                result = env.last()
                observation, reward, terminated, truncated, info = result
                reward, is_over = float(reward), terminated or truncated
            except MISUSE as error:
                refuse_returned(env, "last", result, error, where=self._where)
            if not is_over:
                yield self._decide(agent, observation, info, reward)
                return
            if agent in self._ended:
                remedy = "let `step` remove an agent that has ended, as `_was_dead_step` does"
                raise self._ended_stay([agent], remedy)
            yield from self._end(agent, observation, not terminated, reward)
            # In PettingZoo, an agent that has ended must step once more with the action None, which
            # removes it (https://pettingzoo.farama.org/api/aec/).
            env.step(None)


# Values of the option `groups`: no groups, one group of all agents of a copy, or one group for each
# behavior. The agents of a group share a reward.
GROUPS = ("none", "all", "behavior")


class PettingZooSimulator(Bridge):
    """Copies of one environment, stepped together; each is reset when no agent is left.

    Agents share a behavior if their spaces are equal and their names differ in the number only:
    `adversary_0` and `adversary_1` have the behavior `adversary`. An agent's id is the number of
    its copy times the number of `possible_agents`, plus its index in `possible_agents`.

    Args:
        id: the environment's module, such as `pettingzoo.classic.tictactoe_v3`; or a list of
            environments, one for each copy.
        kwargs: keywords for the environment.
        visual, action_scale, render_mode: as in `GymnasiumSimulator`.
        seed: copy k draws the seeds of its episodes from this seed and k.
        n_agents: number of copies, each with all its agents.
        api: one of `naming.APIS`.
        teams: `none` for one team; `index` for a separate team for each agent; or the team of each
            agent, by its name or by its name without number.
        groups: one of `GROUPS`; all but `none` need the parallel interface.

    Raises:
        SettingsError: The environment cannot be made, one of its spaces is not supported, or an
            option does not fit the environment.
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
        if isinstance(id, str):
            create, kind = naming.creator(id, api)
            arguments = naming.keywords(id, kwargs or {}, render_mode)
            envs = [_make_env(create, id, arguments) for _ in range(n_agents)]
        else:
            envs, id = list(id), str(id[0])
            kind = "aec" if hasattr(envs[0], "agent_iter") else "parallel"
        if groups not in GROUPS:
            raise SettingsError(f"{id}: groups is '{groups}'; choose one of {', '.join(GROUPS)}.")
        if groups != "none" and kind != "parallel":
            raise SettingsError(
                f"{id}: groups is '{groups}', but its agents act in turns, and a group's reward "
                "needs a step that all its agents share; leave groups out."
            )
        if not getattr(envs[0], "possible_agents", None):
            raise SettingsError(
                f"{id}: the environment has no possible_agents, so its behaviors cannot be known "
                "before it runs; use a wrapper that lists the agents."
            )
        # `possible_agents`, unlike `agents`, never changes: its indices are the agents' numbers.
        agents = list(envs[0].possible_agents)
        super().__init__(envs, id, per_copy=len(agents))
        self._behaviors = _behaviors(envs[0], agents, id, teams)
        self._codecs: dict[str, Codec] = {}
        for agent, behavior in zip(agents, self._behaviors, strict=True):
            if behavior not in self._codecs:
                label = f"{id}, agent {agent}"
                self._codecs[behavior] = Codec(
                    *_spaces(envs[0], agent), where=label, visual=visual, scale=action_scale
                )
        self._group = _group_numbers(self._behaviors, groups)
        # The names of the agents in each group of one copy; they are the same in all copies.
        sharing = [
            [name for name, number in zip(agents, self._group, strict=True) if number == group]
            for group in sorted(set(self._group) - {0})
        ]
        make = partial(ParallelCopy, groups=sharing) if kind == "parallel" else TurnCopy
        self._copies: list[ParallelCopy | TurnCopy] = [
            make(env, rng=stream(seed, "pettingzoo", k), where=id, parameters=self.parameters)
            for k, env in enumerate(envs)
        ]
        self._asking_ids: dict[str, list[int]] = {}  # agent ids of the last decision steps

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior: one for each kind of agent and each team."""
        return {name: codec.spec for name, codec in self._codecs.items()}

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every copy."""
        return self._collected([copy.reset() for copy in self._copies])

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Apply one action for each agent that asked for a decision, in each copy."""
        by_copy: list[dict[int, Any]] = [{} for _ in self._copies]
        for name, agent_ids in self._asking_ids.items():
            native = self._codecs[name].actions.native(actions[name]) if agent_ids else ()
            for agent_id, action in zip(agent_ids, native, strict=True):
                # `_add` computes an agent's id from these two numbers.
                copy, agent = divmod(agent_id, self._per_copy)
                by_copy[copy][agent] = action
        pairs = zip(self._copies, by_copy, strict=True)
        return self._collected([copy.step(acting) for copy, acting in pairs])

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None if a copy cannot give its state."""
        copies = [copy.state_dict() for copy in self._copies]
        if None in copies:
            return None
        asked = {
            name: [list(divmod(agent_id, self._per_copy)) for agent_id in ids]
            for name, ids in self._asking_ids.items()
        }
        return {"copies": copies, "asked": asked, "parameters": self.parameters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        self.parameters.load_state_dict(state["parameters"])
        for copy, saved in zip(self._copies, state["copies"], strict=True):
            copy.load_state_dict(saved)
        self._asking_ids = {
            name: [copy * self._per_copy + agent for copy, agent in agents]
            for name, agents in state["asked"].items()
        }

    def _collected(self, events: Sequence[Iterator[Event]]) -> dict[str, Steps]:
        batches = {
            name: Batch(codec, len(self._copies) * self._behaviors.count(name))
            for name, codec in self._codecs.items()
        }
        for copy, happening in enumerate(events):
            for event in happening:
                self._add(event, copy, batches[self._behaviors[event.agent]])
        steps = {name: batch.steps() for name, batch in batches.items()}
        self._asking_ids = {
            name: decisions.agent_id.tolist() for name, (decisions, _) in steps.items()
        }
        return steps

    def _add(self, event: Event, copy: int, batch: Batch) -> None:
        group = self._group[event.agent]
        # A group id of 0 means no group, so groups are numbered from 1, over all copies.
        group_id = copy * max(self._group) + group if group else 0
        agent_id = copy * self._per_copy + event.agent
        row = (event.reward, agent_id, group_id, event.group_reward)
        if event.interrupted is not None:
            batch.end(event.obs, event.interrupted, row)
            return
        try:
            batch.decide(event.obs, event.info, row)
        except AttributeError as error:
            if hasattr(event.info, "get"):
                raise
            raise UnityEnvironmentException(
                f"{self._where}: the info of an agent is {event.info!r}, but PettingZoo asks for a "
                "dict; repair the environment"
            ) from error


def _make_env(create: Any, env_id: str, kwargs: Mapping[str, Any]) -> Any:
    expected: tuple[type[Exception], ...] = naming.registry_errors()
    expected += (ImportError, TypeError, ValueError, AssertionError, OSError)
    try:
        return create(**kwargs)
    except expected as error:
        # PettingZoo raises an error of its own, of which the cause names the missing package.
        cause = error.__cause__
        raise naming.unfit(env_id, cause if isinstance(cause, Exception) else error) from error


def _behaviors(
    env: Any, agents: Sequence[str], env_id: str, teams: str | Mapping[str, Any]
) -> list[str]:
    team_of = _teams(agents, env_id, teams)
    spaces_of: dict[str, tuple[Any, Any]] = {}
    behaviors = []
    for agent in agents:
        name, spaces = _stem(agent), _spaces(env, agent)
        # Agents with other spaces cannot share a network, so they get a separate behavior.
        if spaces_of.setdefault(name, spaces) != spaces:
            name = naming.behavior_name(agent)
            spaces_of[name] = spaces
        behaviors.append(f"{name}?team={team_of[agent]}")
    return behaviors


def _spaces(env: Any, agent: str) -> tuple[Any, Any]:
    return env.observation_space(agent), env.action_space(agent)


def _stem(agent: str) -> str:
    """Return an agent's name without its number: `adversary` for `adversary_0`."""
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
    team_of = {agent: teams.get(agent, teams.get(_stem(agent), 0)) for agent in agents}
    for agent, team in team_of.items():
        if isinstance(team, bool) or not isinstance(team, int) or team < 0:
            raise SettingsError(
                f"{env_id}: teams.{agent} is {team!r}; give a whole number, 0 or up."
            )
    return team_of


def _group_numbers(behaviors: Sequence[str], groups: str) -> list[int]:
    """Return the number of each agent's group in its copy, counted from 1; 0 for no group."""
    if groups != "behavior":
        return [int(groups == "all")] * len(behaviors)
    order = list(dict.fromkeys(behaviors))
    return [order.index(behavior) + 1 for behavior in behaviors]
