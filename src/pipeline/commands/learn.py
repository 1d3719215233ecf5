"""`pipeline learn`: train in one executable with one trainer configuration."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.commands.run_folder import RunFolder, folder_of, run_folder
from pipeline.envs.launch import find_executable
from pipeline.errors import Interrupted
from pipeline.settings import dump_yaml, load_run_settings, to_mapping
from pipeline.stages import process
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.csvfile import CsvSink
from pipeline.tracking.tensorboard import TensorBoardSink
from pipeline.trainer.exporting import publish

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from pipeline.settings import RunSettings
    from pipeline.trainer import TrainResult

CONFIGURATION = "configuration.yaml"
_OVERRIDES = {
    "env": "env_settings.env_path",
    "num_envs": "env_settings.num_envs",
    "base_port": "env_settings.base_port",
    "timeout_wait": "env_settings.timeout_wait",
    "seed": "env_settings.seed",
    "env_args": "env_settings.env_args",
    "no_graphics": "engine_settings.no_graphics",
    "run_id": "checkpoint_settings.run_id",
    "results_dir": "checkpoint_settings.results_dir",
    "resume": "checkpoint_settings.resume",
    "force": "checkpoint_settings.force",
    "torch_device": "torch_settings.device",
}


def learn(arguments: argparse.Namespace) -> str:
    """Train, and say where the results are.

    Raises:
        PipelineError: The configuration or the environment cannot be used, or a signal stopped
            the run after its state was saved.
    """
    settings = _settings(arguments)
    checkpoint = settings.checkpoint_settings
    run_dir = folder_of(Path(checkpoint.results_dir), checkpoint.run_id)
    seed = _seed(settings, run_dir)
    settings = settings.with_seed(seed)
    with (
        process.signals(),
        run_folder(run_dir, resume=checkpoint.resume, force=checkpoint.force) as folder,
    ):
        result = _train(settings, seed, folder, arguments)
        files.write_json(run_dir / "run_logs" / "seconds.json", dict(result.seconds))
        for one in result.behaviors.values():
            publish(one.checkpoint, run_dir)
    return _told(settings, seed, run_dir, result)


def _told(settings: RunSettings, seed: int, run_dir: Path, result: TrainResult) -> str:
    """Where everything is, and what to do next."""
    lines = [f"Trained with seed {seed}; everything is in {run_dir}."]
    for name, one in result.behaviors.items():
        mean = "no episode ended" if one.mean_reward is None else f"{one.mean_reward:.3f}"
        lines.append(f"  {name}: {one.steps} steps, mean reward {mean}")
        lines.append(f"    policy for Unity: {run_dir / name}.onnx")
        lines.append(f"    checkpoint:       {one.checkpoint}")
    lines.append(f"Time: {_split(result.seconds)}")
    if env := settings.env_settings.env_path:
        first = run_dir / f"{next(iter(result.behaviors))}.onnx"
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


def _settings(arguments: argparse.Namespace) -> RunSettings:
    given = {key: getattr(arguments, name) for name, key in _OVERRIDES.items()}
    chosen = {key: value for key, value in given.items() if value not in (None, False, [])}
    return load_run_settings(
        arguments.config,
        overrides={k: str(v) if isinstance(v, Path) else v for k, v in chosen.items()},
        overrides_from="command line",
    )


def _train(
    settings: RunSettings, seed: int, folder: RunFolder, arguments: argparse.Namespace
) -> TrainResult:
    if settings.env_settings.env_path is not None:
        find_executable(settings.env_settings.env_path)  # a slip is named before slow imports
    from pipeline import trainer

    run_dir = folder.path
    limits = {name: one.max_steps for name, one in settings.behaviors.items()}

    def on_start() -> None:
        files.write_whole(run_dir / CONFIGURATION, dump_yaml(to_mapping(settings)))
        folder.start()

    try:
        return trainer.train(
            None if (path := settings.env_settings.env_path) is None else Path(path),
            settings,
            seed=seed,
            run_dir=run_dir,
            num_envs=settings.env_settings.num_envs,
            env_args=tuple(settings.env_settings.env_args or ()),
            resume=settings.checkpoint_settings.resume,
            device=settings.torch_settings.device,
            sinks=[
                ConsoleSink(max_steps=limits),
                CsvSink(run_dir / "progress.csv"),
                TensorBoardSink(run_dir),
            ],
            base_port=arguments.base_port,
            log_folder=run_dir / "run_logs",
            on_start=on_start,
        )
    except Interrupted as error:
        if not folder.started:
            raise
        again = f"{error}; to continue, give the same command with --resume"
        raise Interrupted(again, exit_code=error.exit_code) from error
