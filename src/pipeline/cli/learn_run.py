"""Train with one configuration, in the run's folder, for `pipeline learn`.

If the run does not start, its folder is left unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import __version__, files, machine
from pipeline.cli.learn_settings import Plan, flags_named
from pipeline.dag import process, provenance
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import SimulatorSource
from pipeline.envs.named_env import executable_of, in_process_source
from pipeline.errors import Interrupted, SettingsError, UnityException, few, shell_command
from pipeline.settings import RunSettings, dump_yaml, load_run_settings, to_mapping
from pipeline.tracking.base import Callback, Sink
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.result import BehaviorResult, TrainResult
from pipeline.tracking.sinks import run_outside_dag, standard_sinks
from pipeline.tracking.timers import TimersSink, process_facts
from pipeline.trainer.checkpoints.file import RESUME_FILE
from pipeline.trainer.checkpoints.restore import first_weights

_log = logging.getLogger(__name__)

CONFIGURATION = "configuration.yaml"
LOGS = "run_logs"
_WORTH_COMPILING = 50_000
"""Gradient steps that save twice the time of compiling: 0.3 ms each against 5 to 10 s. The number
is not measured, so that equal commands give equal bytes."""
_MAX_NAMES = 5
"""Maximum number of runs that a message names."""
_TRAINER = f"pipeline {__version__}"


def learn(plan: Plan) -> str:
    """Train as planned by the command line, and return where the results are."""
    # The configuration file may set `debug`, too, so the log level is not known before the settings
    # are read.
    if plan.settings.debug:
        logging.getLogger("pipeline").setLevel(logging.DEBUG)
    with flags_named(plan.flags):
        return "\n".join(_run(plan, plan.run(number)) for number in range(plan.n_runs))


def _run(plan: Plan, settings: RunSettings) -> str:
    checkpoint = settings.checkpoint_settings
    run_dir = folder_of(Path(checkpoint.results_dir), checkpoint.run_id)
    settings = _with_compile(settings.with_seed(_seed(settings, run_dir)), run_dir)
    # Weights are checked before the folder is made, so that a wrong name leaves nothing behind.
    weights = first_weights(settings)
    how = {"resume": checkpoint.resume, "force": checkpoint.force}
    # `signals` comes before `run_folder`, so that `run_folder` also cleans up after SIGTERM.
    with process.signals(), run_folder(run_dir, **how, read_only=_is_read_only(settings)) as folder:
        facts = process_facts(trainer=_TRAINER)
        timers = TimersSink(run_dir / LOGS / "timers.json", metadata=facts)
        result = _train(plan, settings, folder, weights, timers)
        # A run that was finished before, or is only played, keeps the times of its training.
        if folder.started and not _is_read_only(settings):
            files.write_json(run_dir / LOGS / "seconds.json", dict(result.seconds))
            files.write_json(run_dir / LOGS / "machine.json", machine.facts())
    return _summary(settings, folder, result)


def _is_read_only(settings: RunSettings) -> bool:
    """Return whether the run only plays an earlier run (--inference --resume), writing no file."""
    checkpoints = settings.checkpoint_settings
    return checkpoints.inference and checkpoints.resume


def _summary(settings: RunSettings, folder: files.RunFolder, result: TrainResult) -> str:
    inference, run_dir = settings.checkpoint_settings.inference, folder.path
    verb = "Played" if inference else "Trained"
    done = f"{verb} with seed {settings.env_settings.seed}" if folder.started else "Finished before"
    lines = [f"{done}; everything is in {run_dir}."]
    for name, behavior in result.behaviors.items():
        rating = "" if behavior.elo is None else f", ELO {behavior.elo:.1f}"
        lines.append(f"  {name}: {behavior.steps} steps, {_mean_of(behavior)}{rating}")
        if not inference:
            lines.append(f"    policy for Unity: {files.named(run_dir, name, '.onnx')}")
            lines.append(f"    checkpoint:       {behavior.checkpoint}")
    if folder.started:
        lines.append(f"Time: {_split(result.seconds)}")
    if not inference and (env := settings.env_settings.env_path):
        # A single policy is played from its file, several policies from the folder with all files.
        only, *others = result.behaviors
        played = run_dir if others else files.named(run_dir, only, ".onnx")
        args = settings.env_settings.env_args
        rest = ["--env-args", *args] if args else []
        command = shell_command("pipeline", "evaluate", played, "--env", env, *rest)
        lines.append(f"Play it: {command}")
    return "\n".join(lines)


def _mean_of(result: BehaviorResult) -> str:
    if result.mean_reward is None:
        return "no episode has ended"
    episodes = f"last {result.n_recent} episodes" if result.n_recent > 1 else "only episode"
    # This is a mean of the last episodes, because the first episodes have the untrained policy.
    return f"mean reward {result.mean_reward:.3f} over the {episodes}"


def _seed(settings: RunSettings, run_dir: Path) -> int:
    """Return the seed in the settings; if it is negative, the resumed run's seed, or a new seed."""
    seed = settings.env_settings.seed
    written = run_dir / CONFIGURATION
    if seed < 0 and settings.checkpoint_settings.resume and written.is_file():
        seed = load_run_settings(written).env_settings.seed
    # The system draws the seed, because no generator has a seed yet. A user can easily type a
    # number of at most four digits again.
    return secrets.randbelow(10_000) if seed < 0 else seed


