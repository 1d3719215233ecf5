"""The report's text: Markdown to read in a repository, HTML that is one file."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pipeline.evaluation.comparison import Task
    from pipeline.stages.report import Figures

TITLE = "Experiments compared"
NOTE = (
    "A seed is one observation: its score is the mean return of its policy's episodes. IQM is the "
    "interquartile mean of the seeds' scores, its interval a 95 % bootstrap over seeds (Agarwal "
    "et al. 2021, arXiv 2108.13264). Steps to target is the median over seeds of the environment "
    "steps at which training first reached the target; mean height is the area under the learning "
    "curve divided by its width, over the steps that all curves share. Probabilities are that a "
    "run of the one does better than a run of the other. Wall-clock is not in this file, which is "
    "the same for the same results: `pipeline compare results/train/*` prints it."
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22272e; max-width: 60rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th, td { padding: .4rem .7rem; text-align: left; border-bottom: 1px solid #e5e7eb; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
h2 { margin-top: 3rem; } img { max-width: 100%; } .note { color: #6b7280; }
.caution { color: #92400e; }
"""


def markdown(tasks: Sequence[Task], drawn: Sequence[Figures]) -> str:
    """Tables of all experiments, and links to the figures beside the file."""
    from pipeline.evaluation import tables

    lines = [f"# {TITLE}", "", NOTE, ""]
    for task, figures in zip(tasks, drawn, strict=True):
        lines += [f"## {task.name}", ""]
        lines += _markdown_table(tables.HEADER, tables.rows(task), first_number=1)
        if task.improvements:
            lines += _markdown_table(tables.PAIRS_HEADER, tables.pairs(task), first_number=2)
        told = [*tables.notes(task), *(f"**{one}**" for one in tables.cautions(task))]
        lines += [*(f"- {one}" for one in told), ""]
        lines += [f"![{what}](figures/{name})\n" for what, name in _shown(task, figures)]
    return "\n".join(lines)


def html(tasks: Sequence[Task], drawn: Sequence[Figures], folder: Path) -> str:
    """The same as a page that needs no other file."""
    from pipeline.evaluation import tables

    parts = []
    for task, figures in zip(tasks, drawn, strict=True):
        parts.append(f"<h2>{escape(task.name)}</h2>")
        parts.append(_table(tables.HEADER, tables.rows(task), first_number=1))
        if task.improvements:
            parts.append(_table(tables.PAIRS_HEADER, tables.pairs(task), first_number=2))
        parts += [f'<p class="note">{escape(note)}</p>' for note in tables.notes(task)]
        parts += [f'<p class="caution">{escape(one)}</p>' for one in tables.cautions(task)]
        parts += [
            f'<p><img alt="{escape(what)}" src="data:image/png;base64,{_encoded(folder / name)}">'
            "</p>"
            for what, name in _shown(task, figures)
        ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{TITLE}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{TITLE}</h1>\n"
        f'<p class="note">{escape(NOTE)}</p>\n{body}\n</body>\n</html>\n'
    )


def _shown(task: Task, figures: Figures) -> Iterator[tuple[str, str]]:
    """What each figure shows, and its file."""
    yield f"Returns on {task.name}", figures.returns
    if figures.learning:
        yield f"Learning curves on {task.name}", figures.learning
    if figures.improvements:
        yield f"Probability of improvement on {task.name}", figures.improvements


def _markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, first_number: int
) -> list[str]:
    marks = [" ---: " if n >= first_number else " --- " for n in range(len(header))]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], f"|{'|'.join(marks)}|", *lines[1:], ""]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, first_number: int) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        marks = [' class="number"' if n >= first_number else "" for n in range(len(cells))]
        inside = (
            f"<{kind}{mark}>{escape(text)}</{kind}>"
            for mark, text in zip(marks, cells, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(line("td", cells) for cells in rows)
    return f"<table>\n<thead>{line('th', header)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
