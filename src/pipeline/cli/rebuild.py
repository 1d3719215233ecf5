"""Make the MLflow store again from the files in `results/`, which are its source."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline import files
from pipeline.dag import policies, run_context
from pipeline.dag.attempt import WORK, read_map
from pipeline.dag.stages import evaluate, export
from pipeline.errors import PipelineError
from pipeline.settings.project.params import load_params
from pipeline.tracking import mlflow_store
from pipeline.tracking.curve_csv import read_points
from pipeline.tracking.mlflow_run import MlflowRun

_log = logging.getLogger(__name__)
_PLACE = re.compile(r"results/\w+/(?P<name>.+)/seed(?P<seed>\d+)")
_OF_NOW = ("mlflow.source.git.commit", "pipeline.uncommitted")
"""Tags about the present code. The new rows do not have them, because other code may have made the
files."""


def rebuild(root: Path) -> None:
    """Rename the present MLflow store, and make a new one with a row for each run in `results/`."""
    params = load_params(root / "params.yaml")
    uri = mlflow_store.default_uri(root := root.resolve())
    if (file := mlflow_store.file_of(uri)) is None or not file.resolve().is_relative_to(root):
        raise PipelineError(
            f"MLFLOW_TRACKING_URI names {uri}, which other projects may use; only a store in this "
            "folder can be made from its files; unset the variable"
        )
    with mlflow_store.locked(uri):
        if file.exists():
            # The earlier store is renamed, because it may have runs without files in results/.
            kept = files.free_name(file)
            file.rename(kept)
            _log.info("Renamed the earlier store to %s.", kept.name)
    places = {
        matched.groups()
        for stage in _STAGE_FILES
        for path in root.glob(f"results/{stage}/**/seed*")
        if (matched := _PLACE.fullmatch(path.relative_to(root).as_posix()))
    }
    for name, seed in sorted(places):
        try:
            _make_row(run_context.Run(root=root, params=params, name=name, seed=int(seed)))
        except PipelineError as error:  # params.yaml may no longer have the experiment
            _log.warning("%s/seed%s gets no row in MLflow: %s", name, seed, error)


def _make_row(run: run_context.Run) -> None:
    # With several behaviors, names of metrics begin with the behavior's name.
    row, prefix = run_context.row_of(run), len(run.params.run_settings(run.name).behaviors) > 1
    for stage, (made, tell) in _STAGE_FILES.items():
        folder = run.root / run.folder(stage)
        if not (folder / made).exists():
            continue
        facts = read_map(run.root / WORK / stage / run.instance / "stage.json")
        # `key_of` reads only these attributes of a stage's job, which no longer exists.
        digest = facts.get("fingerprint", "")
        job: Any = SimpleNamespace(
            job=SimpleNamespace(stage=stage), fingerprint=digest, resumed=False
        )
        key = run_context.key_of(run, job)
        tags = {name: text for name, text in key.tags.items() if name not in _OF_NOW}
        # A clone has no facts of its stages, so the times of its files are used.
        begun = facts.get("started_unix_s", (folder / made).stat().st_mtime)
        times = (begun, begun + facts.get("duration_s", 0.0))
        record = MlflowRun(replace(key, tags=tags), prefix=prefix, times=times)
        try:
            record.describe(row, run.root)
            tell(record, run, folder)
        finally:
            record.end()


def _tell_training(record: MlflowRun, run: run_context.Run, folder: Path) -> None:
    pretrained = run.root / run.folder("pretrain")
    if (pretrained / "progress.csv").exists():
        run_context.tell_pretraining(record, pretrained)
    history = policies.history(folder / "policy.pt")
    facts = read_map(run.root / WORK / "train" / run.instance / "stage.json")
    record.trained(
        read_map(folder / "metrics.json"),
        curve=read_points(folder / "progress.csv"),
        # After a resume only the time of the last part is known, so no time is recorded.
        seconds=None if facts.get("resumed") else facts.get("seconds", {}).get("total"),
        interrupted=[step for made in history for step in made.get("interrupted_at_steps", ())],
    )
    record.made(folder / "policy.pt")


_STAGE_FILES = {
    "train": ("policy.pt", _tell_training),
    "export": ("export.json", export.tell),
    "evaluate": ("metrics.json", evaluate.tell),
}
"""For each stage: the file that it writes last, and the function that tells MLflow its results."""