def _with_compile(settings: RunSettings, run_dir: Path) -> RunSettings:
    """Replace `torch_settings.compile: null` by the resumed run's choice, or by a new choice."""
    if settings.torch_settings.compile is not None:
        return settings
    written, checkpoint = run_dir / CONFIGURATION, settings.checkpoint_settings
    kept = None
    if checkpoint.resume and written.is_file():
        kept = load_run_settings(written).torch_settings.compile
    if kept is None:
        behaviors = [*settings.behaviors.values()]
        if settings.default_settings is not None:
            behaviors = behaviors or [settings.default_settings]
        n_steps = sum(x.max_steps * x.hyperparameters.minibatches_per_step for x in behaviors)
        kept = n_steps >= _WORTH_COMPILING and not (checkpoint.inference or machine.is_portable())
        if kept:
            _log.info(
                "Gradient steps are compiled, as the run has about %.0f of them; "
                "torch_settings.compile: false turns this off.",
                n_steps,
            )
    return replace(settings, torch_settings=replace(settings.torch_settings, compile=kept))


def _split(seconds: Mapping[str, float]) -> str:
    """Return a text with the total time, and the share of each part, the largest share first."""
    total = seconds["total"]
    parts = {part: value for part, value in seconds.items() if part != "total"}
    # The value is at least 0, because the measured parts may add up to more than the total.
    parts["other"] = max(total - sum(parts.values()), 0.0)
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return f"{total:.1f} s: " + ", ".join(f"{name} {value / total:.0%}" for name, value in ordered)


