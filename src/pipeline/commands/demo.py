"""`pipeline demo record`: a built-in simulator's expert, played in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.stages.demos import write_episodes

if TYPE_CHECKING:
    from pathlib import Path


def record(name: str, target: Path, *, episodes: int, seed: int) -> str:
    """Write `episodes` episodes of the expert to `target`.

    Raises:
        SettingsError: There is no such simulator.
    """
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.simulators import registry

    act = registry.expert(name)
    with InProcessEnvironment(registry.make(name, seed=seed)) as env:
        env.reset()
        metrics = write_episodes(env, act, target, episodes=episodes)
    return (
        f"Wrote {target}: {metrics['episodes']} episodes, {metrics['steps']} steps, "
        f"mean return {metrics['mean_return']:.3f}"
    )
