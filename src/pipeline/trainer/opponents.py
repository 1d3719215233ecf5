"""Snapshots of a behavior's policy, their ELO ratings, and opponents that use the snapshots.

The rules follow ML-Agents' `self_play`; docs/how-to/self-play.md describes them.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import seeding
from pipeline.algos.policy import Decision, Policy, generator_for, restore_generator
from pipeline.core.arrays import AnyArray, BoolArray, FloatArray
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.settings.trainer.schema import SelfPlaySettings

Weights = dict[str, Tensor]

LATEST = -1
"""Index of the learning policy's rating."""
SCALE = 400.0
"""Rating difference at which the better player is expected to score 10 points in 11 games."""


class Opponent:
    """Acts for one team with frozen weights, at first a copy of the weights of `policy`."""

    def __init__(self, policy: Policy, *, seed: int, device: torch.device, team: str) -> None:
        self.policy = copy.deepcopy(policy).requires_grad_(requires_grad=False)
        self.rating_index = LATEST
        """Index of the opponent's rating in `SnapshotPool.ratings`."""
        self._stream = generator_for(seed, device, "opponent actions", team)

    def act(
        self,
        obs: Sequence[FloatArray],
        mask: Sequence[BoolArray] | None,
        memory: FloatArray | None = None,
    ) -> Decision:
        """Choose actions for N agents as `Policy.act` does; `memory` [N, M] may be longer."""
        n = self.policy.memory_size
        # A learner's memory may also have the critic's part, after the policy's part.
        recalled = memory[:, :n] if n and memory is not None else None
        return self.policy.act(obs, mask, self._stream, recalled)

    def play(self, weights: Mapping[str, Tensor], rating_index: int) -> None:
        """Act with a copy of `weights` from now on; `rating_index` is the index of their rating."""
        # load_state_dict copies, so further learning does not change the opponent.
        self.policy.load_state_dict(weights)
        self.rating_index = rating_index

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the weights: the ring of snapshots may not have them any more."""
        return {
            "weights": copied(self.policy.state_dict()),
            "drawn": self.rating_index,
            "stream": self._stream.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.play(state["weights"], int(state["drawn"]))
        restore_generator(self._stream, state["stream"])


class SnapshotPool:
    """A ring of snapshots of a behavior's policy, their ratings, and the present opponents.

    `policy()` returns the policy that acts for the learning team now.

    Attributes:
        opponents: the opponents that act for teams that do not learn, by the behavior's qualified
            name.
        ratings: rating of each snapshot in the ring; the last item is the learning policy's rating.
        ghost_steps: number of decisions that opponents have made.
        last_save: trainer step of the last snapshot.
        last_change: trainer step at which another team began to learn.
        last_swap: value of `ghost_steps` when opponents were last drawn.
    """

    def __init__(
        self,
        policy: Callable[[], Policy],
        settings: SelfPlaySettings,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.settings = settings
        self.snapshots: list[Weights] = []
        self.ratings = [float(settings.initial_elo)] * (settings.window + 1)
        self.opponents: dict[str, Opponent] = {}
        self.games = UnfinishedGames()
        self.ghost_steps = 0
        self.last_save = 0
        self.last_change = 0
        self.last_swap = 0
        self._policy = policy
        self._opponent_by_team: dict[str, Opponent] = {}
        self._next = 0
        self._seed = seed
        self._device = device
        self._stream = seeding.stream(seed, "opponents")

    @property
    def rating(self) -> float:
        """Rating of the learning policy."""
        return self.ratings[LATEST]

    def save_if_due(self, step: int) -> None:
        """Take a snapshot if there is none, or the last one is over `save_steps` steps old."""
        # The first snapshot is taken at once, because opponents are drawn before the first step.
        if not self.snapshots or step - self.last_save > self.settings.save_steps:
            self._save()
            self.last_save = step

    def is_team_change_due(self, step: int) -> bool:
        """Return whether the learning team has learned for more than `team_change` steps."""
        return step - self.last_change > self.settings.team_change

    @property
    def is_swap_due(self) -> bool:
        """Whether opponents have made over `swap_steps` decisions since they were drawn."""
        return self.ghost_steps - self.last_swap > self.settings.swap_steps

    def swap(self, teams: Sequence[str]) -> None:
        """Let opponents with drawn weights act for `teams` (qualified names); other teams learn."""
        self.opponents = {team: self._opponent_of(team) for team in teams}
        for opponent in self.opponents.values():
            self._draw(opponent)
        self.last_swap = self.ghost_steps

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshots, ratings, opponents and counts."""
        return {
            "snapshots": list(self.snapshots),  # not copied: snapshots never change
            "ratings": list(self.ratings),
            "next": self._next,
            "ghost_steps": self.ghost_steps,
            "last_save": self.last_save,
            "last_change": self.last_change,
            "last_swap": self.last_swap,
            "opponents": {
                team: opponent.state_dict() for team, opponent in self._opponent_by_team.items()
            },
            "playing": list(self.opponents),
            "stream": self._stream.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        If the setting `window` has become smaller, only the newest snapshots are kept.
        """
        self.snapshots = list(state["snapshots"])
        self.ratings = [float(rating) for rating in state["ratings"]]
        self._next = int(state["next"]) % (len(self.ratings) - 1)
        for team, opponent_state in state["opponents"].items():
            self._opponent_of(team).load_state_dict(opponent_state)
        self.opponents = {team: self._opponent_by_team[team] for team in state["playing"]}
        for name in ("ghost_steps", "last_save", "last_change", "last_swap"):
            setattr(self, name, int(state[name]))
        self._stream.bit_generator.state = state["stream"]
        if len(self.ratings) != self.settings.window + 1:
            self._fit_window()

    def _fit_window(self) -> None:
        """Keep the newest snapshots of a ring that was saved with another `window`."""
        window, size = self.settings.window, len(self.ratings) - 1
        # In a full ring the oldest snapshot is at `_next`; in a ring with free places it is first.
        first = self._next if len(self.snapshots) == size else 0
        newest = [(first + i) % size for i in range(len(self.snapshots))][-window:]
        for opponent in self._opponent_by_team.values():
            # An opponent whose snapshot is dropped gets the rating of the oldest kept snapshot.
            if opponent.rating_index != LATEST:
                opponent.rating_index = (
                    newest.index(opponent.rating_index) if opponent.rating_index in newest else 0
                )
        places = [self.ratings[i] for i in newest]
        unused = [float(self.settings.initial_elo)] * (window - len(newest))
        self.snapshots = [self.snapshots[i] for i in newest]
        self.ratings = [*places, *unused, self.rating]
        self._next = len(newest) % window

    def _opponent_of(self, team: str) -> Opponent:
        if team not in self._opponent_by_team:
            self._opponent_by_team[team] = Opponent(
                self._policy(), seed=self._seed, device=self._device, team=team
            )
        return self._opponent_by_team[team]

    def _draw(self, opponent: Opponent) -> None:
        if self._stream.random() < self.settings.play_against_latest_model_ratio:
            opponent.play(self._policy().state_dict(), LATEST)
        else:
            index = int(self._stream.integers(len(self.snapshots)))
            opponent.play(self.snapshots[index], index)

    def _save(self) -> None:
        weights = copied(self._policy().state_dict())
        if len(self.snapshots) < self.settings.window:
            self.snapshots.append(weights)
        else:
            self.snapshots[self._next] = weights
        # A snapshot begins with the rating of the policy that it is a copy of.
        self.ratings[self._next] = self.rating
        self._next = (self._next + 1) % self.settings.window


def copied(weights: Mapping[str, Tensor]) -> Weights:
    """Return copies of the tensors, so that training does not change them."""
    return {name: value.clone() for name, value in weights.items()}


def expected_score(rating: float, opponent: float) -> float:
    """Return the expected score in (0, 1) against `opponent` (Elo, The Rating of Chessplayers)."""
    return float(1.0 / (1.0 + 10.0 ** ((opponent - rating) / SCALE)))


def results(terminal: TerminalSteps) -> AnyArray:
    """Return the score of each ended agent, float [N]: 1 for a win, 0.5 for a draw, 0 for a loss.

    The sign of the agent's last reward (individual plus group reward) decides, as in ML-Agents.
    """
    last = terminal.reward + terminal.group_reward
    # The sign is 1, 0 or -1, which becomes 1, 0.5 or 0.
    won: AnyArray = 0.5 * (1.0 + np.sign(last))
    return won


class UnfinishedGames:
    """The agents that still play, by source (a team of one worker) and group.

    A game is over when its group's last agent has ended.
    """

    def __init__(self) -> None:
        self._alive: dict[Hashable, tuple[AnyArray, AnyArray]] = {}

    def is_game_over(self, source: Hashable, terminal: TerminalSteps) -> BoolArray:
        """Return for each ended agent, bool [N], whether all agents of its group have ended."""
        known = self._alive.get(source)
        if known is None:
            return np.ones(len(terminal), dtype=np.bool_)
        ids, groups = known
        # All agents that end in the message are removed first: the last agents of a group may end
        # together.
        left = ~np.isin(ids, terminal.agent_id)
        self._alive[source] = ids[left], groups[left]
        over: BoolArray = (terminal.group_id == 0) | ~np.isin(terminal.group_id, groups[left])
        return over

    def record(self, source: Hashable, decision: DecisionSteps) -> None:
        """Record agents that ask for a decision."""
        known = self._alive.get(source)
        # Agents without groups are not recorded: each end of an episode is then the end of a game.
        if known is None and not decision.group_id.any():
            return
        if known is None:
            self._alive[source] = decision.agent_id.copy(), decision.group_id.copy()
            return
        ids, groups = known
        if np.array_equal(ids, decision.agent_id) and np.array_equal(groups, decision.group_id):
            return
        # Earlier entries of the message's agents are replaced: an agent may change its group.
        is_other = ~np.isin(ids, decision.agent_id)
        self._alive[source] = (
            np.concatenate((ids[is_other], decision.agent_id)),
            np.concatenate((groups[is_other], decision.group_id)),
        )

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Drop the agents of every source (a team of one worker) for which `gone` returns True."""
        self._alive = {source: agents for source, agents in self._alive.items() if not gone(source)}

    def state_dict(self) -> list[dict[str, object]]:
        """Return the agents that still play, as plain values and arrays."""
        return [
            {"source": source, "ids": ids.copy(), "groups": groups.copy()}
            for source, (ids, groups) in self._alive.items()
        ]

    def load_state_dict(self, state: list[dict[str, AnyArray]]) -> None:
        """Restore a state that `state_dict` returned."""
        self._alive = {entry["source"]: (entry["ids"], entry["groups"]) for entry in state}  # type: ignore[misc]  # sources are hashable