def _train(
    plan: Plan,
    settings: RunSettings,
    folder: files.RunFolder,
    weights: Mapping[str, Path],
    timers: TimersSink,
) -> TrainResult:
    env, checkpoint = settings.env_settings, settings.checkpoint_settings
    # A program of None means to wait for players that are started elsewhere, such as the Unity
    # Editor.
    program = None
    if env.env_path is not None:
        if (device := settings.torch_settings.device) not in (None, "cpu"):
            from pipeline.trainer.supported import usable_device

            usable_device(device)  # an unusable device is refused before an executable is built
        program = executable_of(env.env_path)
    elif env.env_args:
        _log.warning("--env-args has no effect: the Unity Editor takes no arguments.")
    from pipeline import trainer

    run_dir = folder.path
    # `--initialize-from` may name the run that `--force` has just renamed.
    first = {name: folder.current_path(path) for name, path in weights.items()}
    job = trainer.JobSpec(
        _in_process(plan, settings) or program,
        settings,
        seed=env.seed,
        run_dir=run_dir,
        num_envs=env.num_envs,
        env_args=tuple(env.env_args or ()),
        resume=checkpoint.resume,
        init_from=first,
        torch_threads=settings.torch_settings.threads,
        base_port=plan.base_port,
        log_folder=None if _is_read_only(settings) else run_dir / LOGS,
        starting_lesson=plan.starting_lesson or 0,
    )
    record = _Record(settings, folder, timers, first, program)
    record.names_files = plan.config == "built-in"
    try:
        return trainer.train(
            job,
            device=settings.torch_settings.device,
            callbacks=[record, *_sinks(plan, settings, program, run_dir, timers)],
            inference=checkpoint.inference,
            # The trainer gets the exporter as an argument, because the trainer may not import the
            # DAG (layers in pyproject.toml).
            exporter=partial(publish, history=record.history),
            learners=plan.learners,
        )
    except Interrupted as error:
        if not folder.started or checkpoint.inference:
            raise
        # With --force the same command would begin a new run, so the advice is --resume instead.
        instead = " instead of --force" if "checkpoint_settings.force" in plan.flags else ""
        message = f"{error}; to continue, give the same command with --resume{instead}"
        raise Interrupted(message, exit_code=process.exit_code(error.exit_code)) from error
    except UnityException as error:
        # Before the first checkpoint there is nothing to resume.
        is_saved = any(run_dir.glob(f"*/{RESUME_FILE}"))
        if folder.started and is_saved and not checkpoint.inference:
            remedy = "to continue, give the same command with --resume."
            error.args = (f"{error}\nThe state is saved in {run_dir}: {remedy}",)
        raise


class _Record(Callback):
    """Writes the run's configuration, and keeps the record of the training for exported files."""

    def __init__(
        self,
        settings: RunSettings,
        folder: files.RunFolder,
        timers: TimersSink,
        weights: Mapping[str, Path],
        program: Path | None,
    ) -> None:
        self._settings, self._folder, self._timers = settings, folder, timers
        self._of_learn = partial(provenance.of_learn, weights=weights, program=program)
        # The exporter keeps a reference to this list, so the list is changed in place.
        self.history = [self._of_learn(settings, settings.env_settings.seed)]
        self.names_files = False
        """Whether to name the files of config/ that have settings for a behavior."""

    def on_start(self, behavior: str, settings: Mapping[str, Any]) -> None:  # noqa: ARG002
        key = re.compile(rf"^  {re.escape(behavior)}:", re.MULTILINE)
        paths = sorted(Path("config").glob("*/*.yaml")) if self.names_files else []
        if found := [str(path) for path in paths if key.search(path.read_text())]:
            _log.warning("%s: settings for it are in %s.", behavior, few(found, _MAX_NAMES))

    def on_settings(self, settings: RunSettings) -> None:
        if settings != self._settings:
            self._settings = settings
            self.history[:] = [self._of_learn(settings, settings.env_settings.seed)]
        # A run that is only played keeps the configuration of its training.
        if not _is_read_only(settings):
            path = self._folder.path / CONFIGURATION
            files.write_whole(path, dump_yaml(to_mapping(settings)))
        if self._folder.started:
            return
        facts = process_facts(trainer=_TRAINER)
        keys = "trainer", "communication_protocol_version", "pytorch_version"
        text = "Version information: %s, Communicator API %s, PyTorch %s"
        _log.info(text, *(facts[key] for key in keys))
        # If an error occurs before this line, `run_folder` restores the folder.
        self._folder.start()
        self._timers.start()


def _in_process(plan: Plan, settings: RunSettings) -> SimulatorSource | None:
    """Return the simulator to step in this process; None if a process would work beside it."""
    from pipeline.algos.process_group import launched

    env, behaviors = settings.env_settings, settings.sections.values()
    is_alone = env.num_envs == max(plan.learners, launched()[1]) == 1
    if env.env_path is None or not is_alone or any(x.threaded for x in behaviors):
        return None
    source = in_process_source(env.env_path, env.env_args or (), n_areas=env.num_areas)
    if source is None:
        return None
    _log.info("%s: steps in the trainer's process, which is faster.", env.env_path)
    return replace(source, is_spread=not settings.environment_parameters)


