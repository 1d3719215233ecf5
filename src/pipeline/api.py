"""The high-level functions of `import pipeline`: train, evaluate, export and act.

No stage of the DAG imports this module, so an edit of it reruns no stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import seeding
from pipeline.core.arrays import IntArray
from pipeline.core.steps import DecisionSteps
from pipeline.envs.base import BaseEnv
from pipeline.envs.in_process import InProcessEnvironment, refuse_other_object
from pipeline.envs.named_env import environment_of, executable_of, in_folder
from pipeline.errors import SettingsError
from pipeline.evaluation.episodes import Episode
from pipeline.export.observed import (
    EnvironmentForm,
    decision_steps,
    network_masks,
    network_rows,
)
from pipeline.export.policy import OnnxPolicy
from pipeline.settings import RunSettings
from pipeline.settings.project.environments import named
from pipeline.simulators import registry
from pipeline.simulators.bridges.module_bridge import OtherObjectError, around
from pipeline.tracking.base import Sink, Update

if TYPE_CHECKING:
    from pipeline.trainer import TrainResult


class Callback:
    """Receives the events of a run, and may end the run; subclasses override methods.

    An error in a callback ends the run after its state has been saved, and `train` raises it.
    """

    stop: bool = False
    """Set to True to end the run after the present step, as if `max_steps` had been reached."""

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Called at the start of a behavior's training, with its settings as plain values."""

    def on_summary(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Called for each summary; `values` has the value of each statistic by its name."""

    def on_update(self, behavior: str, update: Update) -> None:
        """Called after an update of a behavior's networks."""

    def on_checkpoint(self, behavior: str, path: Path, step: int) -> None:
        """Called after a numbered checkpoint has been written."""

    def on_end(self, result: TrainResult) -> None:
        """Called when the run has ended without an error."""


class _Callbacks(Sink):
    """A sink that passes the events of a run to callbacks, and keeps the run's curves."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self.curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        self.error: Exception | None = None

    def wants_end(self) -> bool:
        """Return whether a callback has set `stop`, or has failed."""
        return self.error is not None or any(callback.stop for callback in self._callbacks)

    def began(self, behavior: str, settings: Mapping[str, Any]) -> None:
        """Call `on_start` of every callback."""
        self._tell("on_start", behavior, settings)

    def metrics(self, behavior: str, values: Mapping[str, float], step: int) -> None:
        """Add a summary to the curves, and call `on_summary` of every callback."""
        # Each behavior and tag has a list of (step, value) in the order of steps.
        curves = self.curves.setdefault(behavior, {})
        for tag, value in values.items():
            curves.setdefault(tag, []).append((step, value))
        self._tell("on_summary", behavior, values, step)

    def updated(self, behavior: str, update: Update) -> None:
        """Call `on_update` of every callback."""
        self._tell("on_update", behavior, update)

    def saved(self, behavior: str, path: Path, step: int) -> None:
        """Call `on_checkpoint` of every callback."""
        self._tell("on_checkpoint", behavior, path, step)

    def _tell(self, event: str, *facts: Any) -> None:
        # After a first error no callback is called again: its state may be inconsistent.
        if self.error is not None:
            return
        try:
            for callback in self._callbacks:
                getattr(callback, event)(*facts)
        except Exception as error:  # noqa: BLE001  # `train` raises it after the run is saved
            self.error = error


def train(
    env: Any,
    settings: RunSettings | Mapping[str, object] | Path | str,
    *,
    seed: int,
    run_dir: Path | str,
    callbacks: Sequence[Callback] = (),
    num_envs: int = 1,
    sinks: Sequence[Sink | str] = (),
    force: bool = False,
    **options: Any,
) -> TrainResult:
    """Train every behavior of an environment.

    Args:
        env: anything that `make_env` takes, or a list of such objects, stepped together; None for
            the Unity Editor. Executables run in other processes, all other environments in this
            one.
        settings: a trainer configuration: an object, a mapping, or the path of a file. A mapping or
            file that lists behaviors must list all of them, or have `default_settings`.
        seed: all random numbers of the run derive from it.
        run_dir: folder of the run; each behavior gets a folder with checkpoints in it. An earlier
            run in this folder is refused.
        callbacks: receive the events of the run, and may end it. Only with one learner.
        num_envs: number of environments to step together, if `env` is a string.
        sinks: sinks of the summaries: objects, or names as for `pipeline learn --track`, which
            write into `run_dir`. With `mlflow` each checkpoint also gets an ONNX file, which is
            logged as the run's model, unless `exporter` is given.
        force: rename an earlier run's folder to `<run_dir>.1`, and begin a new run.
        options: `resume`, `init_from`, `device`, `torch_threads`, `env_args`, `learners`, and other
            arguments of `pipeline.trainer.train`.

    Returns:
        Steps, rewards, checkpoints and curves ((step, value) by behavior and tag).

    Raises:
        SettingsError: A setting, the environment or `run_dir` cannot be used.
        UnityException: The environment failed; the state of the run is saved.
        Interrupted: SIGINT or SIGTERM came; the state of the run is saved.
    """
    from pipeline import trainer
    from pipeline.algos.process_group import launched
    from pipeline.dag.stages.export import publish
    from pipeline.trainer.api import read_settings, refuse_or_rename_earlier_run

    # Checked first, so that nothing is started for a run that cannot be written.
    refuse_or_rename_earlier_run(
        Path(run_dir), force, goes_on=any(map(options.get, ("resume", "inference")))
    )
    # The path of a folder is replaced by the path of the executable in it.
    env = in_folder(env)
    # Learners update in step: one that stops alone would leave the others waiting.
    if callbacks and max(options.get("learners", 1), launched()[1]) > 1:
        raise SettingsError("callbacks: one of several learners cannot end a run; use one learner")
    # Sinks that are objects are used as they are; sinks given by name need the run's description.
    opened = [sink for sink in sinks if not isinstance(sink, str)]
    # Only the first learner, which is torchrun's rank 0, writes summaries.
    if len(opened) < len(sinks) and launched()[0] == 0:
        settings = read_settings(settings)
        if "mlflow" in sinks:
            # MLflow's model registry needs an ONNX file of each checkpoint.
            options.setdefault("exporter", publish)
        facts = {"env": env, "seed": seed, "folder": Path(run_dir), "num_envs": num_envs}
        opened += _by_name(sinks, settings, **facts, **options)
    observers = _Callbacks(callbacks)
    if isinstance(env, str) and max(options.get("learners", 1), launched()[1]) > 1:
        env = executable_of(env)  # each learner starts its own processes
    elif isinstance(env, str) and _is_program(env):
        env = _path_of(env)
    several = isinstance(env, Sequence) and not isinstance(env, str)
    envs: Any = list(env) if several else [env]
    if isinstance(env, str) and not _is_program(env):
        # Simulators run in this process, so each copy is an environment of its own.
        envs, several = [env] * num_envs, True
    if not (len(envs) == 1 and (envs[0] is None or _is_program(envs[0]))):
        # All environments of all learners get distinct seeds.
        first = seeding.derive(seed, "environment") + launched()[0] * len(envs)
        envs = [make_env(source, seed=first + worker) for worker, source in enumerate(envs)]
    result = trainer.train(
        envs if several else envs[0],
        settings,
        seed=seed,
        run_dir=run_dir,
        num_envs=num_envs,
        sinks=[*opened, observers],
        end_early=observers.wants_end if callbacks else None,
        **options,
    )
    if observers.error is not None:
        # The error of a callback is raised only now, when the run's state has been saved.
        raise observers.error
    result = replace(result, curves=observers.curves)
    for callback in callbacks:
        callback.on_end(result)
    return result


def _by_name(sinks: Sequence[Sink | str], settings: RunSettings, **run: Any) -> list[Sink]:
    """Return the sinks that are given by name."""
    from pipeline.tracking.sinks import named_sinks, run_outside_dag
    from pipeline.trainer.supported import usable_device

    # Facts that the sinks write into the run's description.
    used = ("env", "seed", "folder", "num_envs", "torch_threads", "resume")
    facts = {name: run[name] for name in used if name in run}
    facts["device"] = str(usable_device(run.get("device", "cpu")))
    described = run_outside_dag(settings, source="pipeline.train", **facts)
    return named_sinks(described, [sink for sink in sinks if isinstance(sink, str)])


def make_env(source: Any, *, seed: int = 0, n_agents: int | None = None, **options: Any) -> BaseEnv:
    """Return an environment with ML-Agents' low-level API.

    Args:
        source: the path of an executable, or of a folder with one; the name of an environment in
            params.yaml in the current folder, or of a simulator, such as `balance_ball`;
            `gymnasium:ID` or `pettingzoo:ID`; `module:function`, a simulator's class or a function
            that returns an environment; an environment of Gymnasium or PettingZoo; or any object
            with the low-level API, which is returned unchanged.
        seed: seed of the environment's random numbers; an object keeps its own seed.
        n_agents: number of agents or copies in this process, for simulators and ids.
        options: further keywords of the simulator, the bridge, or `UnityEnvironment`.

    Raises:
        SettingsError: No environment has this name, or the object is not an environment.
        UnityException: The executable cannot be started.
    """
    if not isinstance(source, str | Path):
        return _of_object(source, seed)
    source = in_folder(source)
    # None stands for an executable; a Path always names an executable, and never a simulator.
    packed = None if isinstance(source, Path) else environment_of(source).packed()
    if packed is None:
        from pipeline.envs.unity import UnityEnvironment

        program = source if isinstance(source, Path) else _path_of(source)
        return UnityEnvironment(program, seed=seed, **options)
    simulator, fixed = packed
    fixed |= options if n_agents is None else options | {"n_agents": n_agents}
    try:
        return InProcessEnvironment(registry.make(simulator, seed=seed, **fixed))
    # The user's function returned an environment of another library, not a simulator.
    except OtherObjectError as other:
        return _of_object(other.env, seed)


def build_env(source: str, target: Path | str, **options: Any) -> Path:
    """Pack a simulator or a third-party environment into an executable.

    Args:
        source: a simulator, such as `balance_ball`; `gymnasium:ID`, `pettingzoo:ID`, or
            `module:function`.
        target: the file to write.
        options: `n_agents` and keywords of the simulator, which become fixed in the executable.

    Returns:
        The file, which `train` and `make_env` take.

    Raises:
        SettingsError: No environment has this name, or an option is missing.
        StageError: The environment cannot be packed.
    """
    # Imports in functions keep `import pipeline` quick, as in `pipeline.__getattr__`.
    from pipeline.simulators.pack import pack

    packed = named(source).packed()
    if packed is None:
        raise SettingsError(f"{source}: is a path, so there is nothing to build; train in it")
    simulator, fixed = packed
    return pack(simulator, target, **fixed | options)


def export_policy(checkpoint: Path | str, folder: Path | str) -> Path:
    """Write the policy of a checkpoint as `<Behavior>.onnx`, which Unity loads.

    The file is compared with the policy on observations of the run before it is moved into place.

    Args:
        checkpoint: a behavior's checkpoint, such as `result.behaviors["3DBall"].checkpoint`.
        folder: folder of the file.

    Returns:
        The file.

    Raises:
        PipelineError: The checkpoint cannot be read, or its policy cannot be exported.
    """
    from pipeline import files
    from pipeline.dag.stages.export import publish
    from pipeline.trainer.checkpoints.restore import load_policy as saved_policy

    publish(Path(checkpoint), Path(folder))
    return files.named(Path(folder), saved_policy(Path(checkpoint)).behavior, ".onnx")


class LoadedPolicy:
    """A trained policy that chooses actions for an environment's observations.

    Attributes:
        behavior: name of the behavior in the file, without `?team=`.
        onnx: the policy that acts on `DecisionSteps`.
    """

    def __init__(self, onnx: OnnxPolicy, behavior: str) -> None:
        self.onnx = onnx
        self.behavior = behavior
        self._where = f"the policy {behavior}"
        text = onnx.description.spaces
        self._form = EnvironmentForm(text, self._where) if text else None

    def act(
        self,
        observation: Any,
        action_mask: Any = None,
        *,
        deterministic: bool = True,
        agent_id: IntArray | None = None,
    ) -> Any:
        """Choose an action in the form that the environment's `step` takes.

        Args:
            observation: of an environment of Gymnasium or PettingZoo, as `reset` and `step` return
                it, or of N vectorized environments; or an environment's `DecisionSteps`. For a file
                that does not know the environment's spaces, such as Unity's: floats [N, *shape], or
                a list of these, one for each input.
            action_mask: the environment's mask (1 where allowed), if it is not in the observation;
                for a file without spaces bool [N, branch size] per branch, True where forbidden.
            deterministic: take the most probable actions; False draws them at random.
            agent_id: int [N], the agents whose memories are used and updated; None for 0 to N - 1.

        Returns:
            An element of the action space; for N environments their actions together, as a
            vectorized environment takes them; an `ActionTuple` for `DecisionSteps`, and for a file
            that does not know the environment's spaces.

        Raises:
            PipelineError: The observation or the mask does not fit the policy.
        """
        if isinstance(observation, DecisionSteps):
            return self.onnx.act(observation, deterministic=deterministic)
        layout, is_batch = self.onnx.description, True
        if self._form is None:
            obs = network_rows(observation, layout, self._where)
            branches = layout.discrete_branches
            masks = network_masks(action_mask, len(obs[0]), branches, self._where)
        else:
            obs, masks, is_batch = self._form.rows(observation, action_mask)
        steps = decision_steps(obs, masks, agent_id)
        actions = self.onnx.act(steps, deterministic=deterministic)
        return actions if self._form is None else self._form.native(actions, is_batch)

    def reset(self, agents: Any = None, *, seed: int | None = None) -> None:
        """Forget memories, after the end of episodes; a policy without memory has none.

        Args:
            agents: bool [N], whether each agent's episode has ended, such as `terminated |
                truncated`, or agent ids; None for all agents.
            seed: restarts the random numbers of drawn actions, and forgets all memories.
        """
        if seed is not None:
            self.onnx.reset(seed)
        elif agents is None:
            self.onnx.end()
        else:
            chosen = np.atleast_1d(agents)
            self.onnx.end((np.flatnonzero(chosen) if chosen.dtype == bool else chosen).tolist())

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError, with the replacement of a method that was removed."""
        instead = {"native": ": `act` returns the environment's action", "end": ": call `reset`"}
        raise AttributeError(f"LoadedPolicy has no '{name}'{instead.get(name, '')}")


def load_policy(path: Path | str, *, seed: int = 0) -> LoadedPolicy:
    """Return the policy of a checkpoint or of an ONNX file, ready to act on observations.

    Args:
        path: an ONNX file (`.onnx`) or a checkpoint (`.pt`).
        seed: seed of actions that are drawn at random.

    Raises:
        PipelineError: The file cannot be read, or has no policy.
    """
    from pipeline.export.policy import OnnxPolicy

    path = Path(path)
    # Unity's files have the name of their behavior.
    if path.suffix == ".onnx":
        return LoadedPolicy(OnnxPolicy(path, seed=seed), path.stem)
    from onnx import helper

    from pipeline.export.publish import build_model, meanings
    from pipeline.trainer.checkpoints.restore import load_policy as saved_policy

    saved = saved_policy(path)
    # A checkpoint acts through the same ONNX graph that Unity would run.
    model = build_model(saved.policy)
    helper.set_model_props(model, meanings(saved.policy.spec))
    return LoadedPolicy(OnnxPolicy(model, seed=seed), saved.behavior)


def evaluate(
    policy: LoadedPolicy | Path | str | Mapping[str, LoadedPolicy | Path | str],
    env: Any,
    *,
    episodes: int = 100,
    seed: int = 10_000,
    deterministic: bool = True,
    **options: Any,
) -> list[Episode]:
    """Play the first `episodes` episodes that start, each to its end.

    Args:
        policy: a loaded policy or its file; several policies as a mapping by behavior name.
        env: anything that `make_env` takes; it is closed at the end.
        episodes: number of episodes of each behavior, at least 1.
        seed: seed of the environment, and of actions that are drawn at random.
        deterministic: take the most probable actions; False draws them at random.
        options: further arguments of `make_env`.

    Returns:
        The episodes sorted by behavior and start, each with its return and length.

    Raises:
        PipelineError: A file cannot be read, or the environment cannot be started or fails.
    """
    from pipeline.evaluation.episodes import evaluate as play

    # A single policy acts for the behavior that its file names.
    by_name = policy if isinstance(policy, Mapping) else {None: policy}
    policies = {}
    for name, source in by_name.items():
        loaded = source if isinstance(source, LoadedPolicy) else load_policy(source)
        policies[loaded.behavior if name is None else name] = loaded.onnx
    environment = make_env(env, seed=seed, **options)
    try:
        return play(
            environment, policies, episodes=episodes, seed=seed, deterministic=deterministic
        )
    finally:
        environment.close()


def _is_program(source: object) -> bool:
    """Return whether an environment is an executable, which runs in another process."""
    if isinstance(source, str):
        return environment_of(source).packed() is None
    return isinstance(source, Path)


def _path_of(name: str) -> str:
    """Return the path of an executable from its path, its folder, or a name in params.yaml."""
    return str(in_folder(Path(getattr(environment_of(name), "path", name))))


def _of_object(env: Any, seed: int) -> BaseEnv:
    """Wrap an environment of Gymnasium or PettingZoo; return other environments unchanged."""
    try:
        return InProcessEnvironment(around([env], seed=seed))
    except OtherObjectError:
        refuse_other_object(env)
    return env  # type: ignore[no-any-return]  # its members were checked
