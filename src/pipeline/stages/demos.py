"""The `demos` stage: episodes of the simulator's expert, recorded as a `.demo` file."""

from __future__ import annotations

import argparse
from collections import defaultdict
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
    from pipeline.protocol.demo import DemoWriter
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
    """Play until `episodes` episodes have ended, and write them one after another.

    Args:
        env: reset already, with one behavior.
        act: who plays.
        target: the `.demo` file.
        episodes: how many to write, in the order in which they end.
    """
    from pipeline.protocol.demo import DemoWriter

    if len(env.behavior_specs) != 1:
        raise StageError(
            f"the expert plays one behavior, but the environment has {list(env.behavior_specs)}"
        )
    ((behavior, spec),) = env.behavior_specs.items()
    open_rows: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    returns: list[float] = []
    n_steps = 0
    with DemoWriter(target, behavior, spec) as writer:
        while True:
            decision, terminal = env.get_steps(behavior)
            for row, agent in enumerate(terminal.agent_id.tolist()):
                rows = open_rows.pop(agent, [])
                if not rows or len(returns) == episodes:
                    continue
                last = _row(terminal.obs, row, float(terminal.reward[row]))
                last |= {"done": True, "interrupted": bool(terminal.interrupted[row])}
                returns.append(_write(writer, [*rows, last], spec.action_spec))
                n_steps += len(rows)
            if len(returns) == episodes:
                break
            action = act(decision)
            for row, agent in enumerate(decision.agent_id.tolist()):
                entry = _row(decision.obs, row, float(decision.reward[row]))
                entry |= {"continuous": action.continuous[row], "discrete": action.discrete[row]}
                if decision.action_mask is not None:
                    entry["mask"] = [mask[row].copy() for mask in decision.action_mask]
                open_rows[agent].append(entry)
            env.set_actions(behavior, action)
            env.step()
    return {
        "episodes": len(returns),
        "steps": n_steps,
        "mean_return": float(np.mean(returns)),
        "min_return": float(np.min(returns)),
        "max_return": float(np.max(returns)),
    }


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
