"""The report's text: Markdown to read in a repository, HTML that is one file."""

from __future__ import annotations

import base64
import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.evaluation.comparison import Task
    from pipeline.stages.report import Figures
    from pipeline.stages.searches import Search

TITLE = "Experiments compared"
INTRODUCTION = (
    "Returns are compared within one behavior of one environment. A seed is one observation: its "
    "score is the mean return of its policy's episodes."
)
TERMS = {
    "IQM": "interquartile mean of the seeds' scores: a quarter is dropped at each end",
    "95 % interval": "of the IQM, or of the probability: a bootstrap over seeds (Agarwal et al. "
    "2021, arXiv 2108.13264). Another set of as many seeds would give another IQM; values outside "
    "the interval would be a surprise. It needs at least three seeds, better five",
    "Steps to target": "median over seeds of the environment steps at which training first reached "
    "the target",
    "Mean height": "area under the learning curve divided by its width, over the steps that all "
    "curves share: higher is sooner and better",
    "Probability": "that a run of the one experiment does better than a run of the other, ties "
    "counting half",
}
CLOSING = (
    "Wall-clock is not in this file, which is the same for the same results: "
    "`pipeline compare results/train/*` prints it. `pipeline ui` shows each run in MLflow as "
    "`<experiment>-seed<k>`."
)
_LINKS = (
    ("train", "progress.csv", "learning curve"),
    ("evaluate", "returns.png", "distribution of returns"),
    ("evaluate", "episodes.csv", "episodes"),
    ("export", "", "policy"),
)
"""Stage, file and name of what a seed's row leads to, beside the report's folder."""
_CODE = re.compile(r"`([^`]+)`")
_STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --soft: #5b6472; --line: #e1e4e8;
        --page: #ffffff; --panel: #f6f8fa; --link: #1d4ed8; --warn: #92400e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a3abb8; --line: #343b45; --page: #16191d; --panel: #20252c;
          --link: #93b4ff; --warn: #f0b46a; } }
