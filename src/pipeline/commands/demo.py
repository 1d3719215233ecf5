"""`pipeline demo`: say what a demonstration holds, and record a built-in simulator's expert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add `info` and `record`."""
    command = parser.add_command("info", "say what a .demo file holds", info)
    command.add_argument("file", type=Path)
    command = parser.add_command(
        "record",
        "record a built-in simulator's expert",
        lambda asked: record(asked.name, asked.output, episodes=asked.episodes, seed=asked.seed),
    )
    command.add_argument("name", help="one that `pipeline env list` shows")
    command.add_argument("-o", "--output", required=True, type=Path, help="the .demo file to write")
    command.add_argument("--episodes", type=int, default=20, help="default: %(default)s")
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def info(arguments: argparse.Namespace) -> str:
    """Describe a .demo file."""
    from pipeline.protocol.demo import describe, read_demo

    return describe(read_demo(arguments.file))


def record(name: str, target: Path, *, episodes: int, seed: int) -> str:
    """Write `episodes` episodes of the expert to `target`, played in this process.

    Raises:
        SettingsError: There is no such simulator.
    """
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.simulators import registry
    from pipeline.stages.demos import write_episodes

    act = registry.expert(name)
    with InProcessEnvironment(registry.make(name, seed=seed)) as env:
        env.reset()
        metrics = write_episodes(env, act, target, episodes=episodes)
    return (
        f"Wrote {target}: {metrics['episodes']} episodes, {metrics['steps']} steps, "
        f"mean return {metrics['mean_return']:.3f}"
    )
