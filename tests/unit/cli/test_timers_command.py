import json
import re

import pytest

from pipeline import machine
from pipeline.cli.timers import read


def tree(*, metadata=None, **seconds):
    """Return the content of our timers.json: the loop, and the seconds of its parts."""
    node = {name: {"total": total} for name, total in seconds.items()}
    parts = {
        "env_step": {
            "total": 0.0,
            "children": {"communicator.exchange": node["environment"], "codec": node["wire"]},
        },
        "TorchPolicy.evaluate": node["inference"],
        "process_trajectory": node["storage"],
        "_update_policy": node["update"],
    }
    if "compile" in node:
        parts["_update_policy"]["children"] = {"compile": node["compile"]}
    loop = {"TrainerController.start_learning": node["loop"] | {"children": parts}}
    return {"metadata": metadata or {"trainer": "pipeline"}, "total": 0.0, "children": loop}


TIMES = {"loop": 100, "environment": 60, "wire": 2, "inference": 8, "storage": 5, "update": 20}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run" / "run_logs" / "timers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(tree(**TIMES)))
    return path


def test_timers_print_the_share_of_each_part_of_a_run_and_the_unmeasured_rest(file, printed):
    lines = printed("timers", file.parents[1]).splitlines()  # the folder of the run
    shares = {words[0]: words[1:4] for words in map(str.split, lines) if len(words) > 3}
    assert shares["environment"] == ["60.0", "s", "60%"]
    assert shares["update"] == ["20.0", "s", "20%"]
    assert shares["other"] == ["5.0", "s", "5%"]
    assert "1.7 times as fast" in "\n".join(lines), "100 s of which 60 are the environment's"


def test_timers_predict_the_speed_up_from_the_measured_times_of_the_parts_of_a_run(file):
    times = read(file)
    assert times.after() == 1.0
    assert times.after(threaded=True) == pytest.approx(100 / 80)
    # Two groups of environments step in turn: one works while the trainer handles the other. There
    # are four times as many messages, rows and updates, but only twice as many decisions.
    between, works = 2 * 8 + 5 + 4 * 2, 60 + 5
    assert times.after(n_times=4) == pytest.approx(400 / (works + between / 2 + 4 * 20))
    # updates take longer than the environments' work that hides them
    assert times.after(n_times=4, threaded=True) == pytest.approx(400 / (between + 4 * (5 + 20)))
    heavy = tree(**TIMES | {"loop": 180, "update": 100})
    file.write_text(json.dumps(heavy))
    assert read(file).after(threaded=True) == pytest.approx(180 / 120), "the longer of both counts"


def test_timers_predict_no_gain_from_threaded_if_an_update_is_shorter_than_a_step(file, printed):
    """SAC has one update for each step, so `threaded` gains nothing."""
    content = tree(**TIMES)
    parts = content["children"]["TrainerController.start_learning"]["children"]
    parts["env_step"]["count"], parts["_update_policy"]["count"] = 1000, 500  # 100 ms, 40 ms
    file.write_text(json.dumps(content))
    times = read(file)
    assert times.after() == times.after(threaded=True) == 1.0
    between, works = 2 * 8 + 5 + 4 * 2, 60 + 5 + 20
    assert times.after(n_times=4) == pytest.approx(400 / (between + 4 * (5 + 20)))
    assert works + between / 2 < between + 4 * (5 + 20)
    out = printed("timers", file)
    assert "threaded" not in out
    assert "60.0 ms an exchange" in out


@pytest.mark.parametrize(("threaded", "ratio"), [(True, 1.0), (False, 100 / 80)])
def test_timers_predict_a_gain_from_threaded_only_if_nothing_is_threaded(file, threaded, ratio):
    behaviors = {"A": {"threaded": False}, "B": {"threaded": threaded}}
    text = json.dumps({"behaviors": behaviors})
    (file.parents[1] / "configuration.yaml").write_text(text)
    assert read(file).after(threaded=True) == pytest.approx(ratio)


COUNTS = {"agent_steps": 4000, "rollouts": 1000, "gradient_steps": 500}