def _sinks(
    plan: Plan,
    settings: RunSettings,
    program: Path | None,
    run_dir: Path,
    timers: TimersSink,
) -> list[Sink]:
    if _is_read_only(settings):
        return [ConsoleSink()]
    from pipeline.trainer.device_choice import devices_here

    run = run_outside_dag(
        settings,
        env=settings.env_settings.env_path,
        build=program,
        folder=run_dir,
        seed=settings.env_settings.seed,
        source="pipeline learn",
        trainer=plan.config,
        device=settings.torch_settings.device or " or ".join(map(str, devices_here())),
        torch_threads=settings.torch_settings.threads or "fastest",
        resume=settings.checkpoint_settings.resume,
        debug_folder=run_dir / LOGS if settings.debug else None,
    )
    return [*standard_sinks(run, plan.track), timers]


def folder_of(results: Path, run_id: str) -> Path:
    """Return the folder of the run with this id."""
    folder = results / run_id
    # `--run-id ../x` would write outside of the results folder, and --force would rename it.
    if not run_id or results.resolve() not in folder.resolve().parents:
        raise SettingsError(
            f"--run-id: {run_id!r} does not name a folder in {results}; use a plain name"
        )
    return folder


@contextlib.contextmanager
def run_folder(
    folder: Path, *, resume: bool, force: bool, read_only: bool = False
) -> Iterator[files.RunFolder]:
    """Create the run's folder for a `with` block, which calls `start` once the run has started.

    No other process may write into it, unless this run is `read_only`. An earlier run that `force`
    replaces is renamed to `<folder>.1`, `<folder>.2`, ... If the block ends before the run has
    started, the new files are deleted, and the earlier run gets its name back.

    Raises:
        SettingsError: There is an earlier run and neither `resume` nor `force`; there is no run to
            resume; the run is still being written; or a file has the folder's path.
    """
    # The nearest existing parent is checked here: if it is a file, `mkdir` would fail with an error
    # about a path below that file.
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise SettingsError(
            f"results_dir: {nearest} is a file, but a run needs a folder; give another "
            "--results-dir or --run-id, or move the file"
        )
    with contextlib.nullcontext() if read_only else files.sole_writer(folder):
        # Files that exist before the run stay if the run does not start.
        before = set(folder.iterdir()) if folder.exists() else None
        used = before is not None and _has_run(folder)
        if used and not (resume or force):
            raise SettingsError(
                "Previous data from this run ID was found. Either specify a new run ID, use "
                "--resume to resume this run, or --force to begin again: the present folder is "
                f"kept as {files.free_name(folder).name}. ({folder})"
            )
        if resume and (before is None or (before and not used)):
            raise SettingsError(
                "Previous data from this run ID was not found. Train a new run by removing the "
                f"--resume flag. ({folder}){_runs_beside(folder)}"
            )
        with files.run_folder(folder, replace=used and force and not resume) as run:
            try:
                yield run
            finally:
                if not (run.started or resume or run.replaced) and before is not None:
                    _remove_started(set(folder.iterdir()) - before)


def _runs_beside(folder: Path) -> str:
    """Return a sentence that lists the runs beside `folder`, the most similar names first."""
    names = [path.parent.name for path in sorted(folder.parent.glob(f"*/{CONFIGURATION}"))]
    # `sort` is stable, so equally similar names stay in alphabetical order.
    names.sort(key=lambda name: -SequenceMatcher(None, name, folder.name).ratio())
    return f" {folder.parent} has {few(names, _MAX_NAMES) or 'no run'}."


def _remove_started(paths: Iterable[Path]) -> None:
    """Delete files and folders of a run that did not start."""
    for path in paths:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        # A folder with a configuration is another run, which has started in the meantime.
        elif not (path / CONFIGURATION).is_file():
            shutil.rmtree(path, ignore_errors=True)


def _has_run(folder: Path) -> bool:
    """Return whether a folder itself has files of a run, not only subfolders with runs."""
    return any(
        path.is_symlink()
        or not path.is_dir()
        or (not (path / CONFIGURATION).is_file() and _has_run(path))
        for path in folder.iterdir()
        if not path.name.startswith(".")  # lock files begin with a dot
    )
