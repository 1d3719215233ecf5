"""The `demos` stage: episodes of the simulator's expert, recorded as a `.demo` file."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.errors import StageError
from pipeline.settings.params import load_params
from pipeline.settings.plan import check_plan
from pipeline.stages import common, executable, process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.envs.base import BaseEnv
    from pipeline.protocol.demo import Demonstration, DemoWriter
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import DecisionSteps


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a name under `demonstrations` in params.yaml")
    arguments = parser.parse_args(argv)
    return process.run(lambda: record_named(arguments.name, common.checkout()))


def record_named(name: str, root: Path) -> None:
    """Make `data/demos/<name>.demo` and its metrics."""
    params = load_params(root / "params.yaml")
    check_plan(params, root / "workflow/runs.yaml")
    wanted = common.named(params.demonstrations, name, "demonstrations")
    if wanted.file is not None:
        take(name, Path(wanted.file), root)
        return
    if wanted.environment is None or wanted.episodes is None or wanted.seed is None:
        raise StageError(f"params.yaml: demonstrations.{name} names neither a file nor episodes")
    built = executable.folder_of(wanted.environment)
    job = common.Job(
        stage="demos",
        instance=name,
        params={
            "environment": wanted.environment,
            "policy": wanted.policy,
            "episodes": wanted.episodes,
            "seed": wanted.seed,
        },
        inputs=(built,),
        outputs=(Path(f"data/demos/{name}.demo"), Path(f"results/demos/{name}.json")),
    )
    with common.attempt(job, root) as attempt:
        metrics = record(
            executable.load(root / built),
            attempt.out(f"{name}.demo"),
            episodes=wanted.episodes,
            seed=wanted.seed,
            log_folder=attempt.run,
        )
        files.write_json(attempt.out(f"{name}.json"), metrics)


def take(name: str, file: Path, root: Path) -> None:
    """Make the same of a `.demo` file that is there already, after reading all of it."""
    from pipeline.protocol.demo import read_demo

    job = common.Job(
        stage="demos",
        instance=name,
        params={},
        inputs=(file,),
        outputs=(Path(f"data/demos/{name}.demo"), Path(f"results/demos/{name}.json")),
    )
    with common.attempt(job, root) as attempt:
        demo = read_demo(root / file)
        shutil.copyfile(root / file, attempt.out(f"{name}.demo"))
        files.write_json(attempt.out(f"{name}.json"), summary(demo))


def summary(demo: Demonstration) -> dict[str, Any]:
    """The numbers that a recording has too; returns are null when no episode has ended."""
    ends = np.flatnonzero(demo.done) + 1
    parts = np.split(demo.reward[: ends[-1]], ends[:-1]) if len(ends) else []
    returns = [float(part.sum()) for part in parts]
    return {
        "episodes": len(returns),
        "steps": len(demo),
        "mean_return": float(np.mean(returns)) if returns else None,
        "min_return": min(returns, default=None),
        "max_return": max(returns, default=None),
    }


def record(
    build: executable.Build, target: Path, *, episodes: int, seed: int, log_folder: Path
) -> dict[str, Any]:
    """Let the build's expert play, and write what it did to `target`.

    Returns:
        episodes, steps, and mean, least and greatest return.

    Raises:
        StageError: The build has no expert, or several behaviors.
        UnityException: The environment cannot be used.
    """
    if build.simulator is None:
        raise StageError(
            f"{build.file.name}: only built-in simulators have an expert. Record demonstrations "
            "of this environment in the Unity Editor."
        )
    from pipeline.envs.unity import UnityEnvironment
    from pipeline.simulators.registry import expert

    act = expert(build.simulator)
    with UnityEnvironment(
        build.file,
        seed=seed,
        additional_args=build.args,
        log_folder=log_folder,
        no_graphics=True,
    ) as env:
        env.reset()
        return write_episodes(env, act, target, episodes=episodes)


def write_episodes(
    env: BaseEnv,
    act: Callable[[DecisionSteps], ActionTuple],
    target: Path,
    *,
    episodes: int,
) -> dict[str, Any]:
    """Play until the first `episodes` episodes that start have ended, and write them.

    Those that end first would be the short ones; those that start first are as likely as any.

    Args:
        env: reset already, with one behavior.
        act: who plays.
        target: the `.demo` file.
        episodes: how many to write, in the order in which they start.
    """
    from pipeline.protocol.demo import DemoWriter

    if len(env.behavior_specs) != 1:
        raise StageError(
            f"the expert plays one behavior, but the environment has {list(env.behavior_specs)}"
        )
    ((behavior, spec),) = env.behavior_specs.items()
    recorded = _play(env, behavior, act, episodes)
    with DemoWriter(target, behavior, spec) as writer:
        returns = [_write(writer, rows, spec.action_spec) for rows in recorded]
    return {
        "episodes": len(returns),
        "steps": sum(len(rows) - 1 for rows in recorded),
        "mean_return": float(np.mean(returns)),
        "min_return": float(np.min(returns)),
        "max_return": float(np.max(returns)),
    }


def _play(
    env: BaseEnv, behavior: str, act: Callable[[DecisionSteps], ActionTuple], episodes: int
) -> list[list[dict[str, Any]]]:
    """The rows of each episode; the last row of one is where it ended."""
    recorded: list[list[dict[str, Any]]] = []
    playing: dict[int, list[dict[str, Any]] | None] = {}
    n_ended = 0
    while True:
        decision, terminal = env.get_steps(behavior)
        for row, agent in enumerate(terminal.agent_id.tolist()):
            rows = playing.pop(agent, None)
            if rows is not None:
                last = _row(terminal.obs, row, float(terminal.reward[row]))
                last |= {"done": True, "interrupted": bool(terminal.interrupted[row])}
                rows.append(last)
                n_ended += 1
        if n_ended == episodes:
            return recorded
        action = act(decision)
        for row, agent in enumerate(decision.agent_id.tolist()):
            if agent not in playing:
                playing[agent] = [] if len(recorded) < episodes else None
                if (new := playing[agent]) is not None:
                    recorded.append(new)
            if (rows := playing[agent]) is not None:
                rows.append(_decided(decision, action, row))
        env.set_actions(behavior, action)
        env.step()


def _decided(decision: DecisionSteps, action: ActionTuple, row: int) -> dict[str, Any]:
    entry = _row(decision.obs, row, float(decision.reward[row]))
    entry |= {"continuous": action.continuous[row], "discrete": action.discrete[row]}
    if decision.action_mask is not None:
        entry["mask"] = [mask[row].copy() for mask in decision.action_mask]
    return entry


def _row(obs: Sequence[Any], row: int, reward: float) -> dict[str, Any]:
    return {
        "obs": [values[row].copy() for values in obs],
        "reward": reward,
        "done": False,
        "interrupted": False,
    }


def _write(writer: DemoWriter, rows: list[dict[str, Any]], action_spec: Any) -> float:
    """Append one episode and give its return; the last row has no action of its own."""
    from pipeline.protocol.specs import ActionTuple

    nothing = action_spec.empty_action(1)
    last = rows[-1]
    last |= {"continuous": nothing.continuous[0], "discrete": nothing.discrete[0]}
    masks = None
    if "mask" in rows[0]:
        last["mask"] = [np.zeros_like(mask) for mask in rows[0]["mask"]]
        masks = [np.stack([row["mask"][b] for row in rows]) for b in range(len(last["mask"]))]
    writer.append(
        obs=[np.stack([row["obs"][i] for row in rows]) for i in range(len(last["obs"]))],
        actions=ActionTuple(
            np.stack([row["continuous"] for row in rows]),
            np.stack([row["discrete"] for row in rows]),
        ),
        reward=np.array([row["reward"] for row in rows], dtype=np.float32),
        done=np.array([row["done"] for row in rows]),
        interrupted=np.array([row["interrupted"] for row in rows]),
        action_mask=masks,
    )
    return float(sum(row["reward"] for row in rows[1:]))
