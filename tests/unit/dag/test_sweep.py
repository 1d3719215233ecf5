"""The ranking of a sweep's trials, and its text in the report."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from small_project import left, params_of

from pipeline.dag.reporting import render
from pipeline.dag.stages import report
from pipeline.dag.stages.sweep import Trial, rank, score_of, table
from pipeline.errors import StageError
from pipeline.settings.project.params import Params
from pipeline.settings.project.sweeps import SweepParams


def trial(name: str, *scores: float, **values: object) -> Trial:
    return Trial(name=name, values=values, scores=dict(enumerate(scores)))


TRIALS = [
    trial("s/001", 1.0, 3.0, rate=0.1),
    trial("s/002", 5.0, 1.0, rate=0.2),
    trial("s/003", float("nan"), 9.0, size=4),
    trial("s/004", 3.0, 3.0, rate=0.4),
]


@pytest.mark.parametrize(
    ("goal", "order"),
    [("maximize", ["002", "004", "001", "003"]), ("minimize", ["001", "002", "004", "003"])],
)
def test_trials_are_ranked_by_mean_score_and_equal_scores_keep_the_order_of_trials(goal, order):
    assert [ranked.name[2:] for ranked in rank(TRIALS, goal=goal)] == order


def test_table_of_a_sweep_has_a_row_for_each_trial_and_a_column_for_each_swept_key():
    rows = list(csv.reader(io.StringIO(table(rank(TRIALS, goal="maximize"), "mean_return"))))
    assert rows == [
        ["trial", "rank", "score", "metric", "rate", "size"],
        ["2", "1", "3.0", "mean_return", "0.2", ""],
        ["4", "2", "3.0", "mean_return", "0.4", ""],
        ["1", "3", "2.0", "mean_return", "0.1", ""],
        ["3", "4", "nan", "mean_return", "", "4"],
    ]


def sweep(**more: object) -> SweepParams:
    settings = {"experiment": "e", "method": "list", "configurations": ({},), "seeds": (1,)}
    return SweepParams(**settings | more)


def test_score_of_a_trial_is_read_for_the_behavior_that_the_sweep_names(tmp_path: Path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"A": {"mean_return": 1}, "B": {"mean_return": 2}}))
    assert score_of(path, sweep(behavior="B")) == 2.0
    with pytest.raises(StageError, match="behaviors A, B; set the sweep's key 'behavior'"):
        score_of(path, sweep())
    with pytest.raises(StageError, match=r"no behavior 'C'; set .* one of A, B"):
        score_of(path, sweep(behavior="C"))


RATE, UNITS = (
    f"behaviors.Walker.{key}"
    for key in ("hyperparameters.learning_rate", "network_settings.hidden_units")
)
SWEEP = {
    "experiment": "walk",
    "method": "list",
    "configurations": [{RATE: 0.1}, {RATE: 0.2}, {UNITS: 64}],
    "seeds": [1, 2],
}
SCORES = {
    "rates/001": {1: 1.0, 2: 2.0},
    "rates/002": {1: 5.0, 2: 7.0},
    "rates/003": {1: 3.0, 2: 3.0},
    "rates_best": {11: 4.0, 12: 5.0},
}


def swept(root, **more) -> Params:
    """Return parameters with a sweep of three trials and further keys."""
    sections = json.dumps({"sweeps": {"rates": SWEEP | more}})
    return params_of(root, "walk", behavior="Walker", sections=sections)


@pytest.fixture
def params(tmp_path) -> Params:
    """Parameters with a sweep of three evaluated trials."""
    for experiment, scores in SCORES.items():
        for seed, score in scores.items():
            metrics = {"Walker": {"mean_return": score}}
            left(tmp_path, "evaluate", f"{experiment}/seed{seed}", metrics=metrics)
    return swept(tmp_path, best={"seeds": [11, 12]})


def test_report_lists_the_best_trial_first_and_its_score_with_other_seeds(
    tmp_path: Path, params: Params
):
    search = report.search(tmp_path, params, "rates")
    assert search.header == ("Trial", "Rank", "mean_return", "learning_rate", "hidden_units")
    assert search.rows == [
        ("rates/002", "1", "6", "0.2", "-"),
        ("rates/003", "2", "3", "-", "64"),
        ("rates/001", "3", "1.5", "0.1", "-"),
    ]
    assert (
        "The best trial, rates/002, scored 4.5 on the fresh seeds 11, 12 (4, 5), after 6 in the "
        "sweep."
    ) in search.notes[1]


def test_report_counts_the_trials_that_share_the_best_score(tmp_path, params):
    assert not [note for note in report.search(tmp_path, params, "rates").notes if "share" in note]
    for seed in (1, 2):
        metrics = {"Walker": {"mean_return": 6.0}}
        left(tmp_path, "evaluate", f"rates/003/seed{seed}", metrics=metrics)
    notes = report.search(tmp_path, params, "rates").notes
    assert notes[1].startswith("2 trials share the best score")
    assert notes[2].startswith("The best trial, rates/002, scored 4.5")


def test_markdown_and_html_reports_show_the_sweep(tmp_path: Path, params: Params):
    swept = [report.search(tmp_path, params, "rates")]
    text = render.markdown([], [], [], swept)
    assert "## Sweep rates" in text
    assert "| rates/002 | 1 | 6 | 0.2 | - |" in text
    page = render.html([], [], [], [], tmp_path, {}, swept)
    assert "<h2>Sweep rates</h2>" in page
    assert "on the fresh seeds 11, 12" in page


def test_report_warns_if_the_best_trial_of_a_sweep_was_not_run_with_other_seeds(tmp_path, params):
    assert not [
        note for note in report.search(tmp_path, params, "rates").notes if "chosen by" in note
    ]
    search = report.search(tmp_path, swept(tmp_path), "rates")
    assert search.notes[-1].startswith("The best trial was chosen by its score on these seeds, so")
