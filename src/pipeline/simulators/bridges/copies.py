"""One copy of a PettingZoo environment, driven through either of its two interfaces.

Agents go by their index in `possible_agents`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import UnityEnvironmentException
from pipeline.protocol.parameters import Parameters
from pipeline.simulators.bridges.returned import MISUSE, refuse_returned
from pipeline.simulators.bridges.states import copy_state, restore_copy


class Event(NamedTuple):
    """An agent that asks for a decision, or whose episode has ended.

    To be used at once, because an environment may reuse its arrays.
    """

    agent: int
    obs: Any
    reward: float
    """Its own reward since its last decision."""
    group_reward: float = 0.0
    """Its reward as a member of its group."""
    info: Mapping[str, Any] = {}
    interrupted: bool | None = None
    """Whether its episode was cut short; None when it goes on."""


class Copy:
    """Base of the copies of an `AECEnv` and of a `ParallelEnv`.

    `rng` gives each episode its seed. `parameters`, when there are any, are the `options` of each
    reset.
    """

    def __init__(
        self, env: Any, *, rng: np.random.Generator, where: str, parameters: Parameters
    ) -> None:
        self.env = env
        self._rng, self._where, self._parameters = rng, where, parameters
        self._index = {name: k for k, name in enumerate(env.possible_agents)}
        self._playing: set[str] = set()
        """Agents that have decided in this episode, and not ended."""
        self._ended: set[str] = set()

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None if the environment cannot give it."""
        env = copy_state(self.env)
        if env is None:
            return None
        stream = self._rng.bit_generator.state
        playing, ended = sorted(self._playing), sorted(self._ended)
        return {"env": env, "stream": stream, "playing": playing, "ended": ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.env.reset(seed=0)  # wrappers refuse to step before one
        restore_copy(self.env, state["env"])
        self._rng.bit_generator.state = state["stream"]
        self._playing = set(state["playing"])
        self._ended = set(state.get("ended", ()))  # which older checkpoints lack

    def _begin(self) -> Any:
        self._playing.clear()
        self._ended.clear()
        # A seed for each episode: environments differ in what a reset without a seed continues.
        seed = int(self._rng.integers(2**31))
        # None without parameters: many environments do not take an empty map.
        options = self._parameters.values() or None
        try:
            begun = self.env.reset(seed=seed, options=options)
        except TypeError as error:
            refuse_returned(self.env, "reset", None, error, where=self._where)
            raise
        if not self.env.agents:
            raise UnityEnvironmentException(
                f"{self._where}: it has no agents after a reset; repair the environment."
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
        """End an agent's episode, once, also if the agent has not decided in it."""
        if agent not in self._ended:
            self._playing.discard(agent)
            self._ended.add(agent)
            yield Event(self._number(agent), obs, reward, group_reward, interrupted=cut)

    def _check_ends(self) -> None:
        lost = self._playing.difference(self.env.agents)
        if lost:
            raise UnityEnvironmentException(
                f"{self._where}: the agent '{min(lost)}' has left without a last observation and "
                "an end; repair the environment."
            )

    def _refuse_ended(self, agents: Sequence[str], remedy: str) -> None:
        raise UnityEnvironmentException(
            f"{self._where}: the agents {sorted(agents)} have ended, but stay in `agents`, so that "
            f"nobody is left to act and no episode can begin; {remedy}."
        )


class ParallelCopy(Copy):
    """A `ParallelEnv`: all living agents act at the same time.

    `groups` are the names of the agents that share a group reward: the mean of its members' rewards
    in a step. The difference to an agent's reward stays its own.
    """

    def __init__(self, env: Any, *, groups: Sequence[Sequence[str]] = (), **shared: Any) -> None:
        super().__init__(env, **shared)
        self._groups = groups
        self._pending: dict[str, tuple[float, float]] = {}

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None if the environment cannot give it."""
        state = super().state_dict()
        pending = {agent: list(rewards) for agent, rewards in self._pending.items()}
        return None if state is None else {**state, "pending": pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        super().load_state_dict(state)
        self._pending = {
            agent: (own_reward, shared_reward)
            for agent, (own_reward, shared_reward) in state["pending"].items()
        }

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
            raise

    def step(self, actions: Mapping[int, Any]) -> Iterator[Event]:
        """Apply the living agents' actions; begin a new episode when none is left."""
        env = self.env
        named = {env.possible_agents[agent]: action for agent, action in actions.items()}
        result = env.step(named)
        try:
            # rewards of agents that observe nothing now are given with their next observation
            self._pending = yield from self._events(*result)
        except MISUSE as error:
            refuse_returned(env, "step", result, error, where=self._where)
            raise
        self._check_ends()
        # At once, so that new first decisions come in the same message as the ends.
        if not env.agents:
            yield from self.reset()
        elif self._ended.issuperset(env.agents):
            remedy = "remove an agent in the step in which it is terminated or truncated"
            self._refuse_ended(env.agents, remedy)

    def _events(
        self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any
    ) -> Generator[Event, None, dict[str, tuple[float, float]]]:
        """Yield what a step has brought; return rewards of agents that observe nothing now."""
        gained = self._gained(rewards)
        for agent, observation in observations.items():
            own_reward, shared_reward = gained.pop(agent, (0.0, 0.0))
            # Environments may leave out agents that have not terminated.
            terminated = terminations.get(agent, False)
            if terminated or truncations.get(agent, False):
                yield from self._end(agent, observation, not terminated, own_reward, shared_reward)
            # Observed but no longer alive: it has had its end already.
            elif agent in self.env.agents:
                info = infos.get(agent, {})
                yield self._decide(agent, observation, info, own_reward, shared_reward)
        return gained

    def _gained(self, rewards: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Return each agent's own and group reward since its last observation."""
        shared = dict(self._shared(rewards))
        gained = self._pending
        for agent, reward in rewards.items():
            own_reward, shared_reward = gained.get(agent, (0.0, 0.0))
            part = shared.get(agent, 0.0)
            # Subtracted from its own reward: the sum of both stays the environment's reward.
            gained[agent] = (own_reward + float(reward) - part, shared_reward + part)
        return gained

    def _shared(self, rewards: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        for group in self._groups:
            members = [agent for agent in group if agent in rewards]
            for agent in members:
                yield agent, sum(float(rewards[member]) for member in members) / len(members)


class TurnCopy(Copy):
    """An `AECEnv`: agents act one after another; only the one whose turn it is asks for a decision.

    Its reward is the sum since its own last action, whichever agents acted meanwhile.
    """

    def reset(self) -> Iterator[Event]:
        """Begin a new episode."""
        self._begin()
        yield from self._advance()

    def step(self, actions: Mapping[int, Any]) -> Iterator[Event]:
        """Apply the one agent's action, and go on to the next turn of a living agent."""
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
                # Two beginnings without an action in between would go on for ever.
                begun = True
            agent = env.agent_selection
            result = None
            try:
                result = env.last()
                observation, reward, terminated, truncated, info = result
                reward, is_over = float(reward), terminated or truncated
            except MISUSE as error:
                refuse_returned(env, "last", result, error, where=self._where)
                raise
            if not is_over:
                yield self._decide(agent, observation, info, reward)
                return
            if agent in self._ended:
                remedy = "let `step` remove an agent that has ended, as `_was_dead_step` does"
                self._refuse_ended([agent], remedy)
            yield from self._end(agent, observation, not terminated, reward)
            # PettingZoo's rule: a dead agent takes its turn with None, and only then is removed.
            env.step(None)
