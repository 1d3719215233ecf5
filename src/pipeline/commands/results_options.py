"""Options of the commands that look at results: `compare`, `provenance` and `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def compare_options(parser: argparse.ArgumentParser) -> None:
    """Of `pipeline compare`."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="results/<run-id> of `pipeline learn`, results/train/<experiment>, or one seed of it; "
        "runs of `learn` that differ only in the seed are one experiment",
    )
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.9,
        help="the target: of the way from lowest start to best end; default: %(default)s",
    )
    forms = parser.add_mutually_exclusive_group()
    for form in ("csv", "json"):
        forms.add_argument(
            f"--{form}",
            dest="form",
            action="store_const",
            const=form,
            default="text",
            help=f"print {form.upper()}",
        )


def provenance_options(parser: argparse.ArgumentParser) -> None:
    """Of `pipeline provenance`."""
    parser.add_argument("file", type=Path, help="an .onnx file of `export` or `pipeline learn`")
    parser.add_argument(
        "--tree", type=Path, help="the checkout to compare with; default: the present folder's"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def runs_options(parser: argparse.ArgumentParser) -> None:
    """Of `pipeline runs`."""
    parser.add_argument(
        "run",
        nargs="?",
        help="<experiment>-<seed>, or a run's id in MLflow; default: a table of all",
    )
    parser.add_argument(
        "--at",
        metavar="REVISION",
        help="the rows of what a git revision's dvc.lock holds, instead of what lies here",
    )