@pytest.mark.parametrize(
    ("threaded", "counts", "seconds", "said"),
    [
        # 1,000 exchanges of 14 ms; every second one hid an update of 6 ms
        (False, COUNTS, {"environment": 11, "update": 3}, "2 fills"),
        (True, COUNTS | {"rollouts": 50}, {"environment": 11, "update": 3}, "2 fills"),
        (False, COUNTS | {"rollouts": 50}, {"environment": 11, "update": 3}, "40 fills"),
        # updates of 30 ms: half of the exchanges had no update, and waited for 14 ms
        (False, COUNTS, {"environment": 7, "update": 15}, "9.52 fills"),
        # every exchange had such an update
        (False, COUNTS | {"gradient_steps": 1000}, {"environment": 0.5, "update": 30}, "unknown"),
        (False, {"agent_steps": 4000}, {"environment": 14, "update": 0}, None),
    ],
)
def test_timers_propose_the_steps_per_update_with_which_updates_fill_the_waiting_time(
    file, printed, monkeypatch, threaded, counts, seconds, said
):
    monkeypatch.setattr(machine, "n_processors", lambda: 2)
    metadata = {"trainer": "pipeline"} | {key: str(count) for key, count in counts.items()}
    content = tree(metadata=metadata, **TIMES | seconds | {"loop": 100})
    parts = content["children"]["TrainerController.start_learning"]["children"]
    parts["env_step"]["count"] = 1000
    parts["_update_policy"]["count"] = counts.get("gradient_steps", 0)
    file.write_text(json.dumps(content))
    trainer = {"trainer_type": "sac", "threaded": threaded, "hyperparameters": {}}
    configuration = file.parents[1] / "configuration.yaml"
    configuration.write_text(json.dumps({"behaviors": {"A": trainer}}))
    lines = [line for line in printed("timers", file).splitlines() if "steps_per_update" in line]
    assert len(lines) == (said is not None)
    assert all(said in line for line in lines)
    configuration.write_text(json.dumps({"behaviors": {"A": trainer, "B": trainer}}))
    assert "steps_per_update" not in printed("timers", file)


def test_speed_up_predictions_of_timers_exclude_compile_time(file, printed):
    """Compiling happens once, so a short run overstates it."""
    times = read(file)
    file.write_text(json.dumps(tree(**TIMES | {"loop": 150, "update": 70, "compile": 50})))
    compiled = read(file)
    for changes in ({}, {"threaded": True}, {"n_times": 4}, {"n_times": 4, "threaded": True}):
        assert compiled.after(**changes) == times.after(**changes)
    out = printed("timers", file)
    assert re.search(r"update +20\.0 s +13%", out)
    assert re.search(r"compile +50\.0 s +33%", out)
    assert "1.7 times as fast" in out
    assert "The environment takes most" in out
    out = printed("timers", file, file)
    assert re.search(r"compile +50\.0 s", out)
    assert "saving" not in out, "nobody measured it"


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        ({"environment": 80, "update": 1, "loop": 96}, "--time-scale", "threaded: true  "),
        ({"environment": 20, "update": 90, "loop": 125}, "torch_settings.device", "--time-scale"),
    ],
)
def test_timers_give_advice_for_the_slowest_part_of_the_run(file, printed, changes, said, unsaid):
    file.write_text(json.dumps(tree(**TIMES | changes)))
    out = printed("timers", file)
    assert said in out
    assert unsaid not in out


@pytest.mark.parametrize("option", ["--num-envs=4 ", ""])
def test_timers_of_mlagents_give_the_time_per_environment_and_parallel_updates(tmp_path, option):
    """The number of environments is in the command line or in the run's configuration."""
    exchange = {"communicator.exchange": {"total": 120.0, "count": 80, "is_parallel": True}}
    workers = {"worker_root": {"total": 200.0, "children": exchange}}
    update = {"TorchPPOOptimizer.update": {"total": 9.0, "count": 30}}
    thread = {"_update_policy": {"total": 10.0, "children": update}}
    thread["process_trajectory"] = {"total": 45.0}
    parts = {
        "TrainerController.advance": {
            "total": 49.0,
            "children": {"env_step": {"total": 49.0, "count": 20, "children": workers}},
        },
        "trainer_threads": {"total": 0.0, "children": {"thread_root": {"children": thread}}},
    }
    metadata = {"mlagents_version": "1.1.0", "command_line_arguments": f"x {option}--force"}
    content = {
        "metadata": metadata,
        "children": {"TrainerController.start_learning": {"total": 50.0, "children": parts}},
    }
    (tmp_path / "run_logs").mkdir()
    (tmp_path / "run_logs/timers.json").write_text(json.dumps(content))
    n_envs = 1 if option else 4
    (tmp_path / "configuration.yaml").write_text(f"env_settings: {{num_envs: {n_envs}}}")
    times = read(tmp_path)
    assert times.program == "mlagents-learn 1.1.0"
    assert times.parts["environment"] == 30.0
    assert times.parallel == {"update"}
    assert (times.parts["storage"], times.idle_s) == (0.0, 45.0)
    assert times.other_s == 20.0
    assert (times.n_exchanges, times.n_minibatches) == (20, 30)


def test_timers_files_of_two_runs_are_compared_in_one_table(file, tmp_path, printed):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(tree(**TIMES | {"loop": 50, "environment": 15})))
    rows = [line.split() for line in printed("timers", file, other).splitlines()]
    assert ["environment", "60.0", "s", "60%", "15.0", "s", "30%", "0.25"] in rows
    assert ["all", "100.0", "s", "100%", "50.0", "s", "100%", "0.50"] in rows


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[]", "has no timers"),
        ('{"children": {}}', "has no timers"),
        ('{"children": {"TrainerController.start_learning": {"total": "long"}}}', "no timers"),
    ],
)
def test_file_that_contains_no_timers_is_refused_in_one_line(tmp_path, refused, text, said):
    path = tmp_path / "timers.json"
    if text is not None:
        path.write_text(text)
    error = refused("timers", path)
    assert error.startswith(f"{path}: ")
    assert said in error
