from __future__ import annotations

from collections import deque
from pathlib import Path

from pipeline.tracking.base import Tracker, Update
from pipeline.tracking.curve_csv import UpdatesCsvSink

HEADER = (
    "Brain name,Time to update policy,Time since start of training,"
    "Time for last experience collection,Number of experiences used for training,Mean return"
)


def update(step: int, update_s: float, *returns: float, n_episodes: int) -> Update:
    recent = deque(returns, maxlen=100)
    return Update(step=step, update_s=update_s, n_episodes=n_episodes, recent_returns=recent)


def test_every_update_is_a_row_with_what_happened_since_the_one_before(tmp_path: Path):
    clock = iter((50.0, 54.0, 60.0, 61.0)).__next__
    with Tracker([UpdatesCsvSink(tmp_path, clock=clock)]) as tracker:
        tracker.updated("B", update(100, 1.0, 2.0, 4.0, n_episodes=2))
        tracker.updated("B", update(220, 3.0, 2.0, 4.0, 7.0, n_episodes=3))
        tracker.updated("B", update(320, 3.5, 2.0, 4.0, 7.0, n_episodes=3))
    assert (tmp_path / "B.csv").read_text().splitlines() == [
        HEADER,
        "B,1,4,3,100,3",
        "B,2,10,4,120,7",
        "B,0.5,11,0.5,100,",
    ]


def test_a_resumed_run_goes_on_without_inventing_what_it_does_not_know(tmp_path: Path):
    clock = iter((50.0, 52.0, 52.0, 54.0)).__next__
    for attempt in range(2):
        sink = UpdatesCsvSink(tmp_path, clock=clock)
        sink.updated("B", update(100 * (attempt + 1), 0.5, 1.0, n_episodes=1))
        sink.close()
    assert (tmp_path / "B.csv").read_text().splitlines() == [
        HEADER,
        "B,0.5,2,1.5,100,1",
        "B,0.5,2,1.5,,",
    ]


def test_behaviors_have_files_of_their_own_and_summaries_make_none(tmp_path: Path):
    sink = UpdatesCsvSink(tmp_path)
    sink.metrics("C", {"a": 1.0}, 5)
    sink.updated("A", update(1, 0.1, n_episodes=0))
    sink.updated("B", update(1, 0.1, n_episodes=0))
    sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["A.csv", "B.csv"]
