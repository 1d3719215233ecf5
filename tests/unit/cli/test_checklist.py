"""`pipeline checklist`: answers from the records of runs, and none that they do not know."""

import re
from pathlib import Path

import pytest
from repositories import commit, git
from small_project import left, params_of

SWEEP = """
sweeps:
  rates:
    experiment: a
    method: random
    runs: 2
    seed: 3
    seeds: [7]
    parameters:
      behaviors.Ball.hyperparameters.learning_rate: {min: 1.0e-4, max: 1.0e-2, scale: log}
      behaviors.Ball.hyperparameters.num_epoch: [2, 3]
    best:
      seeds: [8, 9]
"""
CITATION = "license: Apache-2.0\ndoi: 10.1/x_y\nrepository-code: https://example.org/r\n"


@pytest.fixture
def root(here: Path) -> Path:
    params_of(here, a={"seeds": [1, 2, 3]}, b={"seeds": [1]})
    return here


def job(root: Path, run: str, *, stage: str = "train", **facts: object) -> None:
    known = {
        "duration_s": 60.0,
        "resumed": False,
        "versions": {"numpy": "2.4", "torch": "2.13"},
        "machine": {"processor": "x86_64 avx", "system": "Linux"},
    }
    left(root, f".work/{stage}", run, stage=known | facts)


