"""`pipeline learn`: train in one executable, or in the Unity Editor, with one configuration."""

from __future__ import annotations

import logging
import secrets
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__, files
from pipeline.algos.ranks import launched
from pipeline.commands.learn_settings import flags_named, plan_of
from pipeline.commands.run_folder import RunFolder, folder_of, run_folder
from pipeline.envs.launch import find_executable
from pipeline.errors import Interrupted
from pipeline.settings import dump_yaml, load_run_settings, to_mapping
from pipeline.stages import process, provenance
from pipeline.stages.export import publish
from pipeline.tracking.console import ConsoleSink, hyperparameters_text
from pipeline.tracking.csvfile import CsvSink
from pipeline.tracking.tensorboard import TensorBoardSink
from pipeline.tracking.timers import TimersSink, run_metadata
from pipeline.tracking.updates import UpdatesCsvSink
from pipeline.trainer.first_weights import first_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from pipeline.commands.learn_settings import Plan
    from pipeline.settings import RunSettings
    from pipeline.tracking.base import Sink
    from pipeline.trainer import TrainResult

_log = logging.getLogger(__name__)

CONFIGURATION = "configuration.yaml"
LOGS = "run_logs"
_TRAINER = f"pipeline {__version__}"


def learn(arguments: argparse.Namespace) -> str:
    """Train, and say where the results are; beyond the first of several learners, only train.

    Raises:
        PipelineError: The configuration or the environment cannot be used, or a signal stopped
            the run after its state was saved.
    """
    if launched()[0] > 0:
        from pipeline.trainer.follower import follow

        sys.exit(follow())
    plan = plan_of(arguments)
    if plan.settings.debug:
        logging.getLogger("pipeline").setLevel(logging.DEBUG)
    with flags_named(plan.flags):
        return "\n".join(_run(plan, plan.run(number)) for number in range(plan.n_runs))


def _run(plan: Plan, settings: RunSettings) -> str:
    checkpoint = settings.checkpoint_settings
    run_dir = folder_of(Path(checkpoint.results_dir), checkpoint.run_id)
    seed = _seed(settings, run_dir)
    settings = settings.with_seed(seed)
    weights = first_weights(settings)
    with (
        process.signals(),
        run_folder(
            run_dir,
            resume=checkpoint.resume,
            force=checkpoint.force,
            watched=_only_watched(settings),
        ) as folder,
    ):
        timers = TimersSink(run_dir / LOGS / "timers.json", metadata=run_metadata(trainer=_TRAINER))
        result = _train(plan, settings, seed, folder, weights, timers)
        if not _only_watched(settings):
            files.write_json(run_dir / LOGS / "seconds.json", dict(result.seconds))
            n_updates = sum(one.n_updates for one in result.behaviors.values())
            timers.finish(result.seconds, n_updates=n_updates)
    return _told(settings, seed, run_dir, result)


def _only_watched(settings: RunSettings) -> bool:
    """Whether an earlier run is shown, whose records stay as they are."""
    asked = settings.checkpoint_settings
    return asked.inference and asked.resume


def _told(settings: RunSettings, seed: int, run_dir: Path, result: TrainResult) -> str:
    """Where everything is, and what to do next."""
    inference = settings.checkpoint_settings.inference
    verb = "Played" if inference else "Trained"
    lines = [f"{verb} with seed {seed}; everything is in {run_dir}."]
    for name, one in result.behaviors.items():
        mean = "no episode ended" if one.mean_reward is None else f"{one.mean_reward:.3f}"
        rating = "" if one.elo is None else f", ELO {one.elo:.1f}"
        lines.append(f"  {name}: {one.steps} steps, mean reward {mean}{rating}")
        if not inference:
            lines.append(f"    policy for Unity: {files.named(run_dir, name, '.onnx')}")
            lines.append(f"    checkpoint:       {one.checkpoint}")
    lines.append(f"Time: {_split(result.seconds)}")
    if not inference and (env := settings.env_settings.env_path):
        first = files.named(run_dir, next(iter(result.behaviors)), ".onnx")
        lines.append(f"Play it: pipeline evaluate {first} --env {env}")
    return "\n".join(lines)


