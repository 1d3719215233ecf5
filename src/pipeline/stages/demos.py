"""The `demos` stage: episodes of the simulator's expert, recorded as a `.demo` file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files
from pipeline.errors import StageError
from pipeline.stages.shared import executable, project
from pipeline.stages.shared.attempt import Job, attempt_at
from pipeline.stages.shared.project import named, planned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.arrays import AnyArray
    from pipeline.envs.base import BaseEnv
    from pipeline.protocol.demo import Demonstration, DemoWriter
    from pipeline.protocol.specs import ActionTuple
    from pipeline.protocol.steps import DecisionSteps, TerminalSteps


def main(argv: Sequence[str]) -> int:
    """Command line of the stage's script."""
    name = "a name under `demonstrations` in params.yaml"
    return project.main(argv, __doc__, record_named, name=name)


def record_named(name: str, root: Path) -> None:
    """Make `data/demos/<name>.demo` and its metrics."""
    params = planned(root)
    demonstration = named(params.demonstrations, name, "demonstrations")
    if demonstration.file is not None:
        take(name, Path(demonstration.file), root)
        return
    if (
        demonstration.environment is None
        or demonstration.episodes is None
        or demonstration.seed is None
    ):
        raise StageError(f"params.yaml: demonstrations.{name} names neither a file nor episodes")
    built = executable.folder_of(demonstration.environment)
    facts = {
        "environment": demonstration.environment,
        "policy": demonstration.policy,
        "episodes": demonstration.episodes,
        "seed": demonstration.seed,
    }
    with attempt_at(_job(name, built, facts), root) as attempt:
        metrics = record(
            executable.load(root / built),
            attempt.out(f"{name}.demo"),
            episodes=demonstration.episodes,
            seed=demonstration.seed,
            log_folder=attempt.run,
        )
        files.write_json(attempt.out(f"{name}.json"), metrics)


def take(name: str, file: Path, root: Path) -> None:
    """Make the same of a `.demo` file that is there already, after reading all of it."""
    # Imports stand inside functions in all stages: an engine starts a process per job, and none
    # should load more than its own work needs.
    from pipeline.protocol.demo import read_demo

    with attempt_at(_job(name, file, {}), root) as attempt:
        demo = read_demo(root / file)
        shutil.copyfile(root / file, attempt.out(f"{name}.demo"))
        files.write_json(attempt.out(f"{name}.json"), summary(demo))


def _job(name: str, made_from: Path, params: Mapping[str, Any]) -> Job:
    return Job(
        stage="demos",
        instance=name,
        params=params,
        inputs=(made_from,),
        outputs=(Path(f"data/demos/{name}.demo"), Path(f"results/demos/{name}.json")),
    )


def summary(demo: Demonstration) -> dict[str, Any]:
    """Summarise a demonstration as a recording is; returns are null without a whole episode."""
    return _summary(demo.returns(), len(demo))


def _summary(returns: Sequence[float], n_steps: int) -> dict[str, Any]:
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

    # The expert acts on observations alone, so it can play over the wire, from outside the
    # executable.
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
        returns = [episode.write(writer) for episode in recorded]
    return _summary(returns, sum(len(episode.reward) - 1 for episode in recorded))


class _Episode:
    """What an agent observed and did in an episode; where it ended it did nothing."""

    def __init__(self) -> None:
        self.obs: list[list[AnyArray]] = []
        self.reward: list[float] = []
        self._continuous: list[AnyArray] = []
        self._discrete: list[AnyArray] = []
        self._masks: list[list[AnyArray]] = []
        self._interrupted = False

    def decide(self, steps: DecisionSteps, action: ActionTuple, row: int) -> None:
        """Add a step of the agent in `row`."""
        self._observe(steps, row)
        self._continuous.append(action.continuous[row])
        self._discrete.append(action.discrete[row])
        if steps.action_mask is not None:
            self._masks.append([mask[row].copy() for mask in steps.action_mask])

    def end(self, steps: TerminalSteps, row: int) -> None:
        """Add the last step of the agent in `row`."""
        self._observe(steps, row)
        # A .demo file has an action in every row, also in the row of the last observation.
        self._continuous.append(np.zeros_like(self._continuous[-1]))
        self._discrete.append(np.zeros_like(self._discrete[-1]))
        if self._masks:
            self._masks.append([np.zeros_like(mask) for mask in self._masks[-1]])
        self._interrupted = bool(steps.interrupted[row])

    def _observe(self, steps: DecisionSteps | TerminalSteps, row: int) -> None:
        # Copies: a view of one row would keep the batch of the whole step in memory.
        self.obs.append([values[row].copy() for values in steps.obs])
        self.reward.append(float(steps.reward[row]))

    def write(self, writer: DemoWriter) -> float:
        """Append the episode to a file, and return what it gained."""
        from pipeline.protocol.specs import ActionTuple

        is_last = np.arange(len(self.reward)) == len(self.reward) - 1
        masks = [np.stack(rows) for rows in zip(*self._masks, strict=True)]
        writer.append(
            obs=[np.stack(rows) for rows in zip(*self.obs, strict=True)],
            actions=ActionTuple(np.stack(self._continuous), np.stack(self._discrete)),
            reward=np.array(self.reward, dtype=np.float32),
            done=is_last,
            interrupted=is_last & self._interrupted,
            action_mask=masks or None,
        )
        # A row's reward belongs to the action before it, so the first row's reward is of
        # nobody's action.
        return float(sum(self.reward[1:]))


def _play(
    env: BaseEnv, behavior: str, act: Callable[[DecisionSteps], ActionTuple], episodes: int
) -> list[_Episode]:
    """Return the first `episodes` episodes that start, once they have ended."""
    recorded: list[_Episode] = []
    playing: dict[int, _Episode | None] = {}
    n_ended = 0
    while True:
        decision, terminal = env.get_steps(behavior)
        for row, agent in enumerate(terminal.agent_id.tolist()):
            if (episode := playing.pop(agent, None)) is not None:
                episode.end(terminal, row)
                n_ended += 1
        if n_ended == episodes:
            return recorded
        action = act(decision)
        for row, agent in enumerate(decision.agent_id.tolist()):
            # None marks an episode that began after enough were under way: it is played, not
            # recorded.
            if agent not in playing:
                playing[agent] = _Episode() if len(recorded) < episodes else None
                if (new := playing[agent]) is not None:
                    recorded.append(new)
            if (episode := playing[agent]) is not None:
                episode.decide(decision, action, row)
        env.set_actions(behavior, action)
        env.step()
