"""Playing complete episodes with a policy, and their returns.

The first `episodes` episodes that *start* are counted, in the order in which agents make their
first decision, and all of them are played to their end. The first episodes that *end* would be a
biased sample with too many short episodes, because many short episodes end during a long one.

If an agent's episode ends before its first decision, as for a player who wins before its first
turn, the episode has length 0 and starts with its end.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline import files, seeding
from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.envs.base import BaseEnv
from pipeline.errors import StageError
from pipeline.export.layout import ModelDescription

_log = logging.getLogger(__name__)
STEP_LIMIT = 1_000_000
"""An evaluation fails after this number of steps in which no counted episode has ended."""


class ActingPolicy(Protocol):
    """A policy that plays episodes, such as `export.policy.OnnxPolicy`."""

    def reset(self, seed: int) -> None:
        """Forget the memories of all agents, and restart the random numbers from `seed`."""

    def act(self, steps: DecisionSteps, deterministic: bool = True) -> ActionTuple:
        """Return an action for each agent of `steps`."""

    def end(self, agent_ids: Iterable[int]) -> None:
        """Forget the memories of agents after the end of their episodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """An episode of an agent, from its first decision to its end."""

    index: int
    """Number of counted episodes of this behavior that started before this episode."""
    behavior: str
    """Qualified name of the behavior, such as `Name?team=0`."""
    agent: int
    """Agent id."""
    episode_return: float
    """Sum of rewards and group rewards after the first decision."""
    length: int
    """Number of decisions."""
    interrupted: bool
    """Whether the episode was truncated, for example by a step limit."""


def evaluate(
    env: BaseEnv,
    policies: Mapping[str, ActingPolicy],
    *,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    on_running: Callable[[Mapping[str, Mapping[int, int]]], None] | None = None,
) -> list[Episode]:
    """Play until the first `episodes` episodes of each behavior have ended.

    Args:
        env: an environment that this call resets and steps; the caller closes it.
        policies: policies by behavior name; a name without `?team=` serves every team. Each
            behavior of the environment needs a policy. A single policy also plays a single behavior
            with another name and the same observations and actions.
        episodes: number of episodes per behavior, at least 1.
        seed: seed of sampled actions; the environment was seeded when it was made.
        deterministic: take the most probable actions instead of sampled actions.
        on_running: called before each step with the counted episodes that run: for each behavior,
            the index of an agent's episode by the agent's id.

    Returns:
        The episodes, sorted by behavior name and start.

    Raises:
        StageError: A behavior has no policy, the environment has no behavior, or no episode ends.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, wanted at least 1")
    for name, policy in policies.items():
        # Each policy has its own random stream, so that its draws do not depend on other policies.
        policy.reset(seeding.derive(seed, "evaluation", name))
    env.reset()
    policies = _by_shown_name(env, policies)
    counters: dict[str, _Counter] = {}
    idle_steps = ended = 0
    while True:
        decisions = _observe(env, policies, counters, episodes)
        before, ended = ended, sum(counter.n_ended for counter in counters.values())
        n_episodes = episodes * len(counters)
        if counters and ended == n_episodes:
            break
        # Only the end of a counted episode resets `idle_steps`, because episodes that are not
        # counted may end without limit.
        idle_steps = idle_steps + 1 if ended == before else 0
        if idle_steps > STEP_LIMIT:
            raise StageError(
                f"evaluate: no counted episode ended within {STEP_LIMIT} steps of the environment "
                f"({ended} of {n_episodes} ended, behaviors {sorted(counters)}); give the "
                "environment a step limit"
            )
        for name, steps in decisions.items():
            if len(steps):
                action = _policy_of(name, policies).act(steps, deterministic=deterministic)
                env.set_actions(name, action)
        if on_running is not None:
            on_running({name: counter.running for name, counter in counters.items()})
        env.step()
    return [episode for name in sorted(counters) for episode in counters[name].episodes()]


def _by_shown_name(
    env: BaseEnv, policies: Mapping[str, ActingPolicy]
) -> Mapping[str, ActingPolicy]:
    """Return `policies`, or a single policy under the name of the environment's single behavior.

    A single policy gets that name if it has the behavior's observations and actions: a subclass of
    an environment's class has another name, but the policy can play it.
    """
    shown = {name.partition("?")[0]: spec for name, spec in env.behavior_specs.items()}
    if len(policies) != 1 or len(shown) != 1:
        return policies
    ((name, policy),), ((other, spec),) = policies.items(), shown.items()
    description = getattr(policy, "description", None)
    if name.partition("?")[0] == other or description is None or not _fits(description, spec):
        return policies
    _log.info(
        "The policy of %s plays the behavior %s, which has the same specification.", name, other
    )
    return {other: policy}


def _fits(description: ModelDescription, spec: BehaviorSpec) -> bool:
    observed = {f"obs_{k}": tuple(obs.shape) for k, obs in enumerate(spec.observation_specs)}
    inputs = {
        name: info.shape[1:] for name, info in description.inputs.items() if name.startswith("obs_")
    }
    actions = description.continuous_size, description.discrete_branches
    wanted = spec.action_spec.continuous_size, tuple(spec.action_spec.discrete_branches)
    # Shapes are compared without the batch axis; a missing or additional input is a difference.
    return (inputs, actions) == (observed, wanted)


def _observe(
    env: BaseEnv, policies: Mapping[str, ActingPolicy], counters: dict[str, _Counter], episodes: int
) -> dict[str, DecisionSteps]:
    """Record the environment's latest steps; return the decision steps of each behavior."""
    decisions = {}
    shown = {name.partition("?")[0] for name in env.behavior_specs}
    if shown and not shown & {name.partition("?")[0] for name in policies}:
        has = f"the environment has {', '.join(sorted(shown))}"
        remedy = "give a policy of that behavior, or the environment of this policy"
        if len(policies) > 1:
            text = f"these policies are for the behaviors {', '.join(sorted(policies))}; {has}"
            raise StageError(f"{text}; {remedy}")
        # A single policy of another behavior could play if its observations and actions fitted.
        differs = "with other observations or actions (`pipeline onnx check --env` says which)"
        raise StageError(
            f"this policy is for the behavior {next(iter(policies))}; {has}, {differs}; {remedy}"
        )
    for name in list(env.behavior_specs):
        policy = _policy_of(name, policies)
        # Behaviors may appear during the run, each with its own count of episodes.
        counter = counters.setdefault(name, _Counter(name, episodes))
        decision_steps, terminal_steps = env.get_steps(name)
        # Ends come first, because an agent may end and begin its next episode in the same message.
        counter.end(terminal_steps)
        policy.end(terminal_steps.agent_id.tolist())
        counter.decide(decision_steps)
        branches = env.behavior_specs[name].action_spec.discrete_branches
        if decision_steps.action_mask is None and branches:
            # A model of ML-Agents' package 1.x needs masks: the sizes of its branches are read from
            # the masks.
            n = len(decision_steps)
            decision_steps.action_mask = [np.zeros((n, size), np.bool_) for size in branches]
        decisions[name] = decision_steps
    return decisions