def items(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return answer and sentences by form and item."""
    found: dict[str, tuple[str, list[str]]] = {}
    for part in text.split("## ")[1:]:
        form, _, body = part.partition("\n")
        for block in re.split(r"^\d+\. ", body, flags=re.MULTILINE)[1:]:
            head, *lines = block.strip().split("\n   - ")
            name, answer = re.fullmatch(r"\*\*(.*)\*\*: (.*)", head).groups()
            found[f"{form[:3]} {name}"] = (answer, lines)
    return found


def test_checklist_leaves_questions_that_no_run_can_answer_to_the_authors(root, printed):
    found = items(printed("checklist"))
    assert len(found) == 16 + 8
    for name in ("Claims", "Limitations", "Broader impacts", "Declaration of LLM usage"):
        assert found[f"Neu {name}"] == ("to be answered by the authors", [])
    # without results there is nothing to say about them
    for name in ("Neu Experiment statistical significance", "ACM Hardware and software"):
        assert found[name] == ("to be answered by the authors", [])
    answer, lines = found["Neu Experiments compute resources"]
    assert answer == "known in part, the rest to be answered by the authors"
    assert lines[0] == "a: 0 of 9 jobs have a record here: 0.0 s of job time, 0 CPU hours."


def test_checklist_sums_compute_time_for_each_experiment_and_in_total(root, printed):
    job(root, "a/seed1", cpu_s=3600.0)
    job(root, "a/seed2", cpu_s=1800.0, resumed=True)
    job(root, "a/seed2", stage="evaluate")
    job(root, "b/seed1", cpu_s=360.0)
    _, lines = items(printed("checklist"))["Neu Experiments compute resources"]
    assert lines[:3] == [
        "a: 3 of 9 jobs have a record here: 3 min 00 s of job time, 1.5 CPU hours of 2 jobs; "
        "1 resumed, earlier time not counted.",
        "b: 1 of 3 jobs have a record here: 60.0 s of job time, 0.1 CPU hours.",
        "All: 4 of 12 jobs have a record here: 4 min 00 s of job time, 1.6 CPU hours of 3 jobs; "
        "1 resumed, earlier time not counted.",
    ]
    assert lines[3].startswith("Runs that are not in params.yaml")
    assert lines[4:] == [
        "Processor: x86_64 avx.",
        "System: Linux.",
        "Versions: numpy 2.4, torch 2.13.",
    ]


def evaluated(root: Path, *returns: float) -> None:
    for seed, value in enumerate(returns, start=1):
        left(root, "evaluate", f"a/seed{seed}", metrics={"Ball": {"mean_return": value}})


def test_checklist_names_seeds_confidence_intervals_and_kind_of_score(root, printed):
    evaluated(root, 11.0, 12.0, 13.0)
    answer, lines = items(printed("checklist"))["Neu Experiment statistical significance"]
    assert answer == "yes"
    assert lines[0] == (
        "ball: Ball: number of seeds: a 3; score: mean return of episodes of the exported policy."
    )
    assert "95% percentile bootstrap of the interquartile mean over seeds (5000 draws" in lines[1]


def test_checklist_explains_the_choice_of_settings_by_the_sweep(root, printed):
    params_of(root, sections=SWEEP, a={"seeds": [1]}, b={"seeds": [1]})
    answer, lines = items(printed("checklist"))["Neu Experimental setting/details"]
    assert lines[0] == (
        "a: environment ball, settings t.yaml with experiments.a.overrides of params.yaml, seed 1."
    )
    assert lines[-2] == (
        "Sweep rates of a: random, 2 trials with seed 7, ranked by mean_return (maximize), over "
        "behaviors.Ball.hyperparameters.learning_rate in 0.0001 to 0.01; "
        "behaviors.Ball.hyperparameters.num_epoch in 2, 3; the best ran again with seeds 8, 9."
    )
    assert lines[-1] == "How the settings of b were chosen: to be answered by the authors."
    assert answer == "known in part, the rest to be answered by the authors"
    # its trials count, too: three stages of two trials and of two seeds of the best
    _, compute = items(printed("checklist"))["Neu Experiments compute resources"]
    for name in ("rates", "rates_best"):
        assert f"{name}: 0 of 6 jobs have a record" in "".join(compute)


def test_checklist_identifies_the_code_by_git_commit_and_citation_file(root, printed):
    git(root, "init", "-q")
    commit(root, "first")
    head = git(root, "rev-parse", "HEAD").strip()
    answer, lines = items(printed("checklist"))["ACM Archive, DOI, licence"]
    assert answer == "known in part, the rest to be answered by the authors"
    assert lines[0] == f"Commit {head}."
    assert lines[1:] == [
        f"{key} (CITATION.cff): to be answered by the authors."
        for key in ("license", "repository-code", "doi")
    ]
    (root / "CITATION.cff").write_text(CITATION)
    answer, lines = items(printed("checklist"))["Neu Open access to data and code"]
    assert answer == "yes"
    assert lines[0] == f"Commit {head}, with uncommitted changes."
    assert lines[-1] == "doi (CITATION.cff): 10.1/x_y."


def test_checklist_in_latex_has_the_macros_of_neurips_and_escaped_characters(root, printed):
    (root / "CITATION.cff").write_text(CITATION)
    text = printed("checklist", "--format", "latex")
    block = text.partition(r"\item {\bf Open access to data and code}")[2].splitlines()
    assert block[1] == r"    \item[] Answer: \answerYes{}"
    assert block[2].endswith(r"doi (CITATION.cff): 10.1/x\_y.")
    unanswered = text.partition(r"\item {\bf Limitations}")[2].splitlines()
    assert unanswered[1:3] == [
        r"    \item[] Answer: \answerTODO{}",
        r"    \item[] Justification:  \justificationTODO{} % to be answered by the authors",
    ]
    assert text.count(r"\begin{enumerate}") == text.count(r"\end{enumerate}") == 2
    assert text.count(r"\item {\bf") == 24
    # a bare special character of LaTeX would break the document
    assert not re.search(r"(?<!\\)[&#$_]", text.replace("[1][]", "").replace("#1", ""))


def test_checklist_counts_claims_and_leaves_failed_claims_to_the_authors(root, printed):
    evaluated(root, 11.0, 12.0, 13.0)
    printed("claims", "write", "a")
    counted = ["Claims of claims.yaml, identical: 1."]
    assert items(printed("checklist"))["ACM Results reproduced"] == ("yes", counted)
    evaluated(root, 10000.0, 10000.0, 10000.0)
    answer, lines = items(printed("checklist"))["ACM Results reproduced"]
    assert lines[-1] == "Why claims are not reproduced: to be answered by the authors."
    assert answer.startswith("known in part")


def test_checklist_refuses_a_folder_without_params_yaml_and_an_unknown_format(root, refused):
    assert "invalid choice: 'word'" in refused("checklist", "--format", "word")
    (root / "params.yaml").unlink()
    assert "Parameter file could not be found" in refused("checklist")
