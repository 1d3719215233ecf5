"""`pipeline card`: write a folder with a run's policies and a model card about them."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import __version__, files
from pipeline.cli.init import source_of
from pipeline.cli.parser import Parser, option
from pipeline.dag.reporting.results import is_outdated, read_evaluation
from pipeline.errors import SettingsError, shell_command
from pipeline.evaluation.comparison import Outcome, Task
from pipeline.evaluation.tables import number
from pipeline.settings import load_run_settings
from pipeline.settings.project.params import load_params
from pipeline.settings.yaml_file import dump_yaml
from pipeline.tracking.run_metadata import STOCHASTIC

CARD = "README.md"
_CURVE = "learning_{behavior}.png"
_VIDEOS = ("median.gif", "best.gif")
_RUN_CONFIGURATION = "configuration.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained run, made by the stages of the DAG or by `pipeline learn`."""

    name: str
    """Title of the card."""
    seed: int | None
    environment: str
    env_args: Sequence[str]
    """Arguments for the environment's executable."""
    policies: tuple[Path, ...]
    """ONNX files; the name of each file is the name of its behavior."""
    more: tuple[Path, ...]
    """Results and videos that are copied into the card's folder."""
    outcomes: tuple[Outcome, ...]
    """Results of every seed of the run's experiment."""

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The evaluation's metrics of each behavior; empty if the run was not evaluated."""
        # `train` also writes a metrics.json, so only a path in the folder of `evaluate` counts.
        path = next((file for file in self.more if file.parent.parts[-3:-2] == ("evaluate",)), None)
        return read_evaluation(path.parent / "metrics.json") if path else {}


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline card`."""
    text = "<experiment>-<seed> of params.yaml, or results/<run-id> of `pipeline learn`"
    parser.add_argument("run", metavar="RUN", help=text)
    text = "the policy's license, by its name on the Hub: apache-2.0, cc-by-4.0, other, ..."
    option(parser, "--license NAME", text)
    option(parser, "-o --output FOLDER", "the folder to write (default: cards/ and the run's name)")


def run(arguments: argparse.Namespace) -> str:
    """Write the card's folder, and return what to do with it."""
    folder: Path = arguments.output or Path("cards", Path(arguments.run).name)
    write(find(arguments.run), folder, licence=arguments.license)
    return (
        f"Wrote {folder / CARD}. Look at it, then "
        f"`{shell_command('pipeline', 'push', folder, '--repo-id', 'NAME/POLICY')}`."
    )


def find(name: str) -> Run:
    """Return the run with the name `<experiment>-<seed>`, or the run in the folder `name`."""
    path = Path(name)
    if (path / _RUN_CONFIGURATION).is_file():
        return _of_learn(path)
    if path.is_dir() or not Path("params.yaml").is_file():
        raise SettingsError(
            f"{name}: is not a run; give <experiment>-<seed> in the folder of params.yaml, or the "
            "folder of a run of `pipeline learn`"
        )
    params = load_params("params.yaml")
    known = [f"{key}-{seed}" for key, one in params.experiments.items() for seed in one.seeds]
    if name not in known:
        raise SettingsError(f"{name}: params.yaml has no such run; it has {', '.join(known)}")
    # The name is split at the last hyphen, because names of experiments may have hyphens.
    experiment, _, seed = name.rpartition("-")
    environment = params.experiments[experiment].environment
    named = source_of(params.environments[environment]) or environment
    return _of_dag(experiment, int(seed), named, params.environments[environment].args)


def _of_dag(experiment: str, seed: int, environment: str, args: Sequence[str]) -> Run:
    from pipeline.cli.compare import outcomes_of

    place = f"{experiment}/seed{seed}"
    exported, evaluated, trained = (
        Path("results", stage, place) for stage in ("export", "evaluate", "train")
    )
    remedy = shell_command("dvc", "repro", f"export@{experiment.replace('/', '-')}-{seed}")
    policies = _policies(exported, remedy)
    # A card must not describe one policy and contain another.
    if is_outdated(exported / "export.json", trained / "policy.pt"):
        raise SettingsError(
            f"{exported}: was exported from an earlier policy than the one in {trained}; export it "
            f"again with `{remedy}`"
        )
    more = [trained / "progress.csv"]
    if not is_outdated(evaluated / "metrics.json", trained / "policy.pt"):
        more = [evaluated / name for name in ("episodes.csv", *_VIDEOS)] + more
    return Run(
        name=experiment,
        seed=seed,
        environment=environment,
        env_args=args,
        policies=policies,
        more=tuple(path for path in more if path.is_file()),
        outcomes=tuple(outcomes_of([Path("results/train", experiment)])),
    )


def _of_learn(folder: Path) -> Run:
    from pipeline.cli.compare import outcomes_of

    # The command names the folder and the run, because the configuration still has the run's old
    # folder if the folder was moved or copied.
    run = "--results-dir", folder.parent, "--run-id", folder.name
    configuration = folder / _RUN_CONFIGURATION
    remedy = shell_command("pipeline", "learn", configuration, *run, "--resume")
    policies = _policies(folder, remedy)
    outcomes = outcomes_of([folder])
    first = next(iter(outcomes), None)
    more = [folder / name for name in (_RUN_CONFIGURATION, "progress.csv")]
    return Run(
        name=folder.resolve().name,
        seed=None if first is None else first.seed,
        environment="" if first is None else first.environment,
        env_args=load_run_settings(configuration).env_settings.env_args or (),
        policies=policies,
        more=tuple(path for path in more if path.is_file()),
        outcomes=tuple(outcomes),
    )


def _policies(folder: Path, remedy: str) -> tuple[Path, ...]:
    policies = tuple(sorted(folder.glob("*.onnx")))
    if not policies:
        raise SettingsError(f"{folder}: has no policy (*.onnx) yet; export it with `{remedy}`")
    return policies


def write(run: Run, folder: Path, *, licence: str | None = None) -> None:
    """Write the card, and copy policies, results and videos into its folder."""
    from pipeline.evaluation.charts import learning
    from pipeline.evaluation.comparison import compare
    from pipeline.evaluation.plots import plot

    # All files or none are written, so that a half-written folder cannot be pushed.
    with files.whole_folder(folder) as part:
        tasks = compare(run.outcomes)
        text = _text(run, tasks, licence)
        for path in (*run.policies, *run.more):
            shutil.copyfile(path, part / path.name)
        for task in tasks:
            if (chart := learning(task)) is not None:
                file = part / _CURVE.format(behavior=task.behavior)
                plot(file, replace(chart, mark=None))
        files.write_whole(part / CARD, f"---\n{dump_yaml(_front(run, licence))}---\n\n{text}")


def _front(run: Run, licence: str | None) -> dict[str, Any]:
    """Return the metadata that the Hub reads: licence, tags, and the score as a result."""
    behaviors = [path.stem for path in run.policies]
    front: dict[str, Any] = {"license": licence} if licence else {}
    front |= {
        # ML-Agents' own upload writes the same library name and tags, so the Hub lists these
        # policies with other ML-Agents policies.
        "library_name": "ml-agents",
        "tags": [
            *behaviors,
            "reinforcement-learning",
            "deep-reinforcement-learning",
            *(f"ML-Agents-{name}" for name in behaviors),
            "onnx",
        ],
    }
    results = [
        {
            "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
            "dataset": {"name": behavior, "type": run.environment or behavior},
            "metrics": [
                {
                    "type": "mean_reward",
                    "name": "mean_reward",
                    "value": f"{metrics['mean_return']:.2f} +/- {metrics['std_return']:.2f}",
                    # Only the Hub itself may mark a score as verified.
                    "verified": False,
                }
            ],
        }
        for behavior, metrics in run.metrics.items()
    ]
    return front | ({"model-index": [{"name": run.name, "results": results}]} if results else {})


def _text(run: Run, tasks: Sequence[Task], licence: str | None) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from pipeline.cli.provenance import read
    from pipeline.export.layout import describe, load

    records = read(run.policies[0])
    # A pretrained policy has several records; the card shows the settings of the training.
    trainings = (record for record in records if record["stage"] in ("train", "learn"))
    trained = next(trainings, records[-1])
    settings: Mapping[str, Any] = trained["parameters"].get("settings", trained["parameters"])
    metrics, names = run.metrics, [policy.name for policy in run.policies]
    rest = ["--env-args", *run.env_args] if run.env_args else []
    play = shell_command(
        "pipeline", "evaluate", *names, "--env", run.environment or "ENVIRONMENT", *rest
    )
    environment = Environment(  # noqa: S701  # the text is Markdown, not HTML
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        # Jinja's default leaves an empty place for a misspelt name; `StrictUndefined` raises an
        # error.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "interval": _interval, "sha256": files.sha256_of}
    return environment.get_template("card.md.j2").render(
        run=run,
        tasks=tasks,
        licence=licence,
        version=__version__,
        policies=[(path, describe(load(path))) for path in run.policies],
        metrics=metrics,
        is_stochastic=any(STOCHASTIC in numbers for numbers in metrics.values()),
        has_curves=any(standing.curves for task in tasks for standing in task.standings),
        curve=_CURVE,
        videos=[file for file in run.more if file.name in _VIDEOS],
        play=play,
        settings=dump_yaml({"behaviors": settings.get("behaviors", {})}),
        trained=trained,
        prints=shell_command("pipeline", "provenance", names[0]),
    )


def _interval(ends: tuple[float | None, float | None] | None) -> str:
    low, high = ends or (None, None)
    return "too few" if low is None or high is None else f"{low:.4g} to {high:.4g}"
