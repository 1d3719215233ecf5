"""`pipeline evaluate`: episodes of one ONNX policy in any executable."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline evaluate`."""
    parser.add_argument("model", type=Path, help="the .onnx file, named like its behavior")
    parser.add_argument("--env", type=Path, required=True, help="executable")
    parser.add_argument("--episodes", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--env-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to the executable"
    )


def run(arguments: argparse.Namespace) -> str:
    """Play, and return a line for each behavior.

    Raises:
        PipelineError: The model cannot be run, or the environment cannot be used.
    """
    from pipeline.stages.evaluate import metrics_of, play
    from pipeline.stages.shared.executable import Build

    model: Path = arguments.model
    build = Build(file=arguments.env, args=tuple(arguments.env_args), simulator=None)
    episodes = play({model.stem: model}, build, episodes=arguments.episodes, seed=arguments.seed)
    return "\n".join(
        f"{behavior}: {one['episodes']} episodes, mean return {one['mean_return']:.3f} "
        f"({one['min_return']:.3f} to {one['max_return']:.3f}), "
        f"mean length {one['mean_length']:.1f}"
        for behavior, one in metrics_of(episodes).items()
    )
