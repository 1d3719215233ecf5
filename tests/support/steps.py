"""Agents' steps with default values for most fields, and a learner's decision on them."""

import numpy as np

from pipeline.core.steps import DecisionSteps, TerminalSteps


def decision_steps(obs, ids=None, *, masks=None, **values) -> DecisionSteps:
    """Return decision steps of N agents; by default ids are 0 to N - 1, other fields are zeros.

    `reward`, `group_id` and `group_reward` are [N] or one value for all.
    """
    return DecisionSteps(action_mask=masks, **_columns(obs, ids, **values))


def terminal_steps(obs, ids=None, *, interrupted=False, **values) -> TerminalSteps:
    """Return terminal steps of N agents; defaults as of `decision_steps`."""
    columns = _columns(obs, ids, **values)
    cut = _column(interrupted, len(columns["agent_id"]), np.bool_)
    return TerminalSteps(interrupted=cut, **columns)


def take_turn(learner, steps, *, team=""):
    """Let a learner decide on its workers' steps and store the transitions; return decisions."""
    message = learner.receive(steps, team=team)
    decided = learner.decide(message)
    learner.complete_transitions(message)
    learner.begin_transitions(message, decided)
    return decided


def _columns(obs, ids, *, reward=0.0, group_id=0, group_reward=0.0):
    agent_id = np.asarray(np.arange(len(obs[0])) if ids is None else ids, dtype=np.int32)
    n = len(agent_id)
    return {
        "obs": [np.asarray(values, dtype=np.float32) for values in obs],
        "reward": _column(reward, n, np.float32),
        "agent_id": agent_id,
        "group_id": _column(group_id, n, np.int32),
        "group_reward": _column(group_reward, n, np.float32),
    }


def _column(values, n, dtype):
    return np.full(n, values, dtype=dtype)
