"""The `demos` stage: episodes of the simulator's expert, recorded as a `.demo` file."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import files
from pipeline.core.arrays import AnyArray
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.dag import project
from pipeline.dag.attempt import Job, attempt_at
from pipeline.dag.project import named, planned
from pipeline.demos.demo_file import DemoWriter, read_demo, returns_of, writing_demo
from pipeline.envs import executable
from pipeline.envs.base import BaseEnv
from pipeline.errors import StageError


def record_named(name: str, root: Path) -> None:
    """Record the demonstration `data/demos/<name>.demo`, and write its metrics."""
    params = planned(root)
    demonstration = named(params.demonstrations, name, "demonstrations")
    if demonstration.file is not None:
        take(name, Path(demonstration.file), root)
        return
    facts = asdict(demonstration)
    del facts["file"]
    built = executable.folder_of(facts["environment"])
    with attempt_at(_job(name, built, facts), root) as attempt:
        metrics = record(
            executable.load(root / built),
            attempt.out(f"{name}.demo"),
            episodes=facts["episodes"],
            seed=facts["seed"],
            log_folder=attempt.run,
        )
        files.write_json(attempt.out(f"{name}.json"), metrics)


main = partial(
    project.main, __doc__, record_named, name="a name under `demonstrations` in params.yaml"
)


def take(name: str, file: Path, root: Path) -> None:
    """Copy an existing `.demo` file after a check of the file, and write its metrics."""
    with attempt_at(_job(name, file, {}), root) as attempt:
        demo = read_demo(root / file)
        shutil.copyfile(root / file, attempt.out(f"{name}.demo"))
        files.write_json(attempt.out(f"{name}.json"), summary(demo.returns(), len(demo)))


def _job(name: str, made_from: Path, params: Mapping[str, Any]) -> Job:
    return Job(
        stage="demos",
        instance=name,
        params=params,
        inputs=(made_from,),
        outputs=(Path(f"data/demos/{name}.demo"), Path(f"results/demos/{name}.json")),
    )


def summary(returns: Sequence[float], n_steps: int) -> dict[str, Any]:
    """Return the numbers of episodes and steps, and the mean, least and greatest return.

    If no episode has ended, these returns are None.
    """
    return {
        "episodes": len(returns),
        "steps": n_steps,
        "mean_return": float(np.mean(returns)) if returns else None,
        "min_return": min(returns, default=None),
        "max_return": max(returns, default=None),
    }


def record(
    build: executable.Build, target: Path, *, episodes: int, seed: int, log_folder: Path
) -> dict[str, Any]:
    """Play episodes with the expert of a build's simulator, and write them to `target`.

    Returns:
        The `summary` of the episodes.

    Raises:
        StageError: The build has no expert, or has several behaviors.
        UnityException: The environment cannot be started or fails.
    """
    if build.simulator is None:
        raise StageError(
            f"{build.file.name}: only built-in simulators have an expert. Record demonstrations "
            "of this environment in the Unity Editor."
        )
    # Stages import inside functions: an engine starts a process per job, and a job should import
    # only the modules that it needs.
    from pipeline.envs.unity import UnityEnvironment
    from pipeline.simulators.registry import expert

    # The expert needs only observations, so it can act in this process, outside of the executable.
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
    """Write the first `episodes` episodes in the order of their starts, and return a summary.

    The episodes are chosen by their starts, because the first episodes to end are mostly short: a
    biased sample. The caller has reset the environment, which must have one behavior.
    """
    if len(env.behavior_specs) != 1:
        raise StageError(
            f"an expert can record an environment with one behavior only, but this environment has "
            f"the behaviors {list(env.behavior_specs)}"
        )
    ((behavior, spec),) = env.behavior_specs.items()
    # All episodes are played first, because they end in another order than they start.
    recorded = _play(env, behavior, act, episodes)
    with writing_demo(target, behavior, spec) as writer:
        returns = [_write(writer, *episode) for episode in recorded]
    return summary(returns, sum(len(actions) for _, actions in recorded))


_Episode = tuple[list[Any], list[tuple["AnyArray", "AnyArray"]]]
"""An episode of one agent: its steps, of which the last is terminal, and the actions (continuous,
discrete) of each step except the last.
"""


def _write(writer: DemoWriter, steps: list[Any], actions: list[tuple[AnyArray, AnyArray]]) -> float:
    """Append an episode to a file, and return the episode's return."""
    reward = np.array([step.reward for step in steps], dtype=np.float32)
    is_last = np.arange(len(reward)) == len(reward) - 1
    # The last step is the episode's end, at which no action is chosen.
    masks = [step.action_mask for step in steps[:-1] if step.action_mask is not None]
    writer.append(
        obs=[np.stack(rows) for rows in zip(*(step.obs for step in steps), strict=True)],
        actions=ActionTuple(*_with_zeros(actions)),
        reward=reward,
        done=is_last,
        interrupted=is_last & steps[-1].interrupted,
        action_mask=_with_zeros(masks) or None,
    )
    return returns_of(reward, is_last)[0]


def _with_zeros(steps: Sequence[Sequence[AnyArray]]) -> list[AnyArray]:
    """Stack the actions or masks of an agent's steps, and append a row of zeros.

    A .demo file has an action in every row, also for the last observation of an episode.
    """
    return [np.stack([*rows, np.zeros_like(rows[-1])]) for rows in zip(*steps, strict=True)]


def _play(
    env: BaseEnv, behavior: str, act: Callable[[DecisionSteps], ActionTuple], episodes: int
) -> list[_Episode]:
    """Return the first `episodes` episodes, in the order of their starts, after all have ended."""
    recorded: list[_Episode] = []
    playing: dict[int, _Episode | None] = {}
    n_ended = 0
    while True:
        decision, terminal = env.get_steps(behavior)
        for agent, last in terminal.items():
            if (episode := playing.pop(agent, None)) is not None:
                episode[0].append(deepcopy(last))
                n_ended += 1
        if n_ended == episodes:
            return recorded
        action = act(decision)
        for row, (agent, step) in enumerate(decision.items()):
            # If enough episodes have started before, this one is played but not recorded (None).
            if agent not in playing:
                playing[agent] = ([], []) if len(recorded) < episodes else None
                if (new := playing[agent]) is not None:
                    recorded.append(new)
            if (episode := playing[agent]) is not None:
                # The step is copied, because its arrays are views that would keep the arrays of all
                # agents in memory.
                episode[0].append(deepcopy(step))
                episode[1].append((action.continuous[row], action.discrete[row]))
        env.set_actions(behavior, action)
        env.step()
