"""`pipeline checklist`: answer a conference's checklist from the records of a project's runs."""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cli.parser import Parser, option
from pipeline.dag.attempt import WORK, read_map
from pipeline.dag.reporting import claims, results
from pipeline.evaluation import statistics, tables
from pipeline.evaluation.comparison import EVALUATED, compare
from pipeline.settings.nodes import to_plain
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.sweeps import SweepParams
from pipeline.settings.yaml_file import read_yaml
from pipeline.tracking.run_metadata import git

Forms = dict[str, dict[str, list[str]]]
"""For each checklist: the sentences that answer each of its items."""
BY_AUTHORS = "to be answered by the authors"
# The items of the NeurIPS paper checklist (2025), of ACM's badges (version 1.1) and of the usual
# artifact appendix; an item with answers in `_known` is followed by the keys of these answers.
_FORMS = {
    "NeurIPS paper checklist": """Claims; Limitations; Theory assumptions and proofs;
Experimental result reproducibility = steps; Open access to data and code = availability;
Experimental setting/details = settings; Experiment statistical significance = significance;
Experiments compute resources = compute machines; Code of ethics; Broader impacts; Safeguards;
Licenses for existing assets; New assets; Crowdsourcing and research with human subjects;
Institutional review board (IRB) approvals; Declaration of LLM usage""",
    "ACM artifact": """Archive, DOI, licence = availability; Algorithms and environments = settings;
Hardware and software = machines; Time to complete = compute; Execution and workflow = steps;
Metrics, number of runs, variation = significance; Results reproduced = claims;
Documentation, and use by others""",
}
_LATEX = str.maketrans(
    {char: rf"\{char}" for char in "#$%&_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "`": ""}
)


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline checklist`."""
    forms = ("markdown", "latex")
    text = "markdown, or latex with NeurIPS' macros"
    option(parser, "--format FORM", text, choices=forms, default=forms[0])


def run(arguments: argparse.Namespace) -> str:
    """Return the checklists of NeurIPS and ACM, with answers from params.yaml and run records."""
    known = {key: [*lines] for key, lines in _known(Path.cwd(), load_params()).items()}
    forms: Forms = {}
    for title, text in _FORMS.items():
        items = (item.strip().partition(" = ") for item in text.split(";"))
        forms[title] = {
            name: [line for key in keys.split() for line in known[key]] for name, _, keys in items
        }
    return _latex(forms) if arguments.format == "latex" else _markdown(forms)


def _answer(lines: Sequence[str]) -> str:
    if not lines:
        return BY_AUTHORS
    is_part = any(BY_AUTHORS in line for line in lines)
    return f"known in part, the rest {BY_AUTHORS}" if is_part else "yes"


def _known(root: Path, params: Params) -> dict[str, Iterable[str]]:
    """Return sentences that follow from params.yaml and the records of the runs, by subject."""
    runs = {name: (one.seeds, one.stages) for name, one in params.experiments.items()}
    # All trials of a sweep count in the total compute, although the paper may only show the best
    # trial.
    for name, sweep in params.sweeps.items():
        stages = params.experiments[sweep.experiment].stages
        runs |= {f"{name}/{number}": (sweep.seeds, stages) for number in sweep.trials()}
    jobs: dict[str, list[dict[str, Any]]] = {}
    for name, (seeds, stages) in runs.items():
        for place in (f"{stage}/{name}/seed{seed}" for seed in seeds for stage in stages):
            of = jobs.setdefault(name.partition("/")[0], [])
            of.append(read_map(root / WORK / place / "stage.json"))
    kernels = {"machine": "on one type of CPU", "portable": "on every x86-64 CPU with AVX"}
    where = f"{kernels[params.runtime.deterministic]}, device {params.runtime.device}"
    return {
        "steps": [
            "`pipeline run` makes all results from params.yaml; trainings repeat bit for bit with "
            f"the recorded versions {where}. `pipeline provenance` shows what made a policy."
        ],
        "availability": _availability(root),
        "settings": _settings(params),
        "significance": _significance(root, params),
        "compute": _compute(jobs),
        "machines": _machines([facts for of in jobs.values() for facts in of if facts]),
        "claims": _claims(root, params),
    }


def _availability(root: Path) -> Iterator[str]:
    if head := git(root, "rev-parse", "HEAD"):
        # If there are uncommitted changes, the commit alone does not identify the code.
        edited = (git(root, "status", "--porcelain") or "").strip()
        yield f"Commit {head.strip()}{', with uncommitted changes' if edited else ''}."
    path = root / "CITATION.cff"
    citation = to_plain(read_yaml(path, what="Citation file")) if path.is_file() else {}
    for key in ("license", "repository-code", "doi"):
        yield f"{key} (CITATION.cff): {citation.get(key, BY_AUTHORS)}."


def _settings(params: Params) -> Iterator[str]:
    for name, one in params.experiments.items():
        yield (
            f"{name}: environment {one.environment}, settings {one.trainer} with "
            f"experiments.{name}.overrides of params.yaml, {tables.seeds(one.seeds)}."
        )
    for name, sweep in params.sweeps.items():
        yield _sweep(name, sweep)
    # A sweep explains the settings of the swept experiment, and of the experiment with the best
    # configuration, which has the swept experiment as its `base`.
    swept = {sweep.experiment for sweep in params.sweeps.values()}
    if alone := [name for name, one in params.experiments.items() if not {name, one.base} & swept]:
        yield f"How the settings of {', '.join(alone)} were chosen: {BY_AUTHORS}."


def _significance(root: Path, params: Params) -> Iterator[str]:
    tasks = compare(results.outcomes(root, params))
    for task in tasks:
        kinds = {EVALUATED: "episodes of the exported policy"}
        kind = kinds.get(task.score, "the last tenth of training")
        runs = (f"{one.experiment} {len(one.seeds)}" for one in task.standings)
        yield f"{task.name}: number of seeds: {', '.join(runs)}; score: mean return of {kind}."
    if tasks:
        yield (
            f"Intervals: {statistics.CONFIDENCE:.0%} percentile bootstrap of the interquartile "
            f"mean over seeds ({statistics.DRAWS} draws, arXiv 2108.13264), from "
            f"{statistics.FEWEST_SEEDS} seeds on; comparisons: probability of improvement, exact "
            "two-sided Mann-Whitney test. They capture the variation of the seed."
        )


def _compute(jobs: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    every = [facts for of in jobs.values() for facts in of]
    for name, records in {**jobs, "All": every}.items():
        done = [facts for facts in records if facts]
        # Records of earlier versions have no CPU time, so the text gives the number of jobs that
        # are in the sum.
        timed = [facts["cpu_s"] for facts in done if "cpu_s" in facts]
        of = f" of {len(timed)} jobs" if len(timed) < len(done) else ""
        resumed = sum(facts["resumed"] for facts in done)
        yield (
            f"{name}: {len(done)} of {len(records)} jobs have a record here: "
            f"{tables.duration(sum(facts['duration_s'] for facts in done))} of job time, "
            f"{sum(timed) / 3600:.3g} CPU hours{of}"
            f"{f'; {resumed} resumed, earlier time not counted' if resumed else ''}."
        )
    yield f"Runs that are not in params.yaml (failed or preliminary ones): {BY_AUTHORS}."


def _machines(done: Sequence[dict[str, Any]]) -> Iterator[str]:
    for key in ("processor", "system"):
        for value in dict.fromkeys(facts["machine"].get(key) for facts in done):
            yield f"{key.capitalize()}: {value}."
    for versions in dict.fromkeys(tuple(facts["versions"].items()) for facts in done):
        yield f"Versions: {', '.join(' '.join(one) for one in versions)}."


def _claims(root: Path, params: Params) -> Iterator[str]:
    counts = Counter(answer.verdict for answer in claims.answers(root, params))
    for verdict, n in counts.items():
        yield f"Claims of claims.yaml, {verdict}: {n}."
    if counts["not"]:
        yield f"Why claims are not reproduced: {BY_AUTHORS}."


def _sweep(name: str, sweep: SweepParams) -> str:
    axes = []
    for key, axis in sweep.parameters.items():
        one = axis.interval
        values = ", ".join(map(str, axis.values)) if one is None else f"{one.min} to {one.max}"
        axes.append(f"{key} in {values}")
    over = "; ".join(axes) or f"{len(sweep.configurations)} listed configurations"
    best = f"; the best ran again with {tables.seeds(sweep.best.seeds)}" if sweep.best else ""
    return (
        f"Sweep {name} of {sweep.experiment}: {sweep.method}, {len(sweep.trials())} trials with "
        f"{tables.seeds(sweep.seeds)}, ranked by {sweep.metric} ({sweep.goal}), over {over}{best}."
    )


def _markdown(forms: Forms) -> str:
    lines = []
    for title, items in forms.items():
        lines += ["", f"## {title}", ""]
        for number, (name, known) in enumerate(items.items(), start=1):
            lines.append(f"{number}. **{name}**: {_answer(known)}")
            lines += [f"   - {line}" for line in known]
    return "\n".join(lines).strip()


def _latex(forms: Forms) -> str:
    # The macros of NeurIPS' style file; `providecommand` does not replace the definitions of the
    # style file.
    macros = {"answerYes": "Yes", "answerTODO": "TODO", "justificationTODO": "TODO"}
    lines = [rf"\providecommand{{\{name}}}[1][]{{[{text}] #1}}" for name, text in macros.items()]
    for title, items in forms.items():
        lines += ["", rf"\section*{{{title}}}", r"\begin{enumerate}"]
        for name, known in items.items():
            answer, text = _answer(known), " ".join(known).translate(_LATEX)
            todo = "" if answer == "yes" else rf" \justificationTODO{{}} % {answer}"
            lines += [
                rf"\item {{\bf {name.translate(_LATEX)}}}",
                rf"    \item[] Answer: \answer{'Yes' if answer == 'yes' else 'TODO'}{{}}",
                rf"    \item[] Justification: {text}{todo}",
            ]
        lines.append(r"\end{enumerate}")
    return "\n".join(lines)
