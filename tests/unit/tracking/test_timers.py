import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.tracking import names
from pipeline.tracking.base import Update
from pipeline.tracking.timers import TimersSink, process_facts


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


@pytest.fixture
def sink(tmp_path: Path, clock: SimpleNamespace) -> TimersSink:
    path = tmp_path / "run_logs/timers.json"
    return TimersSink(path, metadata={"trainer": "us"}, clock=lambda: clock.now)


SECONDS = {"environment": 3.0, "wire": 1.0, "inference": 2.0, "storage": 0.5, "update": 1.5}


def result_with(seconds: dict[str, float]) -> SimpleNamespace:
    """A result of a run of one behavior with 4 updates."""
    behaviors = {"B": SimpleNamespace(n_updates=4)}
    return SimpleNamespace(seconds=seconds, counts={}, n_exchanges=7, behaviors=behaviors)


def times(share: float) -> dict[str, float]:
    return {f"Time/{part}": value * share for part, value in SECONDS.items()}


def test_a_run_that_never_starts_writes_no_timers_file(sink):
    sink.close()
    assert not sink.path.exists()


def test_timers_count_learning_from_the_first_summary_if_start_was_not_called(sink, clock):
    for clock.now in (103.0, 105.0):
        sink.on_summary("A", {}, 1)
    assert sink.tree()["children"]["TrainerController.start_learning"]["total"] == 2.0


def test_timers_tree_has_the_seconds_of_each_part_of_a_run_and_the_parts_add_up(sink, clock):
    for clock.now in (102.0, 104.0):  # only the first call of `start` counts
        sink.start()
    assert sink.tree()["children"]["TrainerController.start_learning"]["total"] == 2.0
    sink.on_update("B", Update(step=1, update_s=0.0, n_episodes=0, recent_returns=()))
    sink.on_summary("B", {names.REWARD: 1.0, **times(0.5)}, 10)
    clock.now = 112.0
    sink.close()
    sink.on_end(result_with(SECONDS | {"total": 9.0}))
    clock.now = 500.0
    sink.close()
    tree = json.loads(sink.path.read_text())
    assert (tree["name"], tree["total"], tree["count"], tree["self"]) == ("root", 12.0, 1, 0.0)
    assert tree["children"]["run_training.setup"] == {"total": 3.0, "count": 1, "self": 3.0}
    learning = tree["children"]["TrainerController.start_learning"]
    assert (learning["total"], learning["self"]) == (9.0, 1.0)
    parts = learning["children"]
    assert parts["_update_policy"] == {"total": 1.5, "count": 4, "self": 1.5}
    assert parts["env_step"] == {
        "total": 4.0,
        "count": 7,
        "self": 0.0,
        "children": {
            "communicator.exchange": {"total": 3.0, "self": 3.0},
            "codec": {"total": 1.0, "self": 1.0},
        },
    }
    assert parts["TorchPolicy.evaluate"]["total"] == 2.0
    assert parts["process_trajectory"]["total"] == 0.5


def test_timers_tree_counts_compile_time_as_a_part_of_the_update_time(sink):
    sink.on_end(result_with(SECONDS | {"compile": 2.0, "total": 9.0}))
    parts = sink.tree()["children"]["TrainerController.start_learning"]["children"]
    compiling = {"compile": {"total": 2.0, "self": 2.0}}
    assert parts["_update_policy"] == {"total": 3.5, "count": 4, "self": 1.5, "children": compiling}


def test_timers_of_a_failed_run_have_the_seconds_that_the_summaries_reported(sink, clock):
    sink.start()
    for step in (10, 20):
        for behavior in ("A", "B"):  # they step together, and learn apart
            sink.on_summary(behavior, times(0.5), step)
    sink.on_update("A", Update(step=20, update_s=1.0, n_episodes=0, recent_returns=()))
    clock.now = 130.0
    tree = sink.tree()
    parts = tree["children"]["TrainerController.start_learning"]["children"]
    assert parts["env_step"]["total"] == 4.0
    assert parts["_update_policy"] == {"total": 3.0, "count": 1, "self": 3.0}
    assert tree["total"] == 30.0


def test_gauges_of_timers_have_the_range_of_each_statistic_of_each_behavior(sink):
    for step, reward in enumerate([2.0, -1.0, 0.5]):
        for behavior, factor in (("A", 10), ("B", 1)):
            sink.on_summary(behavior, {names.REWARD: factor * reward, **times(1)}, step)
    assert sink.tree()["gauges"] == {
        f"{name}.Environment.CumulativeReward.mean": {
            "value": 0.5 * factor,
            "min": -1.0 * factor,
            "max": 2.0 * factor,
            "count": 3,
        }
        for name, factor in (("A", 10), ("B", 1))
    }


def test_metadata_of_timers_has_the_keys_of_ml_agents_with_text_values(sink, clock):
    sink.start()
    clock.now = 101.9
    assert sink.tree()["metadata"] == {
        "timer_format_version": "0.1.0",
        "start_time_seconds": "100",
        "trainer": "us",
        "end_time_seconds": "101",
    }
    facts = process_facts(trainer="us")
    ours = {"python_version", "command_line_arguments", "trainer", "pytorch_version"}
    theirs = {"mlagents_version", "mlagents_envs_version", "communication_protocol_version"}
    assert facts.keys() == ours | theirs | {"numpy_version"}
    assert facts["communication_protocol_version"] == "1.5.0"
    assert all(isinstance(value, str) and value != "unknown" for value in facts.values())