body { font: 15px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
a { color: var(--link); } code { background: var(--panel); padding: .1em .3em; border-radius: 4px; }
h1 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); }
h3 { margin: 2rem 0 .5rem; font-size: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { padding: .4rem .7rem; text-align: left; border-bottom: 1px solid var(--line);
         white-space: nowrap; vertical-align: baseline; }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number:last-child, th.number:last-child { padding-right: 0; }
figure { margin: 1.5rem 0; } figcaption, .note { color: var(--soft); }
figure img { display: block; width: 100%; max-width: 46rem; height: auto; background: #fff;
             border-radius: 6px; padding: .5rem; box-sizing: border-box; }
figcaption { margin-top: .4rem; max-width: 46rem; } .caution { color: var(--warn); }
details { background: var(--panel); border-radius: 6px; padding: .6rem 1rem; }
summary { cursor: pointer; font-weight: 600; } dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0 0 0 1rem; }
"""


def markdown(tasks: Sequence[Task], drawn: Sequence[Figures], swept: Sequence[Search] = ()) -> str:
    """Tables of all experiments, and links to the figures beside the file."""
    from pipeline.evaluation import tables

    lines = [f"# {TITLE}", "", INTRODUCTION, ""]
    lines += [*(f"- **{term}**: {meaning}." for term, meaning in TERMS.items()), "", CLOSING, ""]
    for task, figures in zip(tasks, drawn, strict=True):
        lines += [f"## {task.name}", ""]
        lines += _markdown_table(tables.HEADER, tables.rows(task), first_number=1)
        if task.improvements:
            lines += _markdown_table(tables.PAIRS_HEADER, tables.pairs(task), first_number=2)
        told = [*tables.notes(task), *(f"**{one}**" for one in tables.cautions(task))]
        lines += [*(f"- {one}" for one in told), ""]
        lines += [
            f"![{what}](figures/{name})\n\n*{caption}*\n"
            for what, name, caption in _shown(task, figures)
        ]
    for one in swept:
        lines += [f"## {one.title}", "", *(f"- {note}" for note in one.notes), ""]
        lines += _markdown_table(one.header, one.rows, first_number=1)
    return "\n".join(lines)


def html(
    tasks: Sequence[Task],
    drawn: Sequence[Figures],
    folder: Path,
    stages: Mapping[str, Collection[str]],
    swept: Sequence[Search] = (),
) -> str:
    """The same as a page that needs no other file, with links to the files of each seed.

    Args:
        tasks: what was compared.
        drawn: the figures of each.
        folder: where they lie.
        stages: of each experiment, which say what files it has.
        swept: what the sweeps found.
    """
    titles = [*(task.name for task in tasks), *(one.title for one in swept)]
    parts = [_contents(titles)] if len(titles) > 1 else []
    for number, (task, figures) in enumerate(zip(tasks, drawn, strict=True), start=1):
        parts.append(f'<section id="task{number}">\n<h2>{escape(task.name)}</h2>')
        parts += _told(task)
        for what, name, caption in _shown(task, figures):
            source = f"data:image/png;base64,{_encoded(folder / name)}"
            parts.append(
                f'<figure><img alt="{escape(what)}" src="{source}">'
                f"<figcaption>{escape(caption)}</figcaption></figure>"
            )
        parts += ["<h3>Every seed</h3>", _seeds(task, stages), "</section>"]
    for number, one in enumerate(swept, start=len(tasks) + 1):
        parts.append(f'<section id="task{number}">\n<h2>{escape(one.title)}</h2>')
        parts += [f"<p>{escape(note)}</p>" for note in one.notes]
        parts += [_table(one.header, _escaped(one.rows), first_number=1), "</section>"]
    terms = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}.</dd>" for a, b in TERMS.items())
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{TITLE}</title><style>{_STYLE}</style></head>\n<body>\n<h1>{TITLE}</h1>\n"
        f"<p>{escape(INTRODUCTION)}</p>\n<details open><summary>What the columns mean</summary>"
        f"<dl>{terms}</dl></details>\n{body}\n"
        f'<p class="note">{_with_code(CLOSING)}</p>\n</body>\n</html>\n'
    )


def _told(task: Task) -> Iterator[str]:
    """Tables of a task, and what is to be said of them."""
    from pipeline.evaluation import tables

    yield "<h3>Scores</h3>"
    yield _table(tables.HEADER, _escaped(tables.rows(task)), first_number=1)
    if task.improvements:
        yield "<h3>Which is better?</h3>"
        yield _table(tables.PAIRS_HEADER, _escaped(tables.pairs(task)), first_number=2)
    for note in tables.notes(task):
        yield f'<p class="note">{escape(note)}</p>'
    for one in tables.cautions(task):
        yield f'<p class="caution">{escape(one)}</p>'


def _contents(titles: Sequence[str]) -> str:
    items = "".join(
        f'<li><a href="#task{number}">{escape(title)}</a></li>'
        for number, title in enumerate(titles, start=1)
    )
    return f"<nav><ul>{items}</ul></nav>"


def _seeds(task: Task, stages: Mapping[str, Collection[str]]) -> str:
    """Each seed's score, and where its files lie."""
    from pipeline.evaluation import tables

    rows = []
    for one in task.standings:
        for seed, score in zip(one.seeds, one.scores, strict=True):
            links = (
                f'<a href="{escape(f"../{stage}/{one.experiment}/seed{seed}/{file}")}">{what}</a>'
                for stage, file, what in _LINKS
                if stage in stages.get(one.experiment, ())
            )
            cells = (escape(one.experiment), str(seed), tables.number(score), ", ".join(links))
            rows.append(cells)
    return _table(("Experiment", "Seed", "Score", "Files"), rows, first_number=1, last_number=2)


def _shown(task: Task, figures: Figures) -> Iterator[tuple[str, str, str]]:
    """What each figure shows, its file, and how to read it."""
    yield (
        f"Returns on {task.name}",
        figures.returns,
        "Scores. A dot is a seed, the upright line the interquartile mean over seeds, the wide "
        "bar its 95 % interval where there are seeds enough for one.",
    )
    if figures.learning:
        yield (
            f"Learning curves on {task.name}",
            figures.learning,
            "Learning curves. Mean return of the episodes that ended in each summary period, over "
            "environment steps: the interquartile mean over seeds with its 95 % interval as a "
            "band, or each seed by itself where they are too few.",
        )
    if figures.improvements:
        yield (
            f"Probability of improvement on {task.name}",
            figures.improvements,
            "Probability that a run of the first experiment does better than one of the second; at "
            "the dotted line neither is better.",
        )


def _markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, first_number: int
) -> list[str]:
    marks = [" ---: " if n >= first_number else " --- " for n in range(len(header))]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], f"|{'|'.join(marks)}|", *lines[1:], ""]


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    first_number: int,
    last_number: int | None = None,
) -> str:
    """A table of cells that are HTML already; columns from the first to the last are numbers."""
    end = len(header) if last_number is None else last_number + 1

    def line(kind: str, cells: Sequence[str]) -> str:
        marks = [' class="number"' if first_number <= n < end else "" for n in range(len(cells))]
        inside = (f"<{kind}{mark}>{text}</{kind}>" for mark, text in zip(marks, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    body = "\n".join(line("td", cells) for cells in rows)
    return (
        f'<div class="wide"><table>\n<thead>{line("th", header)}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape(cell) for cell in cells] for cells in rows]


def _with_code(text: str) -> str:
    """Escaped text, with what stands between backquotes set as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
