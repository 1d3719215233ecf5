"""The low-level API of an environment, ML-Agents' `BaseEnv`, and base classes of environments."""

import logging
import time
from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Self

from pipeline.core.arrays import AnyArray
from pipeline.core.specs import (
    ActionTuple,
    BehaviorSpec,
    refuse_other_spec,
    spec_from_mapping,
    spec_to_mapping,
)
from pipeline.core.steps import (
    Steps,
    no_agents,
    refuse_other_shapes,
    steps_from_mapping,
    steps_to_mapping,
)
from pipeline.envs.side_channels import Stats, aggregation_of
from pipeline.errors import UnityActionException, UnityEnvironmentException, brief

_log = logging.getLogger(__name__)

FIRST_S, FIRST_EXCHANGES = 30.0, 10_000
"""Seconds of waiting, or messages without a decision, after which a warning is logged."""
# Factor by which a silence must grow before the warning is logged again.
_LONGER = 10
_REMEDY = (
    "The wait ends when an agent asks for a decision: in Unity each agent needs a Decision "
    'Requester (or calls RequestDecision) and the Behavior Type "Default", and agents that end '
    "must appear again"
)


class SilenceWatch:
    """Warns of a silence: no agent of the environment `name` asks for a decision for a long time.

    `last_sent` returns a description of the environment's last message, `clock` the time in
    seconds. `is_on` tells whether a silence is being measured.
    """

    def __init__(
        self, name: str, last_sent: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._last_sent, self._clock = name, last_sent, clock
        self.end()

    def end(self) -> None:
        """End the silence: an agent has asked for a decision, or all episodes begin again."""
        self.is_on = False
        # `_next` is the length of the silence at which the warning is due; a length of 1 is FIRST_S
        # seconds of waiting or FIRST_EXCHANGES messages.
        self._n_exchanges, self._waited_s, self._next = 0, 0.0, 1.0
        self._since: float | None = None

    def count(self) -> None:
        """Count a message in which no agent asks for a decision; log the warning if it is due."""
        self._n_exchanges += 1
        self.check()

    def begin_wait(self) -> None:
        """Begin to measure the time of waiting for the environment's next message."""
        self._since = self._clock()

    def end_wait(self) -> None:
        """Add the time since `begin_wait` to the time of the silence, if a wait has begun."""
        if self._since is not None:
            self._waited_s += self._clock() - self._since
        self._since = None

    def check(self) -> None:
        """Log the warning if it is due; must also be called during a long wait."""
        self.is_on = True
        self.end_wait()
        self.begin_wait()
        # Both the time and the number of messages are measured: a slow environment sends few
        # messages in a long time, and a fast environment sends many messages in a short time.
        length = max(self._waited_s / FIRST_S, self._n_exchanges / FIRST_EXCHANGES)
        if length < self._next:
            return
        self._next = _LONGER * length
        _log.warning(
            "%s: no agent has asked for a decision in %d messages and %.0f s of waiting; %s. %s",
            self.name,
            self._n_exchanges,
            self._waited_s,
            self._last_sent(),
            _REMEDY,
        )


def last_message(steps: Mapping[str, Steps], known: Iterable[str]) -> str:
    """Return a text, for `SilenceWatch`, that says which agents the last message has."""
    waiting = {name: len(decision) for name, (decision, _) in steps.items() if len(decision)}
    if waiting:
        return f"the environment has not answered the actions of {_counts(waiting)}"
    ended = {name: len(terminal) for name, (_, terminal) in steps.items() if len(terminal)}
    if ended:
        return f"the environment's last message has ended agents only: {_counts(ended)}"
    if names := sorted(known):
        return f"the environment's last message has no agents of the behaviors {brief(names)}"
    return "the environment has announced no behavior"


def _counts(agents: Mapping[str, int]) -> str:
    return brief(", ".join(f"{number} of {name}" for name, number in agents.items()))


MOST_GROUPS = 2
"""Largest number of groups of workers that step in turn. More groups would hide more latency of the
environments, but each group needs its own inference."""


class BehaviorMapping(UserDict[str, BehaviorSpec]):
    """A mapping from behavior names to specifications, with the name of ML-Agents' class."""


class BaseEnv(ABC):
    """An environment with agents of one or more behaviors, observed and controlled as batches.

    An environment in another process also has `step_send`, `step_wait`, `reset_send` and
    `reset_wait`, so that it can compute while other environments get their actions. An environment
    with parameters and statistics also has `set_parameter` and `take_stats`, as `UnityEnvironment`.

    Attributes:
        codec_seconds: time spent so far on converting messages to arrays and back.
    """

    codec_seconds: float = 0.0

    @abstractmethod
    def step(self) -> None:
        """Apply the actions that were set, or zeros, until an agent asks for a decision or ends.

        The first call resets the environment if it has not been reset.
        """

    @abstractmethod
    def reset(self) -> None:
        """Begin a new episode for every agent, and drop actions that were set but not applied."""

    @abstractmethod
    def close(self) -> None:
        """End the environment and free its resources."""

    @property
    @abstractmethod
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior; may be empty before the first reset, and may grow."""

    @abstractmethod
    def get_steps(self, behavior_name: str) -> Steps:
        """Return the last decision and terminal steps of the behavior's agents."""

    @abstractmethod
    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        """Set the actions of all agents in the last decision steps, in the same order."""

    @abstractmethod
    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        """Set the action of the agent `agent_id`; the arrays in `action` have one row."""

    @property
    def state_refusal(self) -> str | None:
        """Reason why `state_dict` returns no state; None if it returns one. Valid after a reset."""
        return f"{type(self).__name__} has no state_dict"

    def request_state(self) -> None:  # noqa: B027  # by default there is no state
        """Ask for the present state, which `state_dict` returns; to be called between two steps."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the environment's state at the time of the last `request_state`.

        Return None at a second call, or if the environment cannot give its state. The state of an
        environment in another process arrives with the step or reset after the request, and the
        result is None before the state arrives.
        """
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002  # for subclasses
        """Restore a state from `state_dict`, instead of a reset.

        Raises:
            ValueError: This environment cannot be restored.
        """
        raise ValueError(f"{type(self).__name__} cannot be restored")

    @property
    def is_known_from_start(self) -> bool:
        """Whether all messages to this environment since its start are recorded for a replay."""
        return False

    def go_on_from(self, failed: Any) -> None:
        """Bring this environment to the state of `failed`, by a replay of the messages to `failed`.

        The replay begins at the failed environment's last state, or at its start.

        Raises:
            UnityException: This environment has also failed.
            ValueError: The failed environment's state is unknown, or the replay led to other steps.
        """
        raise ValueError(f"{type(failed).__name__} keeps no state")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class StoredStepsEnv(BaseEnv):
    """Base class of environments that store the last steps, and the actions set for them.

    Attributes:
        silence: warns if no agent asks for a decision for a long time.
    """

    def __init__(self) -> None:
        self.silence = SilenceWatch(type(self).__name__, self._last_message)
        self._loaded = True
        self._is_reset = False
        self._specs: dict[str, BehaviorSpec] = {}
        self._steps: dict[str, Steps] = {}
        self._actions: dict[str, ActionTuple] = {}

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of each behavior; may be empty before the first reset, and may grow."""
        # The result is a read-only view, because a copy would cost time in every step.
        return MappingProxyType(self._specs)

    def get_steps(self, behavior_name: str) -> Steps:
        """Return a behavior's last steps; raise UnityActionException for an unknown behavior."""
        self._spec(behavior_name)
        # A known behavior that is not in the last message has no agents now.
        return self._steps.get(behavior_name) or no_agents(self._specs[behavior_name])

    def set_actions(self, behavior_name: str, action: ActionTuple) -> None:
        """Set the actions of all agents in the last decision steps, in the same order.

        Raises:
            UnityActionException: There is no such behavior, or a shape in `action` is wrong.
        """
        spec = self._spec(behavior_name)
        # As in ML-Agents, actions are ignored until the behavior's first agents have been sent.
        if behavior_name in self._steps:
            check_actions(behavior_name, spec, action, len(self._steps[behavior_name][0]))
            self._actions[behavior_name] = action

    def set_action_for_agent(self, behavior_name: str, agent_id: int, action: ActionTuple) -> None:
        """Set the action of the agent `agent_id`; the arrays in `action` have one row.

        Raises:
            UnityActionException: There is no such behavior, or a shape in `action` is wrong.
            IndexError: The agent did not ask for a decision.
        """
        spec = self._spec(behavior_name)
        # As in `set_actions`, actions are ignored until the behavior's first agents have been sent.
        if behavior_name not in self._steps:
            return
        check_actions(behavior_name, spec, action, 1)
        decision = self._steps[behavior_name][0]
        row = decision.agent_id_to_index.get(agent_id)
        if row is None:
            # This is the exact message of ML-Agents, because users' scripts may look for it.
            raise IndexError(
                f"agent_id {agent_id} is did not request a decision at the previous step"
            )
        # Agents without an action get zeros, as in ML-Agents.
        if behavior_name not in self._actions:
            self._actions[behavior_name] = spec.action_spec.empty_action(len(decision))
        self._actions[behavior_name].continuous[row] = action.continuous[0]
        self._actions[behavior_name].discrete[row] = action.discrete[0]

    def _spec(self, behavior_name: str) -> BehaviorSpec:
        spec = self._specs.get(behavior_name)
        if spec is None:
            raise UnityActionException(
                f"The group {behavior_name} does not correspond to an existing agent group in the "
                "environment; the groups are "
                f"{sorted(self._specs) or 'none before the first reset'}"
            )
        return spec

    def _take_actions(self) -> dict[str, ActionTuple]:
        """Return each behavior's actions for the agents that asked for a decision; forget them."""
        # As in ML-Agents, an action is never repeated in the next step.
        actions, self._actions = self._actions, {}
        taken = {}
        for name, (decision, _) in self._steps.items():
            if len(decision):
                zeros = self._specs[name].action_spec.empty_action
                taken[name] = actions[name] if name in actions else zeros(len(decision))
        # No agent waits for an action: this may be the beginning of a silence.
        if not taken:
            self.silence.count()
        elif self.silence.is_on:
            self.silence.end()
        return taken

    def _last_message(self) -> str:
        return last_message(self._steps, self._specs)

    def _client_state(self, stats: Stats) -> dict[str, Any]:
        """Return specifications, last steps and `stats` as plain values for a checkpoint."""
        return {
            "behaviors": {name: spec_to_mapping(spec) for name, spec in self._specs.items()},
            "steps": {name: steps_to_mapping(steps) for name, steps in self._steps.items()},
            # Aggregation methods are stored as numbers, because checkpoints have plain values only.
            "stats": {name: [[v, int(method)] for v, method in vs] for name, vs in stats.items()},
        }

    def _restore(self, state: Mapping[str, Any]) -> Stats:
        """Restore specifications and steps from `_client_state`; return the state's statistics."""
        specs = {name: spec_from_mapping(mapping) for name, mapping in state["behaviors"].items()}
        # The environment's executable may have changed since the checkpoint.
        for name, spec in self._specs.items():
            if name in specs:
                refuse_other_spec(name, specs[name], spec, "the restored environment")
        steps = {name: steps_from_mapping(mapping) for name, mapping in state["steps"].items()}
        for name, parts in steps.items():
            refuse_other_shapes(name, specs[name], parts)
        self._specs, self._steps = specs, steps
        # Actions that were set before the restore belong to other steps.
        self._actions.clear()
        self._is_reset = True
        return {
            name: [(float(value), aggregation_of(name, method)) for value, method in values]
            for name, values in state["stats"].items()
        }

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise UnityEnvironmentException("No Unity environment is loaded.")


def check_actions(name: str, spec: BehaviorSpec, action: ActionTuple, n_agents: int) -> None:
    """Raise UnityActionException unless `action` has the shapes for `n_agents` agents."""
    sizes = spec.action_spec.continuous_size, len(spec.action_spec.discrete_branches)
    parts: tuple[AnyArray | None, ...] = action.continuous, action.discrete
    # The shapes must be exact, because NumPy would broadcast other shapes without an error.
    for kind, got, size in zip(("continuous", "discrete"), parts, sizes, strict=True):
        shape, expected = None if got is None else got.shape, (n_agents, size)
        if shape != expected:
            raise UnityActionException(
                f"The behavior {name} needs a {kind} input of dimension {expected} for "
                f"(<number of agents>, <action size>) but received input of dimension {shape}"
            )


def worker_groups(n_workers: int) -> list[range]:
    """Split the workers' numbers into at most `MOST_GROUPS` ranges of nearly equal size."""
    n = min(MOST_GROUPS, n_workers)
    # The groups are consecutive, so that agents keep their order when the groups are joined.
    cuts = [k * n_workers // n for k in range(n + 1)]
    return [range(first, stop) for first, stop in pairwise(cuts)]
