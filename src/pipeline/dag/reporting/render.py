"""The report as Markdown, to read in a repository, and as one self-contained HTML file."""

import base64
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from pipeline.dag.reporting import svg
from pipeline.evaluation import tables
from pipeline.evaluation.charts import Chart
from pipeline.evaluation.comparison import Task

DEFINITIONS = "What the words and columns mean"
TERMS = {
    "Score": "mean return of the episodes of one seed's policy; each seed gives one score. Only "
    "scores of the same behavior in the same environment are compared",
    "IQM": "interquartile mean of the seeds' scores: the mean without the lowest and the highest "
    "quarter of them. A quarter is rounded down, so none of 3 scores is left out",
    "95 % interval": "of the IQM, or of the probability: a bootstrap over seeds (Agarwal et al. "
    "2021, arXiv 2108.13264). With many more seeds the value would probably be in this interval. "
    "The IQM has an interval from three seeds on, but five are better; the probability has one "
    "from five seeds on, if the scores of the two experiments overlap",
    tables.TOLERANCE: "range that contains the score of one more seed with a probability of 90 % "
    "(Wilks 1941; Hahn and Meeker 1991). It needs at least five seeds, and does not shrink with "
    "more seeds as the interval of the IQM does. With fewer than 19 seeds the scores are assumed "
    "to be normally distributed; they are not if the range has values that no score can have",
    "Trained steps": "environment steps of the seed that was trained longest; a range if the steps "
    "of the seeds differ by more than 5 %",
    "Steps to target": "median over seeds of the environment steps at which training first reached "
    "the target, which a note under the table gives",
    "Mean height": "area under the learning curve divided by its width, over the steps that all "
    "curves share: the mean return while training, in the return's own units. It is higher if the "
    "return rises sooner or further",
    "Probability": "that a run of the first experiment has a higher score than a run of the "
    "second; ties count half. With fewer than five seeds the cell has the number of pairs of runs "
    "in which the first was better",
    "By chance": "how often the scores of two equal experiments would differ as clearly: the exact "
    "two-sided test of Mann and Whitney (1947). A difference counts as shown at 5 % or less, "
    "divided by the number of experiments that the best one is compared with",
}
CLOSING = (
    "The same results give the same file on every machine and in every commit, so it has no date, "
    "commit or wall-clock. `git log -1 dvc.lock` shows date and commit of results that are in git, "
    "`pipeline provenance` the sources of each policy, `pipeline compare` the wall-clock; "
    "`pipeline ui` shows each run in MLflow as `<experiment>-seed<k>`."
)
EPISODE = "The policy of {}: the episode with the median return, of the seed with the median score."
_LINKS = (
    ("train", "train", "progress.csv", "learning curve"),
    ("evaluate", "evaluate", "returns.png", "distribution of returns"),
    ("evaluate", "evaluate", "episodes.csv", "episodes"),
    ("video", "evaluate", "median.gif", "median episode"),
    ("video", "evaluate", "best.gif", "best episode"),
    ("export", "export", "", "policy"),
)
"""Links to result files in the row of a seed. Each entry has the stage, or `video`, that an
experiment must have; the stage's folder; the file in it; and the link's text.
"""


class Figure(NamedTuple):
    """A picture in the report."""

    what: str
    file: str
    """Name of the picture's file in the folder of figures."""
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A sweep's results, or the answers to claims, as a table and sentences."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """For a sweep a row for each trial, best first: name, rank, score and changed settings; for
    claims a row for each claim."""
    notes: list[str]
    first_number: int = 1
    """Index of the first column with numbers; numbers are aligned to the right."""


def title(tasks: Sequence[Task]) -> str:
    """Return the report's title: the number of experiments, and their environments."""
    names = {standing.experiment for task in tasks for standing in task.standings}
    places = dict.fromkeys(task.environment for task in tasks)
    where = f" in {', '.join(places)}" if any(places) else ""
    return f"{len(names) or 'No'} experiment{'s' * (len(names) != 1)}{where}"


def markdown(
    tasks: Sequence[Task],
    setups: Sequence[Sequence[tuple[str, str]]],
    figures: Sequence[Sequence[Figure]],
    sections: Sequence[Section] = (),
) -> str:
    """Return the report as Markdown, with links to the figures in the folder `figures`."""
    lines = [f"# {title(tasks)}", ""]
    # The conclusions come first, for readers who read no further.
    lines += [f"**{task.name}**: {tables.conclusion(task)}\n" for task in tasks]
    for task, about, drawn in zip(tasks, setups, figures, strict=True):
        lines += [f"## {task.name}", "", *(f"- **{name}**: {text}" for name, text in about), ""]
        lines += _markdown_table(tables.HEADER, tables.rows(task), first_number=1)
        if task.improvements:
            lines += _markdown_table(tables.PAIRS_HEADER, tables.pairs(task), first_number=2)
        remarks = [*tables.notes(task), *(f"**{caution}**" for caution in tables.cautions(task))]
        lines += [*(f"- {remark}" for remark in remarks), ""]
        lines += [
            f"![{figure.what}](figures/{figure.file})\n\n*{figure.caption}*\n" for figure in drawn
        ]
    for part in sections:
        lines += [f"## {part.title}", "", *(f"- {note}" for note in part.notes), ""]
        lines += _markdown_table(part.header, part.rows, first_number=part.first_number)
    terms = [f"- **{term}**: {meaning}." for term, meaning in TERMS.items()]
    lines += [f"<details><summary>{DEFINITIONS}</summary>", "", *terms, "", "</details>", ""]
    return "\n".join([*lines, CLOSING, ""])


def html(
    tasks: Sequence[Task],
    setups: Sequence[Sequence[tuple[str, str]]],
    charts: Sequence[Sequence[Chart]],
    films: Sequence[Sequence[Figure]],
    folder: Path,
    parts: Mapping[str, Collection[str]],
    sections: Sequence[Section] = (),
) -> str:
    """Return the report as a self-contained HTML page, with links to the files of each seed.

    `parts` has the stages of each experiment, and also `video` if its episodes are filmed. The page
    links only to files of these stages, and to videos.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_escaped,
        # A misspelled name in the template raises an error instead of leaving a gap in the report.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "anchor": lambda term: f"term-{re.sub('[^a-z0-9]+', '-', term.lower()).strip('-')}",
        "code": _with_code,
        # Videos are embedded, so that the page can be sent as one file.
        "base64": lambda name: base64.b64encode((folder / name).read_bytes()).decode(),
    }
    return environment.get_template("report.html.j2").render(
        title=title(tasks),
        definitions=DEFINITIONS,
        terms=TERMS,
        closing=CLOSING,
        links=_LINKS,
        parts=parts,
        tables=tables,
        svg=svg,
        # The style sheet has a rule for each color of the largest comparison.
        most=max((len(task.standings) for task in tasks), default=0),
        titles=[*(task.name for task in tasks), *(part.title for part in sections)],
        tasks=[*zip(tasks, setups, charts, films, strict=True)],
        sections=sections,
    )


def _markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, first_number: int
) -> list[str]:
    # Columns from `first_number` on have numbers, which are aligned to the right.
    marks = [" ---: " if n >= first_number else " --- " for n in range(len(header))]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], f"|{'|'.join(marks)}|", *lines[1:], ""]


def _escaped(value: object) -> Markup:
    """Return a value escaped by `html.escape`; jinja2 would escape quotes differently."""
    return value if isinstance(value, Markup) else Markup(escape(str(value)))  # noqa: S704  # the text is escaped


def _with_code(text: str) -> Markup:
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", escape(text)))  # noqa: S704  # escaped
