"""The tasks on which ours and `mlagents-learn` are compared: environment, settings, measure.

Settings lie in `benchmarks/cases/`, one file each, in ML-Agents' format, `max_steps` included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from catalogue import Listed
from peer import ROOT

from pipeline.cli.demo import record

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the comparison."""

    name: str
    """On the command line."""
    file: str
    """Its settings, from the repository's root."""
    title: str
    """Part of the trainer that it exercises."""
    environment: Listed
    """Where it trains; `solved` is the return of a perfect policy."""
    untrained: str
    """Return of uniformly random actions."""
    n_episodes: int = 400
    """Of the final policy, in one measurement."""
    at_once: int | None = None
    """Agents that play side by side in a measurement; None for as many as in training."""
    n_demonstrations: int = 0
    """Episodes of the scripted expert that it learns from."""
    duel: bool = False
    """Whether the measure is playing against the scripted opponent, from both sides."""

    def settings(
        self, max_steps: int | None = None, demo: Path | None = None, *, threaded: bool = False
    ) -> dict[str, Any]:
        """Its trainer configuration, for `max_steps` if given, and with `demo` as its examples."""
        content: dict[str, Any] = yaml.safe_load((ROOT / self.file).read_text())
        for behavior in content["behaviors"].values():
            if max_steps is not None:
                behavior["max_steps"] = max_steps
            if threaded:
                behavior["threaded"] = True
            for part in (*behavior["reward_signals"].values(), behavior.get("behavioral_cloning")):
                if part and "demo_path" in part:
                    part["demo_path"] = str(demo)
        return content

    def demonstrations(self, folder: Path) -> Path | None:
        """A file of demonstrations in `folder`; None for a case that has none."""
        if not self.n_demonstrations:
            return None
        target = folder / "expert.demo"
        if not target.exists():
            record(self.environment.name, target, episodes=self.n_demonstrations, seed=1)
        return target


CASES = {
    case.name: case
    for case in (
        Case(
            name="ppo",
            file="benchmarks/cases/ppo.yaml",
            title="PPO",
            environment=Listed(name="balance_ball", exercises="continuous", solved="100"),
            untrained="1.8",
            at_once=100,
        ),
        Case(
            name="sac",
            file="benchmarks/cases/sac.yaml",
            title="SAC",
            environment=Listed(name="balance_ball", exercises="continuous", solved="100"),
            untrained="1.8",
            n_episodes=1200,
            at_once=100,
        ),
        Case(
            name="sac_pendulum",
            file="config/sac/Pendulum.yaml",
            title="SAC, pendulum",
            environment=Listed(
                name="gymnasium:Pendulum-v1", exercises="continuous", solved="about -145"
            ),
            untrained="-1266",
        ),
        Case(
            name="lstm",
            file="benchmarks/cases/lstm.yaml",
            title="PPO + LSTM",
            environment=Listed(
                name="gymnasium:recall_env:Recall-v0", exercises="memory", solved="1"
            ),
            untrained="0.25",
        ),
        Case(
            name="rnd",
            file="benchmarks/cases/rnd.yaml",
            title="PPO + RND",
            environment=Listed(
                name="gymnasium:locking:Lock-v0", exercises="sparse reward", solved="0.969"
            ),
            untrained="0.00",
            n_episodes=4000,
        ),
        Case(
            name="gail_bc",
            file="benchmarks/cases/gail_bc.yaml",
            title="PPO + GAIL + BC",
            environment=Listed(name="pyramids", exercises="demonstrations", solved="1.82"),
            untrained="-1.00",
            n_demonstrations=50,
        ),
        Case(
            name="poca",
            file="benchmarks/cases/poca.yaml",
            title="POCA",
            environment=Listed(name="push_together", exercises="groups", solved="1.32"),
            untrained="-0.02",
            n_episodes=1200,
        ),
        Case(
            name="self_play",
            file="benchmarks/cases/self_play.yaml",
            title="PPO + self-play",
            environment=Listed(name="pong", exercises="two teams", solved="0"),
            untrained="-0.98",
            duel=True,
        ),
    )
}
