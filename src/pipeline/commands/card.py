"""`pipeline card`: a folder with a run's policies and a model card that tells their story."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import __version__, files
from pipeline.commands.init import source_of
from pipeline.errors import SettingsError
from pipeline.settings.params import load_params
from pipeline.settings.yaml_file import dump_yaml

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.commands.parser import Parser
    from pipeline.evaluation.comparison import Outcome, Task

CARD = "README.md"
_CURVE = "learning_{behavior}.png"
_VIDEOS = ("median.gif", "best.gif")
_RUN_CONFIGURATION = "configuration.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A trained run, of the DAG or of `pipeline learn`."""

    name: str
    """As a title."""
    seed: int | None
    environment: str
    policies: tuple[Path, ...]
    """ONNX files, named like their behaviors."""
    more: tuple[Path, ...]
    """Files that go with them."""
    outcomes: tuple[Outcome, ...]
    """Of every seed of its experiment."""

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """What this run's episodes came to, by behavior; empty when it was not evaluated."""
        # `train` writes a metrics.json too; the one of the evaluation is meant.
        path = next((one for one in self.more if one.parent.parts[-3:-2] == ("evaluate",)), None)
        return json.loads((path.parent / "metrics.json").read_text("utf-8")) if path else {}


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline card`."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="<experiment>-<seed> of params.yaml, or results/<run-id> of `pipeline learn`",
    )
    parser.add_argument(
        "--license", help="of the policy, as the Hub names it: apache-2.0, cc-by-4.0, other, ..."
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the folder to write (default: cards/ and the run's name)"
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the folder."""
    folder: Path = arguments.output or Path("cards", Path(arguments.run).name)
    write(find(arguments.run), folder, licence=arguments.license)
    return (
        f"Wrote {folder / CARD}. Look at it, then `pipeline sign {folder} --key KEY.pem` and "
        f"`pipeline push {folder} --repo-id NAME/POLICY`."
    )


def find(name: str) -> Run:
    """Return the run that a name or a folder means."""
    path = Path(name)
    if (path / _RUN_CONFIGURATION).is_file():
        return _of_learn(path)
    if path.is_dir() or not Path("params.yaml").is_file():
        raise SettingsError(
            f"{name}: is no run: name one as <experiment>-<seed> in the folder of params.yaml, or "
            "the folder of a run of `pipeline learn`"
        )
    params = load_params("params.yaml")
    known = [f"{one}-{seed}" for one, it in params.experiments.items() for seed in it.seeds]
    if name not in known:
        raise SettingsError(f"{name}: params.yaml has no such run; it has {', '.join(known)}")
    # From the right, since experiments may have hyphens in their names.
    experiment, _, seed = name.rpartition("-")
    environment = params.experiments[experiment].environment
    named = source_of(params.environments[environment]) or environment
    return _of_dag(experiment, int(seed), named)


def _of_dag(experiment: str, seed: int, environment: str) -> Run:
    from pipeline.commands.compare import outcomes_of

    place = f"{experiment}/seed{seed}"
    policies = _policies(
        Path("results/export", place), f"dvc repro export@{experiment.replace('/', '-')}-{seed}"
    )
    more = [Path("results/evaluate", place, one) for one in ("episodes.csv", *_VIDEOS)]
    more.append(Path("results/train", place, "progress.csv"))
    return Run(
        name=experiment,
        seed=seed,
        environment=environment,
        policies=policies,
        more=tuple(one for one in more if one.is_file()),
        outcomes=tuple(outcomes_of([Path("results/train", experiment)])),
    )


def _of_learn(folder: Path) -> Run:
    from pipeline.commands.compare import outcomes_of

    policies = _policies(folder, f"pipeline learn ... --run-id {folder.name} --resume")
    outcomes = outcomes_of([folder])
    first = next(iter(outcomes), None)
    more = [folder / one for one in (_RUN_CONFIGURATION, "progress.csv")]
    return Run(
        name=folder.resolve().name,
        seed=None if first is None else first.seed,
        environment="" if first is None else first.environment,
        policies=policies,
        more=tuple(one for one in more if one.is_file()),
        outcomes=tuple(outcomes),
    )


def _policies(folder: Path, command: str) -> tuple[Path, ...]:
    policies = tuple(sorted(folder.glob("*.onnx")))
    if not policies:
        raise SettingsError(f"{folder}: has no policy (*.onnx) yet; make it with `{command}`")
    return policies


def write(run: Run, folder: Path, *, licence: str | None = None) -> None:
    """Write the card, and copy policies, results and videos beside it."""
    from pipeline.evaluation.comparison import compare

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingsError(f"{folder}: is there already and not empty; name another folder")
    tasks = compare(run.outcomes)
    sections = list(_sections(run, tasks, licence))  # what cannot be read is refused before
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*run.policies, *run.more):
        shutil.copyfile(path, folder / path.name)
    for task in tasks:
        _draw(task, folder)
    files.write_whole(
        folder / CARD, f"---\n{dump_yaml(_front(run, licence))}---\n\n" + "\n".join(sections)
    )


def _draw(task: Task, folder: Path) -> None:
    from pipeline.evaluation.plots import align_curves, plot_learning_curves

    for one in task.standings:
        if one.curves:
            curves = align_curves([(curve.steps, curve.returns) for curve in one.curves])
            path = folder / _CURVE.format(behavior=task.behavior)
            if len(curves.steps):
                plot_learning_curves(path, {one.experiment: curves}, title=task.name)


def _front(run: Run, licence: str | None) -> dict[str, Any]:
    """Return the metadata that the Hub reads: licence, tags, and the score as a result."""
    behaviors = [path.stem for path in run.policies]
    front: dict[str, Any] = {"license": licence} if licence else {}
    front |= {
        # The tags and the library name are those that ML-Agents' own upload writes, so the Hub
        # lists these policies beside its others.
        "library_name": "ml-agents",
        "tags": [
            *behaviors,
            "reinforcement-learning",
            "deep-reinforcement-learning",
            *(f"ML-Agents-{one}" for one in behaviors),
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
                    "value": f"{one['mean_return']:.2f} +/- {one['std_return']:.2f}",
                    # Only the Hub itself can verify a score.
                    "verified": False,
                }
            ],
        }
        for behavior, one in run.metrics.items()
    ]
    return front | ({"model-index": [{"name": run.name, "results": results}]} if results else {})


def _sections(run: Run, tasks: Sequence[Task], licence: str | None) -> Iterator[str]:
    """Give the paragraphs of the card."""
    seed = "" if run.seed is None else f", seed {run.seed}"
    yield f"# {run.name}{seed}\n"
    where = f" in `{run.environment}`" if run.environment else ""
    yield f"Trained and measured by rl-pipeline {__version__}{where}.\n"
    yield from _task(run)
    yield "## Scores\n"
    yield from _scores(run, tasks)
    if any(one.curves for task in tasks for one in task.standings):
        yield "## Learning curve\n"
        yield from (f"![{one.name}]({_CURVE.format(behavior=one.behavior)})\n" for one in tasks)
    videos = [one.name for one in run.more if one.name in _VIDEOS]
    if videos:
        yield "## Video\n"
        yield from (f"![{Path(one).stem} episode]({one})\n" for one in videos)
    yield "## Use\n"
    yield "Copy the `.onnx` into a Unity project with ML-Agents, or play episodes with it:\n"
    environment = run.environment or "ENVIRONMENT"
    commands = [f"pipeline evaluate {one.name} --env {environment}" for one in run.policies]
    yield "```\n" + "\n".join(commands) + "\n```\n"
    yield from _provenance(run)
    yield "## Licence\n"
    yield f"{licence}\n" if licence else "Not stated; ask who published it.\n"


def _task(run: Run) -> Iterator[str]:
    from pipeline.export.layout import describe, load

    yield "## Task\n"
    for path in run.policies:
        seen = describe(load(path))
        yield f"`{path.name}` acts for the behavior {path.stem}:\n"
        yield "| | tensor | type | shape |\n| --- | --- | --- | --- |"
        for kind, tensors in (("in", seen.inputs), ("out", seen.outputs)):
            for name, info in tensors.items():
                yield f"| {kind} | {name} | {info.dtype} | {info.shape} |"
        yield ""


def _scores(run: Run, tasks: Sequence[Task]) -> Iterator[str]:
    """Give the scores of this policy over episodes, and of its experiment over seeds."""
    if run.metrics:
        yield "Episodes of this policy:\n"
        yield "| behavior | episodes | mean return | 95 % interval | least | greatest |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: |"
        for behavior, one in run.metrics.items():
            numbers = (
                f"{one['mean_return']:.4g} | {_interval(one.get('ci_low'), one.get('ci_high'))}"
            )
            ends = f"{one['min_return']:.4g} | {one['max_return']:.4g}"
            yield f"| {behavior} | {one['episodes']:.0f} | {numbers} | {ends} |"
        yield ""
    else:
        yield "This policy was not evaluated on episodes of its own.\n"
    yield "All seeds of its experiment, by interquartile mean:\n"
    yield "| behavior | seeds | score | 95 % interval | measured |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for task in tasks:
        how = "on evaluation episodes" if task.score == "evaluated" else "at the end of training"
        for held in task.standings:
            numbers = f"{held.iqm:.4g} | {_interval(*(held.interval or (None, None)))}"
            yield f"| {task.behavior} | {len(held.seeds)} | {numbers} | {how} |"
    yield ""


def _interval(low: float | None, high: float | None) -> str:
    return "too few" if low is None or high is None else f"{low:.4g} to {high:.4g}"


def _provenance(run: Run) -> Iterator[str]:
    """Give the settings and what else made the policies, as their files say."""
    from pipeline.commands.provenance import read

    records = read(run.policies[0])
    # A pretrained policy has several records; the settings of a reader's interest are those of
    # training.
    trained = next((one for one in records if one["stage"] in ("train", "learn")), records[-1])
    settings: Mapping[str, Any] = trained["parameters"].get("settings", trained["parameters"])
    yield "## Settings\n"
    yield f"```yaml\n{dump_yaml({'behaviors': settings.get('behaviors', {})})}```\n"
    yield "## Provenance\n"
    yield "| | |\n| --- | --- |"
    for path in run.policies:
        yield f"| {path.name} | sha256 `{files.sha256_of(path)}` |"
    for kind, one in trained["inputs"].items():
        yield f"| {kind} {one['name']} | sha256 `{one['sha256']}` |"
    yield f"| code | sha256 `{trained['code_sha256']}` |"
    yield f"| parameters | sha256 `{trained['parameters_sha256']}` |"
    yield f"| seed | {trained['seed']} |"
    yield from (f"| {name} | {version} |" for name, version in trained["versions"].items())
    yield f"\n`pipeline provenance {run.policies[0].name}` prints all of it from the file itself.\n"
