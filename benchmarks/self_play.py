"""Does self-play make better players? Train a game, then let checkpoints play each other.

    python benchmarks/self_play.py [pong | tag] [--steps N | --full] [--seed N] [--games N]
        [--results FOLDER]

Trains with `config/ppo/Pong.yaml` or `Tag.yaml` (`--config` for another file), but for --steps
agent steps, unless --full, and with a checkpoint after each fifth of them; several behaviors take
turns after a quarter of them at most. Then prints, for the first side's
players in rows and the second side's in columns, the share of decided games that the first side
wins, with its 95 % interval (Wilson 1927) and the number of decided games. Beside the checkpoints
play `random`, uniform over all actions, and `scripted`, the environment's own expert. Actions are
sampled, as in training. A group that wins or loses together counts as one game.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scores import Random, Scripted, action_specs

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.evaluation.episodes import evaluate
from pipeline.export.policy import OnnxPolicy
from pipeline.settings import load_run_settings
from pipeline.simulators import registry
from pipeline.tracking.console import ConsoleSink

if TYPE_CHECKING:
    from pipeline.evaluation.episodes import ActingPolicy, Episode
    from pipeline.settings import RunSettings, TrainerSettings
    from pipeline.settings.trainer.schema import SelfPlaySettings

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATIONS = {"pong": "config/ppo/Pong.yaml", "tag": "config/ppo/Tag.yaml"}
N_CHECKPOINTS, N_SUMMARIES = 5, 10
N_TURNS = 4
Z = 1.959964
"""97.5 % quantile of the normal distribution."""
_KNOWN = (Random.kind, Scripted.kind)


def main() -> None:
    """Train, unless the folder holds a run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("simulator", nargs="?", choices=CONFIGURATIONS, default="pong")
    parser.add_argument("--config", type=Path, default=None)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=200_000, help="agent steps of each behavior")
    length.add_argument("--full", action="store_true", help="as many as the file says")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--games", type=int, default=400, help="of each pair of players")
    parser.add_argument("--results", type=Path, default=None)
    options = parser.parse_args()
    if options.steps < N_SUMMARIES:
        parser.error(f"--steps {options.steps}: expected at least {N_SUMMARIES}")
    folder = options.results or Path(tempfile.mkdtemp())
    source = options.config or ROOT / CONFIGURATIONS[options.simulator]
    if not list(folder.glob("*.onnx")):
        settings = adapted(source, None if options.full else options.steps)
        train(options.simulator, settings, options.seed, folder)
    report(options.simulator, folder, n_games=options.games, seed=options.seed)


def adapted(source: Path, steps: int | None) -> RunSettings:
    """The settings of a file, for `steps` if given, with all checkpoints kept."""
    settings = load_run_settings(source)
    n_turns = N_TURNS if len(settings.behaviors) > 1 else 1
    behaviors = {}
    for name, behavior in settings.behaviors.items():
        n_steps = behavior.max_steps if steps is None else steps
        behaviors[name] = replace(
            behavior,
            max_steps=n_steps,
            checkpoint_interval=n_steps // N_CHECKPOINTS,
            keep_checkpoints=0,
            summary_freq=n_steps // N_SUMMARIES,
            self_play=turns(behavior, n_steps // n_turns),
        )
    return replace(settings, behaviors=behaviors)


def turns(settings: TrainerSettings, longest: int) -> SelfPlaySettings | None:
    """Self-play with turns of `longest` steps at most."""
    self_play = settings.self_play
    if self_play is None:
        return None
    return replace(self_play, team_change=min(self_play.team_change, longest))


def train(name: str, settings: RunSettings, seed: int, folder: Path) -> None:
    """One run, with an ONNX beside each checkpoint."""
    pipeline.train(
        InProcessEnvironment(registry.make(name, seed=seed)),
        settings,
        seed=seed,
        run_dir=folder,
        sinks=[ConsoleSink()],
        export=True,
    )


def report(name: str, folder: Path, *, n_games: int, seed: int) -> None:
    """Print the win rates of all pairs of players."""
    sides = list(action_specs(name))
    rows, columns = (choices(folder, side) for side in sides)
    sys.stdout.write(f"share of decided games that {sides[0]} wins against {sides[1]}\n")
    sys.stdout.write(f"{'':>12}" + "".join(f"{column:>26}" for column in columns) + "\n")
    for row in rows:
        cells = []
        for column in columns:
            players = {
                sides[0]: player(name, folder, sides[0], row),
                sides[1]: player(name, folder, sides[1], column),
            }
            with InProcessEnvironment(registry.make(name, seed=seed + 1000)) as env:
                episodes = evaluate(env, players, episodes=n_games, seed=seed, deterministic=False)
            won, decided = score([episode for episode in episodes if episode.behavior == sides[1]])
            low, high = wilson(won, decided)
            share = won / decided if decided else math.nan
            cells.append(f"{share:8.2f} [{low:.2f}, {high:.2f}] {decided:>4}")
        sys.stdout.write(f"{row:>12}" + "".join(f"{cell:>26}" for cell in cells) + "\n")
        sys.stdout.flush()


def choices(folder: Path, side: str) -> list[str]:
    """Names of the players of a side: the known ones, then the steps of its checkpoints."""
    behavior = side.partition("?")[0]
    steps = sorted(
        int(path.stem.removeprefix(f"{behavior}-"))
        for path in (folder / behavior).glob(f"{behavior}-*.onnx")
        if path.stem.removeprefix(f"{behavior}-").isdigit()
    )
    return [*_KNOWN, *(str(step) for step in steps)]


def player(name: str, folder: Path, side: str, choice: str) -> ActingPolicy:
    """Return the player of a side."""
    behavior = side.partition("?")[0]
    if choice == Random.kind:
        return Random(action_specs(name)[side])
    if choice == Scripted.kind:
        return Scripted(name, side)
    return OnnxPolicy(folder / behavior / f"{behavior}-{choice}.onnx")


def score(episodes: list[Episode]) -> tuple[int, int]:
    """Games that the other side won, and games that had a winner, from one side's episodes."""
    lost = sum(episode.episode_return < 0 for episode in episodes)
    return lost, lost + sum(episode.episode_return > 0 for episode in episodes)


def wilson(won: int, n: int) -> tuple[float, float]:
    """95 % interval of a share."""
    if n == 0:
        return 0.0, 1.0
    share, spread = won / n, Z * Z / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(centre - half, 0.0), min(centre + half, 1.0)


if __name__ == "__main__":
    main()
