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


def test_each_update_is_a_csv_row_with_the_experience_since_the_last_update_of_its_behavior(
    tmp_path,
):
    clock = iter((50.0, 54.0, 60.0, 61.0, 70.0, 75.0)).__next__
    with Tracker([UpdatesCsvSink(tmp_path, clock=clock)]) as tracker:
        tracker.on_summary("C", {"a": 1.0}, 5)  # summaries make no file
        tracker.tell("on_update", "A", update(100, 1.0, 2.0, 4.0, n_episodes=2))
        assert len((tmp_path / "A.csv").read_text().splitlines()) == 2, "at once"
        tracker.tell("on_update", "B", update(1000, 5.0, 50.0, n_episodes=1))
        tracker.tell("on_update", "A", update(150, 1.5, 2.0, 4.0, 9.0, n_episodes=3))
        tracker.tell("on_update", "B", update(1700, 7.0, 50.0, 70.0, 90.0, n_episodes=3))
        tracker.tell("on_update", "A", update(250, 2.0, 2.0, 4.0, 9.0, n_episodes=3))
    rows = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    assert rows == {
        "A.csv": [HEADER, "A,1,4,3,100,3", "A,0.5,11,6.5,50,9", "A,0.5,25,13.5,100,"],
        "B.csv": [HEADER, "B,5,10,5,1000,50", "B,2,20,8,700,80"],
    }


def test_unknown_values_in_the_first_updates_row_of_a_resumed_run_are_empty(tmp_path: Path):
    clock = iter((50.0, 52.0, 52.0, 54.0)).__next__
    for attempt in range(2):
        sink = UpdatesCsvSink(tmp_path, clock=clock)
        sink.on_update("B", update(100 * (attempt + 1), 0.5, 1.0, n_episodes=1))
        sink.close()
    assert (tmp_path / "B.csv").read_text().splitlines() == [
        HEADER,
        "B,0.5,2,1.5,100,1",
        "B,0.5,2,1.5,,",
    ]