def _policy_of(name: str, policies: Mapping[str, ActingPolicy]) -> ActingPolicy:
    # An exported policy plays all teams of its behavior.
    policy = policies.get(name) or policies.get(name.split("?", maxsplit=1)[0])
    if policy is None:
        raise StageError(
            f"evaluate: the environment has the behavior {name!r}, but there are policies only for "
            f"{sorted(policies)}; add a policy for it (a policy's file is named like its behavior: "
            f"{name.partition('?')[0]}.onnx)"
        )
    return policy


class _Counter:
    """Records the return and length of a behavior's first `quota` episodes, in order of start."""

    def __init__(self, behavior: str, quota: int) -> None:
        self.n_ended = 0
        self.running: dict[int, int] = {}
        self._behavior = behavior
        self._n_started = 0
        # The sums are float64, because float32 loses small rewards in a long sum.
        self._return = np.zeros(quota, dtype=np.float64)
        self._length = np.zeros(quota, dtype=np.int64)
        self._agent = np.zeros(quota, dtype=np.int64)
        self._interrupted = np.zeros(quota, dtype=np.bool_)

    def decide(self, steps: DecisionSteps) -> None:
        """Add the rewards of running episodes; start episodes of new agents, up to the quota.

        A reward that arrives with an episode's first decision was earned before the policy's first
        action, and is left out, as in training.
        """
        agents = steps.agent_id.tolist()
        # Rewards are added before episodes start, which leaves out rewards of first decisions.
        self._add(agents, steps)
        self._start(agents)
        running = [self.running[agent] for agent in agents if agent in self.running]
        self._length[running] += 1

    def end(self, steps: TerminalSteps) -> None:
        agents = steps.agent_id.tolist()
        self._start(agents)  # an episode may end without a decision
        slots, rows = self._add(agents, steps)
        self._interrupted[slots] = steps.interrupted[rows]
        self.n_ended += len(slots)
        for agent in agents:
            self.running.pop(agent, None)

    def episodes(self) -> list[Episode]:
        return [
            Episode(
                index=index,
                behavior=self._behavior,
                agent=int(self._agent[index]),
                episode_return=float(self._return[index]),
                length=int(self._length[index]),
                interrupted=bool(self._interrupted[index]),
            )
            for index in range(len(self._return))
        ]

    def _start(self, agents: list[int]) -> None:
        """Start episodes for the agents that are in no counted episode, up to the quota."""
        for agent in agents:
            # Later episodes are played but not counted.
            if self._n_started == len(self._return):
                break
            if agent not in self.running:
                self.running[agent] = self._n_started
                self._agent[self._n_started] = agent
                self._n_started += 1

    def _add(
        self, agents: list[int], steps: DecisionSteps | TerminalSteps
    ) -> tuple[list[int], list[int]]:
        """Add the rewards of agents in counted episodes; return the episode indices and the rows.

        The reward of each agent is added once.
        """
        first: dict[int, int] = {}
        for row, agent in enumerate(agents):
            # An agent has one row; a second row of a faulty environment is ignored.
            first.setdefault(agent, row)
        rows = [row for agent, row in first.items() if agent in self.running]
        slots = [self.running[agents[row]] for row in rows]
        reward = steps.reward[rows].astype(np.float64) + steps.group_reward[rows]
        if not np.isfinite(reward).all():
            row = rows[int(np.argmin(np.isfinite(reward)))]
            raise StageError(
                f"evaluate: {self._behavior}, agent {agents[row]}: reward "
                f"{steps.reward[row]} (group {steps.group_reward[row]}) is not finite; fix the "
                "environment's reward"
            )
        self._return[slots] += reward
        return slots, rows


# The columns are taken from the fields of `Episode`, so that the two cannot differ.
_COLUMNS = tuple(field.name for field in fields(Episode))


def write_episodes(path: Path, episodes: Sequence[Episode]) -> None:
    """Write a CSV file atomically, with a row for each episode."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    writer.writerows([getattr(episode, name) for name in _COLUMNS] for episode in episodes)
    files.write_whole(path, text.getvalue())
