"""ELO ratings of a policy and of its snapshots, and when a group's game is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from pipeline.arrays import AnyArray, BoolArray
    from pipeline.protocol.steps import DecisionSteps, TerminalSteps

SCALE = 400.0
"""Rating points by which one is ahead who wins ten games of eleven."""


def expected_score(rating: float, opponent: float) -> float:
    """Mean result to expect against `opponent`, in (0, 1) (Elo 1978)."""
    return float(1.0 / (1.0 + 10.0 ** ((opponent - rating) / SCALE)))


def results(terminal: TerminalSteps) -> AnyArray:
    """[N] 1 for a game that was won, 0.5 for a draw, 0 for a loss: by the sign of the last reward.

    Args:
        terminal: the last steps of N agents; individual and group reward are added.
    """
    last = terminal.reward + terminal.group_reward
    won: AnyArray = 0.5 * (1.0 + np.sign(last))
    return won


class Groups:
    """Who of each group still plays: a game is over when the last of a group's agents has ended.

    A source is where agents come from: a team of one worker.
    """

    def __init__(self) -> None:
        self._alive: dict[Hashable, tuple[AnyArray, AnyArray]] = {}

    def whole(self, source: Hashable, terminal: TerminalSteps) -> BoolArray:
        """[N] whether no mate of these agents plays on; True for an agent without a group."""
        known = self._alive.get(source)
        if known is None:
            return np.ones(len(terminal), dtype=np.bool_)
        ids, groups = known
        left = ~np.isin(ids, terminal.agent_id)
        self._alive[source] = ids[left], groups[left]
        over: BoolArray = (terminal.group_id == 0) | ~np.isin(terminal.group_id, groups[left])
        return over

    def plays(self, source: Hashable, decision: DecisionSteps) -> None:
        """Take note of agents that ask for a decision."""
        known = self._alive.get(source)
        if known is None and not decision.group_id.any():
            return
        if known is None:
            self._alive[source] = decision.agent_id.copy(), decision.group_id.copy()
            return
        ids, groups = known
        if np.array_equal(ids, decision.agent_id) and np.array_equal(groups, decision.group_id):
            return
        others = ~np.isin(ids, decision.agent_id)
        self._alive[source] = (
            np.concatenate((ids[others], decision.agent_id)),
            np.concatenate((groups[others], decision.group_id)),
        )

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Drop the agents of every source that is `gone`."""
        self._alive = {source: one for source, one in self._alive.items() if not gone(source)}

    def state_dict(self) -> list[dict[str, object]]:
        """Who plays, as plain values and arrays."""
        return [
            {"source": source, "ids": ids.copy(), "groups": groups.copy()}
            for source, (ids, groups) in self._alive.items()
        ]

    def load_state_dict(self, state: list[dict[str, AnyArray]]) -> None:
        """Take up what `state_dict` gave."""
        self._alive = {one["source"]: (one["ids"], one["groups"]) for one in state}  # type: ignore[misc]  # sources are hashable
