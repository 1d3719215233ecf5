"""The report's text: Markdown to read in a repository, HTML that is one file."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.stages.report import Outcome

TITLE = "Experiments compared"
HEADER = ("Experiment", "Environment", "Behavior", "Seeds", "Mean return", "95 % interval", "IQM")
NOTE = (
    "Returns are of the exported ONNX policies, with deterministic actions. The mean and its "
    "interval (Student's t) are over seeds, each seed one observation. IQM is the interquartile "
    "mean of all episodes, with a bootstrap interval over seeds and episodes."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2rem; }
th, td { padding: .4rem .7rem; text-align: left; border-bottom: 1px solid #e5e7eb; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } p.note { color: #6b7280; }
"""


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table of all experiments, and links to the figures beside the file."""
    lines = [f"# {TITLE}", "", f"| {' | '.join(HEADER)} |"]
    lines.append("|" + "|".join(" ---: " if n > 2 else " --- " for n in range(len(HEADER))) + "|")
    lines += [f"| {' | '.join(cells)} |" for cells in rows(outcomes)]
    lines += ["", NOTE, "", "## Learning curves", ""]
    for outcome in outcomes:
        if outcome.curves:
            lines += [f"![{outcome.name}](curves/{outcome.figure})", ""]
    return "\n".join(lines)


def html(outcomes: Sequence[Outcome], figures: Path) -> str:
    """The same as a page that needs no other file."""
    head = "".join(_cell("th", text, n) for n, text in enumerate(HEADER))
    body = "\n".join(
        "<tr>" + "".join(_cell("td", text, n) for n, text in enumerate(cells)) + "</tr>"
        for cells in rows(outcomes)
    )
    images = "\n".join(
        f'<h3>{escape(o.name)}</h3>\n<img alt="Learning curves of {escape(o.name)}" '
        f'src="data:image/png;base64,{_encoded(figures / o.figure)}">'
        for o in outcomes
        if o.curves
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{TITLE}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{TITLE}</h1>\n"
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"
        f'<p class="note">{escape(NOTE)}</p>\n<h2>Learning curves</h2>\n{images}\n'
        "</body>\n</html>\n"
    )


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """The cells of the comparison."""
    table: list[tuple[str, ...]] = []
    for one in outcomes:
        for behavior, summary in one.summaries.items():
            overall = summary.over_seeds
            interval = "one seed"
            if overall.ci_low is not None and overall.ci_high is not None:
                interval = f"{_number(overall.ci_low)} to {_number(overall.ci_high)}"
            ends = f"{_number(summary.iqm_low)} to {_number(summary.iqm_high)}"
            iqm = f"{_number(summary.iqm)} ({ends})"
            n_seeds = str(len(summary.seeds))
            mean = _number(overall.mean)
            table.append((one.name, one.environment, behavior, n_seeds, mean, interval, iqm))
    return table


def _cell(kind: str, text: str, column: int) -> str:
    mark = ' class="number"' if column > 2 else ""
    return f"<{kind}{mark}>{escape(text)}</{kind}>"


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _number(value: float) -> str:
    return f"{value:.4g}"
