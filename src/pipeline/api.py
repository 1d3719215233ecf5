"""The high-level functions of `import pipeline`: train, evaluate, export and act.

No stage of the DAG imports this module, so an edit of it reruns no stage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import files, seeding
from pipeline.core.arrays import IntArray
from pipeline.core.steps import DecisionSteps
from pipeline.envs.base import BaseEnv
from pipeline.envs.in_process import InProcessEnvironment, refuse_other_object
from pipeline.envs.named_env import environment_of, executable_of, in_folder
from pipeline.errors import SettingsError
from pipeline.evaluation.episodes import Episode
from pipeline.export.observed import EnvironmentForm, network_steps
from pipeline.export.policy import OnnxPolicy
from pipeline.settings import RunSettings
from pipeline.settings.project.environments import named
from pipeline.simulators import registry
from pipeline.simulators.bridges.module_bridge import (
    OtherObjectError,
    around,
    makes_environments,
)
from pipeline.tracking.base import Callback, Sink
from pipeline.tracking.result import TrainResult

_log = logging.getLogger(__name__)


def train(
    env: Any,
    settings: RunSettings | Mapping[str, object] | Path | str,
    *,
    seed: int,
    run_dir: Path | str,
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink | str] = (),
    progress: bool | None = None,
    num_envs: int = 1,
    n_agents: int | None = None,
    env_options: Mapping[str, Any] | None = None,
    env_args: Sequence[str] = (),
    resume: bool = False,
    force: bool = False,
    init_from: Mapping[str, Path] | Path | str | None = None,
    inference: bool = False,
    export: bool = False,
    device: str | None = "cpu",
    torch_threads: int | None = 1,
    learners: int = 1,
    resume_interval_s: float = 10.0,
) -> TrainResult:
    """Train every behavior of an environment.

    Args:
        env: what `make_env` takes, or a list of environment objects; None for the Unity Editor.
            Executables run in processes of their own, other environments in this process. An
            environment object counts as one copy.
        settings: a trainer configuration: `RunSettings`, a mapping, or the path of a file.
        seed: seed from which all random numbers of the run derive.
        run_dir: folder of the run. An earlier run in it is refused without `resume` or `force`.
        callbacks: receive the events of the run, and may end the run. With several learners, each
            callback must be a `Sink`.
        sinks: receivers of the summaries: `Sink` objects, or names as for `pipeline learn --track`.
        progress: whether to print summaries as `pipeline learn` does; None: only on a terminal and
            in a notebook.
        num_envs: number of environments, if `env` is a name, a path, a class or a function.
        n_agents: number of copies in each environment, or number of agents of a simulator; None: 16
            copies for a class, a function, or an id of Gymnasium or PettingZoo.
        env_options: keyword arguments of the simulator or the environment, as for `make_env`.
        env_args: arguments of an executable.
        resume: whether to continue the run in `run_dir` from its checkpoints.
        force: begin a new run, and rename the folder of an earlier run to the first unused name of
            `<run_dir>.1`, `<run_dir>.2`, ...
        init_from: initial weights: a checkpoint, a run's folder, the name of a run next to
            `run_dir` or in `results_dir`, or a map from behaviors to checkpoints.
        inference: whether to act, without learning or saving, until a signal ends the run.
        export: whether to write an ONNX file next to each numbered checkpoint; always True with the
            sink `mlflow`.
        device: `cpu`, `cuda`, ...; None: the device that is measured to be the fastest.
        torch_threads: number of torch's threads, which affects how sums are rounded; None: the
            number that is measured to be the fastest.
        learners: number of processes that learn together, each with `num_envs` executables.
        resume_interval_s: minimum number of seconds between two saves of the state from which
            `resume` continues.

    Returns:
        Each behavior's steps, rewards and checkpoint, and (step, value) curves by behavior and tag.

    Raises:
        SettingsError: A setting, the environment or `run_dir` cannot be used.
        TrainingError: The user's code raised an exception; the state of the run is saved.
        UnityException: The environment failed; the state of the run is saved.
        Interrupted: SIGINT or SIGTERM came; the state of the run is saved.
    """
    from pipeline import trainer
    from pipeline.algos.process_group import launched
    from pipeline.dag.stages.export import publish
    from pipeline.trainer.api import read_settings
    from pipeline.trainer.checkpoints.restore import checkpoints_of

    run_dir, env, n_learners = Path(run_dir), in_folder(env), max(learners, launched()[1])
    settings = read_settings(settings)
    if n_learners > 1 and not all(isinstance(callback, Sink) for callback in callbacks):
        raise SettingsError(
            "callbacks: with several learners, a callback cannot end the run, so it must be a "
            "Sink; pass a Sink, or use one learner"
        )
    if isinstance(init_from, str | Path):
        init_from = checkpoints_of(init_from, settings, beside=run_dir)
    with _run_folder(run_dir, force=force, goes_on=resume or inference) as run:
        if init_from is not None:
            paths = {name: Path(file).resolve() for name, file in init_from.items()}
            init_from = {name: run.current_path(path) for name, path in paths.items()}
        opened = [*callbacks, *(sink for sink in sinks if not isinstance(sink, str))]
        names = [sink for sink in sinks if isinstance(sink, str)]
        if names and launched()[0] == 0:
            from pipeline.tracking.sinks import named_sinks, run_outside_dag
            from pipeline.trainer.supported import usable_device

            tracked = run_outside_dag(
                settings,
                source="pipeline.train",
                env=env,
                seed=seed,
                folder=run_dir,
                num_envs=num_envs,
                torch_threads=torch_threads or "fastest",
                resume=resume,
                device=str(usable_device(device)),
            )
            opened = [*named_sinks(tracked, names), *opened]
        if isinstance(env, str) and n_learners > 1:
            env = executable_of(env)  # each learner starts its own processes of the executable
        options = {"n_agents": n_agents, "env_options": env_options}
        first = seeding.derive(seed, "environment"), launched()[0]
        envs, facts = _environments(env, num_envs, n_learners, first=first, **options)
        # Without `progress`, a terminal or a notebook decides: there a user may read the output.
        is_watched = sys.stdout.isatty() or "ipykernel" in sys.modules
        if launched()[0] == 0 and (is_watched if progress is None else progress):
            from pipeline.tracking.console import ConsoleSink

            opened.insert(0, console := ConsoleSink())
            console.say(facts)
        else:
            _log.info("%s", facts)
        job = trainer.JobSpec(
            envs,
            settings,
            seed=seed,
            run_dir=run_dir,
            num_envs=num_envs,
            env_args=env_args,
            init_from=init_from or {},
            resume=resume,
            torch_threads=torch_threads,
        )
        return trainer.train(
            job,
            inference=inference,
            exporter=publish if export or "mlflow" in names else None,
            device=device,
            callbacks=[*opened, _Started(run)],
            resume_interval_s=resume_interval_s,
            learners=learners,
        )


class _Started(Callback):
    """Keeps the folder of a run that has started."""

    def __init__(self, folder: files.RunFolder) -> None:
        self._folder = folder

    def on_settings(self, settings: RunSettings) -> None:  # noqa: ARG002
        self._folder.start()


@contextmanager
def _run_folder(run_dir: Path, *, force: bool, goes_on: bool) -> Iterator[files.RunFolder]:
    """Create the folder of a run, which replaces an earlier run if `force`, or `goes_on` with it.

    Raises:
        SettingsError: The folder has an earlier run and `force` is not set or the folder cannot be
            renamed, or both `force` and `goes_on` are set.
    """
    from pipeline.algos.process_group import launched
    from pipeline.trainer.checkpoints.file import RESUME_FILE

    if goes_on and force:
        raise SettingsError("force: starts a new run; it cannot be used with resume or inference")
    folder, earlier = run_dir.resolve(), sorted(run_dir.glob(f"*/{RESUME_FILE}"))
    # Only the first of several processes checks, because the folder may be renamed only once.
    if goes_on or launched()[0] > 0:
        yield files.RunFolder(folder)
        return
    if earlier and not force:
        raise SettingsError(
            f"run_dir: an earlier run is in {run_dir} ({earlier[0]}); continue it with resume=True,"
            f" begin a new run with force=True, which renames the folder to "
            f"{files.free_name(folder).name}, or name another folder"
        )
    if earlier and Path.cwd().is_relative_to(folder):
        raise SettingsError(
            f"force: {folder} is the working folder and cannot be renamed; use another run_dir"
        )
    # Without the lock, the folder could be renamed while another run still writes into it.
    with files.sole_writer(folder), files.run_folder(folder, replace=bool(earlier)) as run:
        yield run


def _environments(
    env: Any, num_envs: int, n_learners: int, *, first: tuple[int, int], **options: Any
) -> tuple[Any, str]:
    """Return a run's environments for the trainer, and a text that gives their number.

    `first` has the seed of the first environment, and this process's rank among the learners.
    """
    if env is None or _is_program(env):
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise SettingsError(
                f"{given[0]}: cannot be given for an executable; give env_args instead"
            )
        text = f"environments: {num_envs}, each in a process; processes that learn: {n_learners}"
        return env if env is None or isinstance(env, Path) else _path_of(env), text
    several = isinstance(env, Sequence) and not isinstance(env, str)
    is_copied = isinstance(env, str) or makes_environments(env)
    if num_envs > 1 and not is_copied:
        raise SettingsError(
            "num_envs: an environment object is only one environment; pass its class, or a "
            "function that returns an environment"
        )
    sources = list(env) if several else [env] * (num_envs if is_copied else 1)
    seed = first[0] + first[1] * len(sources)
    envs = [make_env(source, seed=seed + n, **options) for n, source in enumerate(sources)]
    text = f"environments: {len(envs)}, all in this process"
    n_copies = [getattr(one, "n_copies", None) or 0 for one in envs]
    if all(n_copies):
        text += f"; copies: {sum(n_copies)}"
    if n_copies == [1] and not (is_copied or several or envs[0] is env):
        text += " (an environment object is one copy; for 16 copies, pass its class or a function)"
    return envs, text


def make_env(
    source: Any,
    *,
    seed: int = 0,
    n_agents: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> BaseEnv:
    """Return an environment with ML-Agents' low-level API.

    Args:
        source: the path of an executable, or of a folder with one; the name of an environment in
            params.yaml in the current folder, or of a simulator, such as `balance_ball`;
            `gymnasium:ID` or `pettingzoo:ID`; `module:function`; a simulator's or environment's
            class, or a function that returns an environment, called once for each copy; an
            environment of Gymnasium or PettingZoo, also of `gymnasium.make_vec`; or any object with
            the low-level API, which is returned unchanged.
        seed: seed of the environment's random numbers; not used for an object with the low-level
            API.
        n_agents: number of agents or copies in this process; not for environment objects and
            executables.
        env_options: further keyword arguments of the simulator, of the Gymnasium or PettingZoo
            environment, or of `UnityEnvironment`.

    Raises:
        SettingsError: No environment has this name, or the object is not an environment.
        UnityException: The executable cannot be started.
    """
    options = dict(env_options or {})
    packed: tuple[str, dict[str, Any]] | None
    if makes_environments(source):
        packed = "module", {"id": source}
    elif not isinstance(source, str | Path):
        if options or n_agents is not None:
            raise SettingsError(
                "n_agents, env_options: cannot be given for an environment object, which is one "
                "copy; pass its class instead"
            )
        return _of_object(source, seed)
    else:
        source = in_folder(source)
        packed = None if isinstance(source, Path) else environment_of(source).packed()
    if packed is None:
        from pipeline.envs.unity import UnityEnvironment

        program = source if isinstance(source, Path) else _path_of(source)
        return UnityEnvironment(program, seed=seed, **options)
    simulator, fixed = packed
    fixed = fixed | options | ({} if n_agents is None else {"n_agents": n_agents})
    try:
        return InProcessEnvironment(registry.make(simulator, seed=seed, **fixed))
    # The user's function returned an environment of another library, not a simulator.
    except OtherObjectError as other:
        return _of_object(other.env, seed)


def build_env(
    source: str,
    target: Path | str,
    *,
    n_agents: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> Path:
    """Pack a simulator or a third-party environment into an executable.

    Args:
        source: a simulator, such as `balance_ball`; `gymnasium:ID`, `pettingzoo:ID`, or
            `module:function`.
        target: the file to write.
        n_agents: number of agents or copies; None for the simulator's default.
        env_options: further keyword arguments of the simulator, which become fixed in the
            executable.

    Returns:
        The file, which `train` and `make_env` take.

    Raises:
        SettingsError: No environment has this name, or an option is missing.
        StageError: The environment cannot be packed.
    """
    # Only this function needs `pack`; the other functions of this module start faster without it.
    from pipeline.simulators.pack import pack

    packed = named(source).packed()
    if packed is None:
        raise SettingsError(
            f"{source}: is a path, so there is nothing to build; pass the path to `train`"
        )
    simulator, fixed = packed
    more = dict(env_options or {}) | ({} if n_agents is None else {"n_agents": n_agents})
    return pack(simulator, target, **fixed | more)


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
                that does not know the environment's spaces, such as a file for Unity: floats
                [N, *shape], or a list of such arrays, one for each input of the policy.
            action_mask: the environment's mask (1 where allowed), if it is not in the observation;
                for a file that does not know the environment's spaces, bool [N, branch size] for
                each branch, True where forbidden.
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
        if self._form is None:
            layout = self.onnx.description
            steps = network_steps(observation, action_mask, layout, self._where, agent_id)
            return self.onnx.act(steps, deterministic=deterministic)
        steps, is_batch = self._form.steps(observation, action_mask, agent_id)
        actions = self.onnx.act(steps, deterministic=deterministic)
        return self._form.native(actions, is_batch)

    def reset(self, agents: Any = None, *, seed: int | None = None) -> None:
        """Forget the memories of agents; to be called when their episodes have ended.

        A policy without memory has nothing to forget.

        Args:
            agents: bool [N], whether each agent's episode has ended, such as `terminated |
                truncated`, or agent ids; None for all agents.
            seed: new seed of actions that are drawn at random; all memories are then forgotten.
        """
        if seed is not None:
            self.onnx.reset(seed)
        elif agents is None:
            self.onnx.end()
        else:
            chosen = np.atleast_1d(agents)
            self.onnx.end((np.flatnonzero(chosen) if chosen.dtype == bool else chosen).tolist())

    if not TYPE_CHECKING:  # it would make every name an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a removed method, the message names its replacement."""
            instead = {"native": "`act` returns the environment's action", "end": "call `reset`"}
            hint = f": {instead[name]}" if name in instead else ""
            raise AttributeError(f"LoadedPolicy has no '{name}'{hint}")


def load_policy(path: Path | str, *, seed: int = 0) -> LoadedPolicy:
    """Return the policy of a checkpoint or of an ONNX file, ready to act on observations.

    Args:
        path: an ONNX file (`.onnx`) or a checkpoint (`.pt`).
        seed: seed of actions that are drawn at random.

    Raises:
        PipelineError: The file cannot be read, or has no policy.
    """
    path = Path(path)
    # An `.onnx` file is named after its behavior, so the name without `.onnx` is the behavior's.
    if path.suffix == ".onnx":
        return LoadedPolicy(OnnxPolicy(path, seed=seed), path.stem)
    from onnx import helper

    from pipeline.export.publish import build_model, meanings
    from pipeline.trainer.checkpoints.restore import load_policy as saved_policy

    saved = saved_policy(path)
    # The policy of a checkpoint acts through the same ONNX graph that Unity would run.
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
    n_agents: int | None = None,
    env_options: Mapping[str, Any] | None = None,
) -> list[Episode]:
    """Play the first `episodes` episodes that start, each to its end.

    Args:
        policy: a loaded policy or its file; several policies as a mapping by behavior name.
        env: anything that `make_env` takes; it is closed at the end.
        episodes: number of episodes of each behavior, at least 1.
        seed: seed of the environment, and of actions that are drawn at random.
        deterministic: take the most probable actions; False draws them at random.
        n_agents: number of agents or copies, as for `make_env`.
        env_options: keyword arguments of the simulator or the environment, as for `make_env`.

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
    environment = make_env(env, seed=seed, n_agents=n_agents, env_options=env_options)
    try:
        return play(
            environment, policies, episodes=episodes, seed=seed, deterministic=deterministic
        )
    finally:
        environment.close()


def _is_program(source: object) -> bool:
    """Return whether an environment is given as an executable, which runs in another process."""
    if isinstance(source, str):
        return environment_of(source).packed() is None
    return isinstance(source, Path)


def _path_of(name: str) -> str:
    """Return the path of an executable, given its path, its folder, or a name in params.yaml."""
    return str(in_folder(Path(getattr(environment_of(name), "path", name))))


def _of_object(env: Any, seed: int) -> BaseEnv:
    """Wrap an environment of Gymnasium or PettingZoo; return other environments unchanged."""
    try:
        return InProcessEnvironment(around([env], seed=seed))
    except OtherObjectError:
        refuse_other_object(env)
    return env  # type: ignore[no-any-return]  # its members were checked
