"""`pipeline.train` from Python: forms of an environment, earlier runs, weights, progress, help."""

import inspect
import io
import sys
from pathlib import Path

import gymnasium
import pytest
from beacons import Beacon, Lighthouse, beacon

import pipeline
from pipeline.trainer.checkpoints.file import digest, load_checkpoint

SETTINGS = {
    "default_settings": {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 16, "buffer_size": 64, "num_epoch": 1},
        "network_settings": {"hidden_units": 8, "num_layers": 1},
        "max_steps": 128,
        "summary_freq": 64,
    }
}


def train(env, folder: Path, **options):
    return pipeline.train(env, SETTINGS, **{"seed": 1, "run_dir": folder} | options)


def weights(result) -> str:
    (one,) = result.behaviors.values()
    return digest(load_checkpoint(one.checkpoint)["learner"]["algorithm"])


def test_train_gives_equal_weights_for_a_class_a_function_and_a_name(here, caplog):
    (here / "lighthouses.py").write_text("from beacons import Beacon, beacon\n")
    caplog.set_level("INFO")
    forms = [Beacon, beacon, "lighthouses:beacon"]
    assert len({weights(train(form, here / str(i))) for i, form in enumerate(forms)}) == 1
    said = [line for line in caplog.messages if line.startswith("environments:")]
    assert said == ["environments: 1, all in this process; copies: 16"] * 3


@pytest.mark.parametrize(
    ("env", "options", "n_made", "said"),
    [
        (beacon, {"num_envs": 2, "n_agents": 3}, 6, "2, all in this process; copies: 6"),
        (Beacon, {"n_agents": 2, "env_options": {"kwargs": {"size": 2.0}}}, 2, "copies: 2"),
        (
            Beacon(),
            {},
            0,
            "copies: 1 (an environment object is one copy; for 16 copies, pass its class or a "
            "function)",
        ),
        ([Beacon(), Beacon()], {}, 0, "environments: 2, all in this process; copies: 2"),
        ("balance_ball", {"num_envs": 2}, 0, "environments: 2, all in this process; copies: 24"),
    ],
)
def test_train_logs_the_number_of_environments_and_copies_in_one_line(
    env, options, n_made, said, tmp_path, caplog
):
    caplog.set_level("INFO")
    before = Beacon.n_made
    train(env, tmp_path, **options)
    assert Beacon.n_made - before == n_made
    (line,) = [line for line in caplog.messages if line.startswith("environments:")]
    assert said in line


@pytest.mark.parametrize("mode", ["sync", "async", None])
def test_train_treats_a_gymnasium_vector_environment_as_copies_in_one(mode, tmp_path, caplog):
    caplog.set_level("INFO")
    vector = gymnasium.make_vec("CartPole-v1", num_envs=3, vectorization_mode=mode)
    result = train(vector, tmp_path)
    assert "environments: 1, all in this process; copies: 3" in caplog.text
    named = train("gymnasium:CartPole-v1", tmp_path / "named", n_agents=3)
    assert weights(result) == weights(named)


def test_train_refuses_a_wrapped_gymnasium_vector_environment(tmp_path):
    vector = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        gymnasium.make_vec("CartPole-v1", num_envs=2)
    )
    said = "RecordEpisodeStatistics: its single environments cannot be made again, because"
    with pytest.raises(pipeline.PipelineError, match=said):
        train(vector, tmp_path)


@pytest.mark.parametrize(
    ("env", "options", "said"),
    [
        (Beacon(), {"num_envs": 2}, "num_envs: an environment object is only one environment"),
        (Beacon(), {"n_agents": 2}, "n_agents, env_options: cannot be given for an environment"),
        (None, {"n_agents": 2}, "n_agents: cannot be given for an executable; give env_args"),
    ],
)
def test_train_refuses_copies_of_environments_that_cannot_be_copied(env, options, said, tmp_path):
    with pytest.raises(pipeline.PipelineError, match=said):
        train(env, tmp_path, **options)


def test_train_replaces_an_earlier_run_only_by_force_and_may_start_from_its_weights(tmp_path):
    run = tmp_path / "run"
    first = weights(train(Beacon, run))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for options in ({}, {"init_from": run}, {"sinks": ["jsonl"]}):
        with pytest.raises(pipeline.PipelineError, match="run_dir: an earlier run is in"):
            train(Beacon, run, **options)
    with pytest.raises(pipeline.PipelineError, match="force: starts a new run"):
        train(Beacon, run, force=True, resume=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    with pytest.raises(pipeline.PipelineError, match="TypeError: Beacon"):  # before the start
        train(lambda: Beacon(no=1), run, force=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    # The weights are of the run whose folder is renamed.
    train(Beacon, run, force=True, init_from=run / "Beacon/checkpoint.pt")
    kept = load_checkpoint(tmp_path / "run.1/Beacon/checkpoint.pt")
    assert digest(kept["learner"]["algorithm"]) == first


@pytest.mark.parametrize("form", ["file", "folder", "name", "behavior"])
def test_init_from_accepts_a_checkpoint_the_folder_of_a_run_or_behavior_and_the_name_of_a_run(
    form, tmp_path, caplog
):
    caplog.set_level("INFO")
    train(Beacon, tmp_path / "first")
    file = tmp_path / "first/Beacon/checkpoint.pt"
    sources = {"file": file, "folder": str(tmp_path / "first"), "name": "first"}
    source = (sources | {"behavior": file.parent})[form]
    settings = {"behaviors": {"Lighthouse": SETTINGS["default_settings"]}}
    pipeline.train(Lighthouse, settings, seed=2, run_dir=tmp_path / "second", init_from=source)
    assert f"Lighthouse begins with the weights of {file}" in caplog.text


def test_init_from_refuses_missing_weights_before_the_run_starts(tmp_path):
    said = r"init_from: frist has no checkpoint of a run.*a run's name in"
    with pytest.raises(pipeline.PipelineError, match=said):
        train(Beacon, tmp_path / "run", init_from="frist")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("progress", "is_terminal"), [(True, False), (None, True), (None, False)])
def test_train_shows_progress_on_request_or_a_terminal(
    progress, is_terminal, tmp_path, monkeypatch
):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    train(Beacon, tmp_path, progress=progress)
    lines = shown.getvalue().splitlines()
    if progress or is_terminal:
        assert lines[0] == "[INFO] environments: 1, all in this process; copies: 16"
        assert sum("Beacon. Step: " in line for line in lines) == 2
    else:
        assert lines == []


def test_train_shows_progress_in_a_notebook(tmp_path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    train(Beacon, tmp_path)
    assert "Beacon. Step: 64." in shown.getvalue()


@pytest.mark.parametrize("function", [pipeline.train, pipeline.evaluate, pipeline.make_env])
def test_docstring_of_a_public_function_fits_on_a_screen_and_describes_every_argument(function):
    parameters = inspect.signature(function).parameters.values()
    assert all(one.kind is not one.VAR_KEYWORD and one.annotation for one in parameters)
    text = inspect.getdoc(function)
    assert len(text.splitlines()) <= 42
    assert all(f"\n    {one.name}: " in text for one in parameters)
