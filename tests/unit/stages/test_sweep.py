"""The ranking of a sweep's trials."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from pipeline.errors import StageError
from pipeline.settings.sweeps import SweepParams
from pipeline.stages.sweep import Trial, rank, score_of, table


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
def test_trials_are_ranked_by_their_mean_and_the_first_of_equal_ones_wins(goal, order):
    assert [one.name[2:] for one in rank(TRIALS, goal=goal)] == order


def test_the_table_has_a_row_per_trial_and_a_column_per_swept_key():
    text = table(TRIALS, rank(TRIALS, goal="maximize"), "mean_return")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["rank"] for row in rows] == ["3", "1", "4", "2"]
    assert [(row["rate"], row["size"]) for row in rows][1:3] == [("0.2", ""), ("", "4")]
    assert float(rows[0]["score"]) == 2.0


def sweep(**more: object) -> SweepParams:
    settings = {"experiment": "e", "method": "list", "configurations": ({},), "seeds": (1,)}
    return SweepParams(**settings | more)


def test_the_score_is_that_of_the_named_behavior(tmp_path: Path):
    path = tmp_path / "metrics.json"
    path.write_text(json.dumps({"A": {"mean_return": 1}, "B": {"mean_return": 2}}))
    assert score_of(path, sweep(behavior="B")) == 2.0
    with pytest.raises(StageError, match="behaviors A, B; say in the sweep's key 'behavior'"):
        score_of(path, sweep())
    with pytest.raises(StageError, match=r"no behavior 'C'; set .* one of A, B"):
        score_of(path, sweep(behavior="C"))
