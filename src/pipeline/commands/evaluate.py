"""`pipeline evaluate`: episodes of one ONNX policy in any environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline evaluate`."""
    parser.add_argument("model", type=Path, help="the .onnx file, named like its behavior")
    parser.add_argument(
        "--env",
        required=True,
        metavar="NAME",
        help="a path, balance_ball, gymnasium:ID, pettingzoo:ID or module:function",
    )
    parser.add_argument("--episodes", type=int, default=100, help="default: %(default)s")
    # Far from the small seeds of training, so that no episode begins like a training episode.
    parser.add_argument("--seed", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument(
        "--video",
        type=Path,
        metavar="FILE",
        help="film an episode as .gif, or as .mp4 with the extra 'video': played once more here, "
        "where a simulator or an environment of Gymnasium or PettingZoo can be drawn",
    )
    parser.add_argument(
        "--video-episode",
        choices=("median", "best"),
        default="median",
        help="which by its return; default: %(default)s",
    )
    parser.add_argument(
        "--env-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to the executable"
    )


def run(arguments: argparse.Namespace) -> str:
    """Play, and return a line for each behavior."""
    from pipeline.evaluation.video import choose
    from pipeline.export.policy import OnnxPolicy
    from pipeline.stages.evaluate import metrics_of, play
    from pipeline.stages.shared.executable import Build
    from pipeline.stages.shared.named_env import executable_of

    model: Path = arguments.model
    OnnxPolicy(model)  # refuses a broken file before an environment is built
    program = executable_of(arguments.env)
    build = Build(file=program, args=tuple(arguments.env_args), simulator=None)
    target: Path | None = arguments.video
    episodes = play(
        {model.stem: model},
        build,
        episodes=arguments.episodes,
        seed=arguments.seed,
        videos=None if target is None else {arguments.video_episode: target},
    )
    lines = [
        f"{behavior}: {metrics['episodes']} episodes, mean return {metrics['mean_return']:.3f} "
        f"({metrics['min_return']:.3f} to {metrics['max_return']:.3f}), "
        f"mean length {metrics['mean_length']:.1f}"
        for behavior, metrics in metrics_of(episodes).items()
    ]
    if target is not None:
        episode = choose(episodes)[arguments.video_episode]
        lines.append(
            f"{target}: the {arguments.video_episode} episode of {episode.behavior}, number "
            f"{episode.index}, return {episode.episode_return:.3f}, {episode.length} steps"
        )
    return "\n".join(lines)
