"""`pipeline learn`: train in one executable with one trainer configuration."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import files
from pipeline.errors import SettingsError
from pipeline.settings import dump_yaml, load_run_settings, to_mapping
from pipeline.stages.export import publish
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.csvfile import CsvSink
from pipeline.tracking.tensorboard import TensorBoardSink

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from pipeline.settings import RunSettings
    from pipeline.trainer import TrainResult

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
    run_dir = Path(checkpoint.results_dir) / checkpoint.run_id
    _prepare(run_dir, resume=checkpoint.resume, force=checkpoint.force)
    seed = settings.env_settings.seed
    seed = secrets.randbelow(10_000) if seed < 0 else seed
    settings = settings.with_seed(seed)
    files.write_whole(run_dir / "configuration.yaml", dump_yaml(to_mapping(settings)))
    result = _train(settings, seed, run_dir, arguments)
    files.write_json(run_dir / "run_logs" / "seconds.json", dict(result.seconds))
    for one in result.behaviors.values():
        publish(one.checkpoint, run_dir)
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


def _prepare(run_dir: Path, *, resume: bool, force: bool) -> None:
    if run_dir.exists() and any(run_dir.iterdir()):
        if force:
            shutil.rmtree(run_dir)
        elif not resume:
            raise SettingsError(
                "Previous data from this run ID was found. Either specify a new run ID, use "
                "--resume to resume this run, or use the --force parameter to overwrite existing "
                "data."
            )
    elif resume:
        raise SettingsError(
            "Previous data from this run ID was not found. Train a new run by removing the "
            "--resume flag."
        )
    run_dir.mkdir(parents=True, exist_ok=True)


def _train(
    settings: RunSettings, seed: int, run_dir: Path, arguments: argparse.Namespace
) -> TrainResult:
    from pipeline import trainer

    limits = {name: one.max_steps for name, one in settings.behaviors.items()}
    return trainer.train(
        None if settings.env_settings.env_path is None else Path(settings.env_settings.env_path),
        settings,
        seed=seed,
        run_dir=run_dir,
        num_envs=settings.env_settings.num_envs,
        env_args=tuple(settings.env_settings.env_args or ()),
        resume=settings.checkpoint_settings.resume,
        device=settings.torch_settings.device or "cpu",
        sinks=[
            ConsoleSink(max_steps=limits),
            CsvSink(run_dir / "progress.csv"),
            TensorBoardSink(run_dir),
        ],
        base_port=arguments.base_port,
        log_folder=run_dir / "run_logs",
    )
