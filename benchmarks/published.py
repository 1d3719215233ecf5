"""Ours on environments for which others have published what their trainers reach.

    python benchmarks/published.py [--task NAME ...] [--seeds 1 2 3] [--results FOLDER] [--write]

The policies' deterministic actions are measured, as those who published did, over 100 episodes.
Runs that FOLDER already holds with the same settings are read, not repeated. --write puts the table
into docs/evidence/comparison.md. `reached` compares the mean over seeds with the least that is
asked for.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cases import Case
from catalogue import Listed
from peer import ROOT
from runs import Outcome, Runs, interval, say
from tables import put, table

from pipeline.evaluation.statistics import summarize

PAGE = ROOT / "docs/evidence/comparison.md"
ZOO = "[RL Zoo](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md)"
ZOO_AGENTS = "[RL Zoo's agents](https://github.com/DLR-RM/rl-trained-agents/tree/master/sac)"
TIANSHOU = (
    "[Tianshou](https://github.com/thu-ml/tianshou/blob/39acf2094d96268d92ebb54dcbfc3de76d702567/"
    "examples/mujoco/benchmark/HalfCheetah-v3/sac/test_rew_10seeds.csv)"
)
_HEADER = ("task", "settings", "steps", "published", "asked for", "ours", "each seed", "reached")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row: a task, and what is known of it."""

    case: Case
    """What is trained."""
    known: str
    """What others published, and where."""
    least: float
    """Mean return that is asked for."""


def task(name: str, env_id: str, file: str, **options: int) -> Case:
    """A case of Gymnasium."""
    environment = Listed(name=f"gymnasium:{env_id}", exercises="", options=options)
    return Case(
        name=name,
        file=file,
        title=f"{name.partition('_')[0].upper()}, {env_id}",
        environment=environment,
        untrained="",
        n_episodes=100,
    )


TASKS = {
    published.case.name: published
    for published in (
        Published(
            case=task("ppo_cartpole", "CartPole-v1", "config/ppo/CartPole.yaml", n_agents=8),
            known=f"500.0 after 100k ({ZOO})",
            least=500.0,
        ),
        Published(
            case=task("ppo_lunar", "LunarLander-v3", "config/ppo/LunarLander.yaml"),
            known=f"242.1, of LunarLander-v2, after 1M ({ZOO})",
            least=200.0,
        ),
        Published(
            case=task("sac_pendulum", "Pendulum-v1", "config/sac/Pendulum.yaml", n_agents=1),
            known=f"-157.0 after 20k ({ZOO})",
            least=-180.0,
        ),
        Published(
            case=task("sac_cheetah", "HalfCheetah-v5", "config/sac/HalfCheetah.yaml", n_agents=1),
            known="of HalfCheetah-v3 after 100k, of which 10k before learning: 6212.8, ten runs "
            f"from 5461.5 to 6823.4 ({TIANSHOU}); 4960.8, one run ({ZOO_AGENTS})",
            least=5461.5,
        ),
    )
}


def main() -> None:
    """Run what is missing, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, help="kept between calls; a new one if not given")
    parser.add_argument("--sources", type=Path, default=ROOT / "src")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    folder = options.results or Path(tempfile.mkdtemp())
    rows = []
    for name in options.task:
        runs = Runs(TASKS[name].case, folder, steps=None, sources=options.sources)
        outcomes = [runs.outcome("ours", seed) for seed in options.seeds]
        rows.append(row(TASKS[name], runs.max_steps, outcomes))
        say(table(_HEADER, rows[-1:]).splitlines()[-1])
    if options.write:
        put(PAGE, "published", _HEADER, rows, keep=True)


def row(published: Published, steps: int, found: list[Outcome]) -> list[str]:
    """The cells of one task."""
    returns = [run.deterministic for run in found]
    summary = summarize(returns)
    return [
        published.case.title,
        f"`{published.case.file}`",
        f"{steps:,}",
        published.known,
        f"{published.least:g}",
        interval(summary, 1),
        " / ".join(f"{value:.1f}" for value in returns),
        "yes" if summary.mean >= published.least else "**no**",
    ]


if __name__ == "__main__":
    main()
