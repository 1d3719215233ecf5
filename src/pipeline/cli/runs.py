"""`pipeline runs`: find the DVC revision of an MLflow row, and the rows of a revision.

A row has DVC's digests of its stages' outputs, and the `dvc.lock` of a revision has the digests of
that revision's outputs. Equal digests link them, so runs and commits may come in any order.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.cli.parser import Parser, aligned, option
from pipeline.dag.engines import MOST_COMMITS, locked_stages
from pipeline.errors import PipelineError
from pipeline.tracking import mlflow_store, run_metadata
from pipeline.tracking.run_metadata import git

_MADE = {"train": "policy.pt", "export": "", "evaluate": "metrics.json"}
"""For each stage: the output in its folder that has a digest in the MLflow row; empty for the whole
folder."""
_POLICY = re.compile(r"results/train/(?P<experiment>.+)/seed(?P<seed>\d+)/policy\.pt\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An MLflow run, which tables show as a row."""

    run: str
    experiment: str
    seed: str
    variant: str
    """Name of the DVC experiment that ran the stages; `workspace` without a DVC experiment."""
    tags: Mapping[str, str]
    score: float | None

    @property
    def current(self) -> bool:
        """Whether the row is the current row of its experiment and seed."""
        return self.tags.get(mlflow_store.CURRENT) == "yes"

    @property
    def name(self) -> str:
        """Name of the row's run, as tables show it."""
        return run_metadata.label(f"{self.experiment}-{self.seed}", self.variant)

    @property
    def own_folder(self) -> str | None:
        """The folder of a run outside the DAG; None for a run of the DAG's stages."""
        return self.experiment if self.experiment.startswith(("./", "/")) else None

    def made(self) -> list[tuple[str, str, str]]:
        """Return stage, path and digest of each output with a digest in the row."""
        place = f"{self.experiment}/seed{self.seed}"
        return [
            (stage, f"results/{stage}/{place}/{file}".rstrip("/"), self.tags[f"dvc.{stage}"])
            for stage, file in _MADE.items()
            if f"dvc.{stage}" in self.tags
        ]


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline runs`."""
    text = "<experiment>-<seed>, or a run's id in MLflow; default: a table of all runs"
    parser.add_argument("run", nargs="?", help=text)
    text = "show only rows of runs with the same results as an uninterrupted run"
    option(parser, "--exact", text)
    text = (
        "first make the MLflow store again from the files in results/, for example in a copied "
        "folder; the earlier store is renamed"
    )
    option(parser, "--rebuild", text)
    text = "show the MLflow rows of the results that dvc.lock records at a git revision"
    option(parser, "--at REVISION", text)


def run(arguments: argparse.Namespace) -> str:
    """Return a table of all runs, the rows and the revision of one run, or rows of `--at`."""
    root = Path.cwd()
    if arguments.rebuild:
        # `rebuild` is imported late, because importing the stages takes a second.
        from pipeline.cli.rebuild import rebuild

        rebuild(root)
    rows = rows_of(mlflow_store.Store.existing(root))
    if arguments.exact:  # rows of earlier versions lack the tag, and are left out
        rows = [row for row in rows if row.tags.get(run_metadata.EXACT) == "yes"]
    if arguments.at is not None:
        return _at(root, rows, arguments.at)
    if arguments.run is None:
        return _table(root, [row for row in rows if row.current], whole=not arguments.exact)
    return "\n\n".join(_details(root, row) for row in _named(rows, arguments.run))


def rows_of(store: mlflow_store.Store) -> list[Found]:
    """Return every row that a stage has written, sorted by experiment and seed."""
    rows = []
    for run in store.runs():
        tags = run.data.tags
        if {"pipeline.experiment", "pipeline.seed"} <= tags.keys():
            # DVC experiments (`dvc exp run`) have a name of their own, other runs are in the
            # workspace.
            variant = tags.get(run_metadata.VARIANT, run_metadata.WORKSPACE)
            rows.append(
                Found(
                    run=run.info.run_id,
                    # The tag ends with the name of DVC's experiment.
                    experiment=tags["pipeline.experiment"].removesuffix(f" ({variant})"),
                    seed=tags["pipeline.seed"],
                    variant=variant,
                    tags=tags,
                    score=run.data.metrics.get(mlflow_store.SCORE),
                )
            )
    # The workspace comes before DVC experiments, and current rows before superseded rows.
    rows.sort(key=lambda row: (row.variant != run_metadata.WORKSPACE, row.variant, not row.current))
    return sorted(rows, key=lambda row: (row.experiment, int(row.seed)))


def _named(rows: Sequence[Found], name: str) -> list[Found]:
    # An id names one row, even a superseded one; a run's name means its current rows only.
    exact = [row for row in rows if row.run == name]
    partial = [
        row
        for row in rows
        if row.current
        and name in (row.name, run_metadata.label(f"{row.experiment}-seed{row.seed}", row.variant))
    ]
    if not exact and not partial:
        current = ", ".join(row.name for row in rows if row.current)
        raise PipelineError(f"MLflow has no run {name!r}; it has {current or 'none'}")
    return exact or partial


def _table(root: Path, rows: Sequence[Found], *, whole: bool) -> str:
    """Return a line for each row and, in a `whole` table, for each policy without a row."""
    lines = [("run", "MLflow run", "mean return", "its files")]
    for row in rows:
        state = "not complete"
        if row.own_folder is not None:
            state = "its folder" if (root / row.own_folder).is_dir() else "its folder is gone"
        elif outputs := row.made():
            same = all(_current_digest(root, path) == digest for _, path, digest in outputs)
            state = "as in results/" if same else "not as in results/"
        lines.append((row.name, row.run, _number(row.score), state))
    # Policies without a row were not made with this store, for example in another clone.
    known = {row.name for row in rows}
    for path in sorted(root.glob("results/train/**/policy.pt")) if whole else ():
        matched = _POLICY.fullmatch(path.relative_to(root).as_posix())
        name = matched and f"{matched['experiment']}-{matched['seed']}"
        if name and name not in known:
            lines.append((name, "no row", "-", "not made with this store"))
    return "\n".join(aligned(lines))


def _details(root: Path, row: Found) -> str:
    state = "current" if row.current else "superseded"
    commit = row.tags.get("mlflow.source.git.commit", "unknown")
    edited = ", with uncommitted changes" if row.tags.get("pipeline.uncommitted") == "yes" else ""
    lines = [
        row.name,
        f"  MLflow run  {row.run} ({state})",
        f"  code        commit {commit}{edited}",
        f"  exact       {row.tags.get(run_metadata.EXACT, 'unknown')}",
    ]
    if row.own_folder is not None:
        note = "" if (root / row.own_folder).is_dir() else ", which is gone"
        return "\n".join([*lines, f"  folder      {row.own_folder}{note}"])
    commits: list[str] | None = None
    for stage, path, digest in row.made():
        is_same = _current_digest(root, path) == digest
        agreement = "as in results/" if is_same else "not as in results/"
        lines.append(f"  {stage:10}  {path}  md5 {digest}, {agreement}")
        holding = _holding(root, digest)
        # A revision belongs to the run only if it has the outputs of every stage.
        commits = holding if commits is None else [c for c in commits if c in holding]
    if commits:
        revision = (git(root, "log", "-1", "--format=%h %cs %s", commits[0]) or commits[0]).strip()
        lines.append(f"  revision    {revision} (the newest with all of this in dvc.lock)")
        lines.append(f"  get it      git checkout {commits[0][:12]} && dvc checkout")
    else:
        lines.append(
            "  revision    no revision has all of this in its dvc.lock: commit dvc.lock (after "
            "Snakemake, run `pipeline sync` first)"
        )
    return "\n".join(lines)


def _at(root: Path, rows: Sequence[Found], revision: str) -> str:
    text = git(root, "show", f"{revision}:dvc.lock")
    if text is None:
        raise PipelineError(f"git revision {revision!r} does not exist, or has no dvc.lock")
    # Rows are reversed, so that the current row, which comes first, wins over superseded rows.
    by_digest = {row.tags["dvc.train"]: row for row in reversed(rows) if "dvc.train" in row.tags}
    lines = [("run", "MLflow run", "mean return", "md5 of policy.pt")]
    if (stages := locked_stages(text)) is None:
        raise PipelineError(f"the dvc.lock of git revision {revision!r} cannot be read")
    outs = (out for stage in stages.values() for out in stage.get("outs", ()))
    for path, digest in sorted((out["path"], out["md5"]) for out in outs):
        if matched := _POLICY.match(path):
            name = f"{matched['experiment']}-{matched['seed']}"
            row = by_digest.get(digest)
            run, score = ("no row", None) if row is None else (row.run, row.score)
            lines.append((name, run, _number(score), digest))
    return "\n".join(aligned(lines))


def _holding(root: Path, digest: str) -> list[str]:
    log = git(root, "log", "--all", f"-n{MOST_COMMITS}", "--format=%H", "--", "dvc.lock")
    commits = (log or "").split()
    if not commits:
        return []
    # One call searches all commits, because a call per commit would take seconds.
    matches = git(root, "grep", "-lF", digest, *commits, "--", "dvc.lock") or ""
    holding = {line.partition(":")[0] for line in matches.splitlines()}
    # The list has the order of the log, which is newest first; `holding` is a set.
    return [commit for commit in commits if commit in holding]


def _current_digest(root: Path, path: str) -> str | None:
    return run_metadata.dvc_digest(root / path) if (root / path).exists() else None


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"
