"""Joining the steps of several workers into batches, and sampling rows for checkpoints."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pipeline.core.arrays import AnyArray
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps, TerminalSteps

S = TypeVar("S", DecisionSteps, TerminalSteps)

# A checkpoint has at most this many rows of observations; an exported policy is checked on them.
RECORDED_ROWS = 32


class Part(NamedTuple, Generic[S]):
    """Agents of one worker and their steps, as one part of a message."""

    worker: int
    steps: S
    slots: AnyArray
    """[N] slot of each agent."""


class Message(NamedTuple):
    """The steps of all agents of one behavior and team, from all workers, and the agents' slots."""

    team: str
    n_workers: int
    deciding: list[Part[DecisionSteps]]
    """Agents that ask for a decision: one `Part` for each worker that has such agents."""
    ended: list[Part[TerminalSteps]]
    """Agents with an ended episode, each once: one `Part` for each worker that has such agents."""

    @property
    def slots(self) -> AnyArray:
        """[N] intp, the slots of all agents that ask for a decision."""
        # With one worker, the usual case, no array is copied.
        slots = [part.slots for part in self.deciding]
        if len(slots) == 1:
            return slots[0]
        return np.concatenate(slots) if slots else np.zeros(0, dtype=np.intp)


def sample_rows(obs: Sequence[AnyArray], allowed: AnyArray | None) -> dict[str, Any]:
    """Return at most `RECORDED_ROWS` evenly spaced rows of observations and masks, as tensors."""
    n_rows = len(obs[0])
    rows = np.linspace(0, max(n_rows - 1, 0), min(RECORDED_ROWS, n_rows)).astype(int)
    return {
        "obs": [torch.from_numpy(values[rows]) for values in obs],
        "allowed": None if allowed is None else torch.from_numpy(allowed[rows]),
    }


def first_terminal_per_agent(terminal: TerminalSteps) -> TerminalSteps:
    """Return each agent's first terminal step; a later one ends an episode without a decision."""
    _, first = np.unique(terminal.agent_id, return_index=True)
    if len(first) == len(terminal):
        return terminal
    # `unique` sorts by agent id; the sorted row numbers restore the order of the message.
    rows = np.sort(first)
    return TerminalSteps(
        [values[rows] for values in terminal.obs],
        terminal.reward[rows],
        terminal.interrupted[rows],
        terminal.agent_id[rows],
        terminal.group_id[rows],
        terminal.group_reward[rows],
    )


def split_actions(action: ActionTuple, counts: Sequence[int]) -> list[ActionTuple]:
    """Split the actions of all agents into one `ActionTuple` for each of `counts` (a worker)."""
    if len(counts) == 1:
        return [action]
    # Workers without agents have the count 0, and get an ActionTuple without rows.
    cuts = np.cumsum(counts)[:-1]
    split = zip(
        *(np.split(part, cuts) for part in (action.continuous, action.discrete)), strict=True
    )
    return [ActionTuple(continuous, discrete) for continuous, discrete in split]


def concat_steps(
    decisions: Sequence[DecisionSteps], branches: Sequence[int]
) -> tuple[list[AnyArray], list[AnyArray] | None]:
    """Return observations and masks of all workers' agents; masks are None or [N, size] each."""
    if len(decisions) == 1:
        # The arrays of a single worker are not copied, because copies take time in every step.
        return list(decisions[0].obs), decisions[0].action_mask
    n_obs = len(decisions[0].obs)
    obs = [np.concatenate([d.obs[i] for d in decisions]) for i in range(n_obs)]
    if all(d.action_mask is None for d in decisions):
        return obs, None
    masks = [
        # A worker without masks gets masks of False, which forbid no action.
        d.action_mask or [np.zeros((len(d), size), dtype=np.bool_) for size in branches]
        for d in decisions
    ]
    return obs, [np.concatenate([mask[i] for mask in masks]) for i in range(len(branches))]
