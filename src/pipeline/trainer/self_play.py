"""Self-play: one team learns at a time; the other teams play with snapshots of past policies.

A team is all behaviors with the same `?team=`. In a symmetric game the teams share one behavior,
and one learner; in an asymmetric game each team has its own behaviors. docs/how-to/self-play.md
describes the schedule and the ratings.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.steps import Steps, TerminalSteps
from pipeline.trainer.learner import Learner
from pipeline.trainer.opponents import SnapshotPool, expected_score, results

_log = logging.getLogger(__name__)

# After this many environment steps, a warning says that there is no second team.
_STEPS_TO_SHOW_UP = 20


class SelfPlay:
    """Decides which team learns, draws its opponents, and rates the games.

    The training loop calls `join` when a behavior appears, `on_step` with each step of the
    behavior, and `advance` between two steps. `learning` is the id of the learning team; None
    before a team has joined.
    """

    def __init__(self) -> None:
        self.learning: int | None = None
        self._order: list[int] = []
        self._members: dict[int, dict[str, Learner]] = {}
        self._n_steps = 0

    def join(self, qualified: str, learner: Learner) -> None:
        """Add a learner's agents in one team; the first team that is added learns first."""
        team = team_of(qualified)
        if learner.snapshot_pool is None:
            if team != 0 and learner.learns and learner.settings.self_play is None:
                _log.warning(
                    "%s plays for a team other than team 0, but behaviors.%s has no self_play, so "
                    "all teams learn at the same time. If the teams play against each other, add "
                    "self_play: without it, the policies may not improve steadily.",
                    qualified,
                    learner.name,
                )
            return
        if team not in self._order:
            self._order.append(team)
        if self.learning is None:
            self.learning = team
        self._members.setdefault(team, {})[qualified] = learner
        # Opponents are drawn from the snapshots, so there must be a snapshot before the first step.
        learner.snapshot_pool.save_if_due(learner.step)
        playing = learner.snapshot_pool.opponents
        ghosts = self._ghosts(learner)
        # A resumed run has restored its opponents, also for teams that join later. New opponents
        # are drawn only if one is missing, or if the learning team is played by an opponent.
        if not playing.keys() >= set(ghosts) or self.learning in map(team_of, playing):
            learner.snapshot_pool.swap(ghosts)

    def on_step(self, qualified: str, learner: Learner, steps: Sequence[Steps]) -> None:
        """Rate the games that have ended, or count the decisions if opponents act for this team."""
        past = learner.snapshot_pool
        if past is None:
            return
        if qualified in past.opponents:
            # ML-Agents calls opponents ghosts; `swap_steps` counts their decisions.
            past.ghost_steps += sum(len(decision) for decision, _ in steps)
            return
        for worker, (decision, terminal) in enumerate(steps):
            # Ended games come first, because an ended agent may begin its next game at once.
            if len(terminal):
                over = past.games.is_game_over((qualified, worker), terminal)
                # An interrupted game has no result.
                self._rate(past, terminal, over & ~terminal.interrupted)
            past.games.record((qualified, worker), decision)

    def advance(self) -> bool:
        """Take a snapshot, change the learning team, and draw opponents, whichever is due.

        Returns whether the team has changed, so that the environments must be reset.
        """
        if self.learning is None:
            return False
        self._n_steps += 1
        if self._n_steps == _STEPS_TO_SHOW_UP and len(self._order) == 1:
            self._warn_of_missing()
        for learner in self._learners():
            _pool_of(learner).save_if_due(learner.step)
        changed = self._is_team_change_due()
        if changed:
            self._change()
        for learner in self._learners():
            if changed or _pool_of(learner).is_swap_due:
                _pool_of(learner).swap(self._ghosts(learner))
        return changed

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the learning team and the ids of all teams in their order."""
        return {"learning": self.learning, "order": list(self._order)}

    def restore(self, run: Mapping[str, Any]) -> None:
        """Restore the self-play state of a saved run, if the run has saved such a state."""
        state = run.get("self_play")
        if state is not None and state["learning"] is not None:
            self.learning = int(state["learning"])
            self._order = [int(team) for team in state["order"]]

    def _rate(self, past: SnapshotPool, terminal: TerminalSteps, counted: Any) -> None:
        """Update the ratings of a policy and its opponents for each agent whose game is over."""
        for result in results(terminal)[counted].tolist():
            rivals = [
                (pool, opponent.rating_index)
                for learner in self._learners()
                for pool in [_pool_of(learner)]
                for opponent in pool.opponents.values()
            ]
            if not rivals:
                return
            mean = sum(pool.ratings[rating_index] for pool, rating_index in rivals) / len(rivals)
            # Elo's update with K = 1, against the mean rating of the opponents.
            change = result - expected_score(past.rating, mean)
            past.ratings[-1] += change
            for pool, rating_index in rivals:
                # Opponents share the opposite change, so that the sum of all ratings stays equal.
                pool.ratings[rating_index] -= change / len(rivals)

    def _learners(self) -> list[Learner]:
        """Return all learners with self-play, each once, in the order in which they joined."""
        learners: dict[str, Learner] = {}
        for members in self._members.values():
            learners.update((learner.name, learner) for learner in members.values())
        return list(learners.values())

    def _ghosts(self, learner: Learner) -> list[str]:
        """Return the qualified names of this learner's agents in teams that do not learn now."""
        return [
            qualified
            for team, members in self._members.items()
            for qualified, member in members.items()
            if member is learner and team != self.learning
        ]

    def _is_team_change_due(self) -> bool:
        if not self._members or self.learning is None or self._next_team() == self.learning:
            return False
        learners = self._members.get(self.learning, {}).values()
        # If the learning team has reached max_steps, a team that has not reached it learns next.
        if all(learner.finished for learner in learners):
            return not self._finished(self._next_team())
        return any(_pool_of(learner).is_team_change_due(learner.step) for learner in learners)

    def _finished(self, team: int) -> bool:
        return all(learner.finished for learner in self._members[team].values())

    def _next_team(self) -> int:
        """Return the next team that is not finished; if all are finished, the next in order."""
        present = [team for team in self._order if team in self._members]
        at = present.index(self.learning) if self.learning in present else -1
        following = [*present[at + 1 :], *present[: at + 1]]
        return next((team for team in following if not self._finished(team)), following[0])

    def _change(self) -> None:
        self.learning = self._next_team()
        for learner in self._learners():
            # The step is set in all pools, because each team's `team_change` counts from here.
            _pool_of(learner).last_change = learner.step
        names = ", ".join(self._members[self.learning])
        _log.debug("Now team %d learns (%s).", self.learning, names)

    def _warn_of_missing(self) -> None:
        _log.warning(
            "self_play is set, but the environment has shown only one team in %d steps (%s), so "
            "there are no opponents. A game needs agents with another ?team=, and their behavior "
            "needs self_play too.",
            self._n_steps,
            ", ".join(name for members in self._members.values() for name in members),
        )


def team_of(qualified: str) -> int:
    """Return the team's id in a name `<name>?team=<id>`; 0 if the name has no team."""
    _, _, query = qualified.partition("?")
    for part in query.split("&"):
        key, _, value = part.partition("=")
        if key == "team" and value.lstrip("-").isdigit():
            return int(value)
    return 0


def _pool_of(learner: Learner) -> SnapshotPool:
    if learner.snapshot_pool is None:
        raise ValueError(f"{learner.name} has no self-play")
    return learner.snapshot_pool