def _seed(settings: RunSettings, run_dir: Path) -> int:
    """The seed that was asked for, that of the run to resume, or one drawn."""
    seed = settings.env_settings.seed
    written = run_dir / CONFIGURATION
    if seed < 0 and settings.checkpoint_settings.resume and written.is_file():
        seed = load_run_settings(written).env_settings.seed
    return secrets.randbelow(10_000) if seed < 0 else seed


def _split(seconds: Mapping[str, float]) -> str:
    """Share of each part, the largest first."""
    total = seconds["total"]
    parts = {part: value for part, value in seconds.items() if part != "total"}
    parts["other"] = max(total - sum(parts.values()), 0.0)
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return f"{total:.1f} s: " + ", ".join(f"{name} {value / total:.0%}" for name, value in ordered)


def _train(
    plan: Plan,
    settings: RunSettings,
    seed: int,
    folder: RunFolder,
    weights: Mapping[str, Path],
    timers: TimersSink,
) -> TrainResult:
    env, checkpoint = settings.env_settings, settings.checkpoint_settings
    if env.env_path is not None:
        find_executable(env.env_path)  # a slip is named before slow imports
    elif env.env_args:
        _log.warning("--env-args is ignored: the Unity Editor takes no arguments.")
    from pipeline import trainer

    run_dir = folder.path
    history = [provenance.of_learn(settings, seed, {n: folder.now(p) for n, p in weights.items()})]

    def on_start() -> None:
        versions = run_metadata(trainer=_TRAINER)
        _log.info(
            "Version information: %s, Communicator API %s, PyTorch %s",
            versions["trainer"],
            versions["communication_protocol_version"],
            versions["pytorch_version"],
        )
        if not _only_watched(settings):
            files.write_whole(run_dir / CONFIGURATION, dump_yaml(to_mapping(settings)))
        folder.start()
        timers.start()

    try:
        return trainer.train(
            None if env.env_path is None else Path(env.env_path),
            settings,
            seed=seed,
            run_dir=run_dir,
            num_envs=env.num_envs,
            env_args=tuple(env.env_args or ()),
            resume=checkpoint.resume,
            init_from={name: folder.now(path) for name, path in weights.items()},
            device=settings.torch_settings.device,
            sinks=_sinks(settings, run_dir, timers),
            base_port=plan.base_port,
            log_folder=None if _only_watched(settings) else run_dir / LOGS,
            on_start=on_start,
            inference=checkpoint.inference,
            exporter=partial(publish, history=history),
            starting_lesson=plan.starting_lesson or 0,
            learners=plan.learners,
        )
    except Interrupted as error:
        if not folder.started or checkpoint.inference:
            raise
        again = f"{error}; to continue, give the same command with --resume"
        raise Interrupted(again, exit_code=process.exit_code(error.exit_code)) from error


def _sinks(settings: RunSettings, run_dir: Path, timers: TimersSink) -> list[Sink]:
    limits = {name: one.max_steps for name, one in settings.behaviors.items()}
    if _only_watched(settings):
        return [ConsoleSink(max_steps=limits)]
    described: dict[str, Any] = to_mapping(settings)["behaviors"]
    sinks: list[Sink] = [
        ConsoleSink(max_steps=limits),
        CsvSink(run_dir / "progress.csv"),
        TensorBoardSink(
            run_dir,
            hyperparameters={name: hyperparameters_text(one) for name, one in described.items()},
            keep_earlier=settings.checkpoint_settings.resume,
        ),
        timers,
    ]
    if settings.debug:
        sinks.append(UpdatesCsvSink(run_dir / LOGS))
    return sinks
