"""Several behaviors in one run: streams, limits, lessons and results of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs import TWO, Pair
from toys import BEHAVIOR, Chase, Corridor

import pipeline
from pipeline import seeding
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.envs.side_channels import StatsAggregationMethod
from pipeline.errors import SettingsError
from pipeline.export.policy import OnnxPolicy
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.stages.export import publish
from pipeline.trainer.checkpoints.file import load_checkpoint


@pytest.fixture
def everything(quick):
    """Settings that behaviors of any name take."""

    def make(**changes):
        run = quick(**changes)
        return replace(run, behaviors={}, default_settings=run.behaviors["Toy"])

    return make


def saved(result, name):
    return load_checkpoint(result.behaviors[name].checkpoint)["learner"]["algorithm"]


def test_equal_behaviors_have_different_weights_actions_and_minibatches(quick, train_in):
    toys = Chase(seed=3, n_agents=4), Chase(seed=3, n_agents=4)  # the same situations
    result = train_in(Pair(*toys), quick("One", "Two", max_steps=100))
    first, second = saved(result, "One"), saved(result, "Two")
    assert result.behaviors["One"].n_updates == 0  # these are the first weights
    matrices = [key for key, value in first["policy"].items() if value.ndim == 2 and value.any()]
    assert len(matrices) > 1
    assert not any(torch.equal(first["policy"][key], second["policy"][key]) for key in matrices)
    assert not torch.equal(first["action_stream"], second["action_stream"])
    assert first["minibatch_stream"] != second["minibatch_stream"]
    assert not np.array_equal(toys[0].position, toys[1].position)


def test_only_behavior_of_a_configuration_has_the_seed_of_the_run():
    assert seeding.of_behavior(7, "One", ["One"]) == 7
    seeds = {seeding.of_behavior(7, name, ["One", "Two"]) for name in ("One", "Two")}
    assert len(seeds | {7}) == 3
    assert seeding.of_behavior(7, "One", []) in seeds
    assert seeding.of_behavior(8, "One", []) not in seeds


@pytest.mark.parametrize(("one", "two"), [(300, 900), (900, 300)])
def test_finished_behavior_goes_on_acting_until_the_other_has_finished(
    one, two, quick, tmp_path, recorder, train_in
):
    result = train_in(
        Pair(Corridor(n_agents=4), Chase(n_agents=4)),
        quick(limits={"One": one, "Two": two}),
        sinks=[recorder],
        exporter=publish,
    )
    first, last = ("One", "Two") if one < two else ("Two", "One")
    assert result.behaviors[last].steps < 900 + 4 * 8
    assert result.behaviors[first].steps > 800  # it acts as often
    assert 1 <= result.behaviors[first].n_updates <= 300 // 128
    assert result.behaviors[last].n_updates >= 5
    trains = [
        (step, bool(values["Is Training"])) for name, step, values in recorder.rows if name == first
    ]
    assert [training for _, training in trains] == [step <= 300 for step, _ in trains]
    assert max(step for step, _ in trains) >= 800
    for name, actions in (("One", 0), ("Two", 2)):
        policy = OnnxPolicy(tmp_path / f"{name}.onnx")
        assert policy.description.continuous_size == actions
        assert (tmp_path / name / "checkpoint.pt").is_file()


def test_lessons_follow_the_behavior_that_they_name(quick, train_in):
    def lesson(number, **criteria):
        ends = {"completion_criteria": {"measure": "progress", "behavior": "Two"} | criteria}
        return {"name": f"l{number}", "value": number} | (ends if criteria else {})

    lessons = [lesson(1, threshold=0.25), lesson(2, threshold=0.5), lesson(3)]
    pair = Pair(Corridor(n_agents=2), Chase(n_agents=4))
    parameters = {"lesson": {"curriculum": lessons}}
    result = train_in(pair, quick(limits={"One": 200, "Two": 2000}, parameters=parameters))
    changes = [
        value
        for value, before in zip(pair.lessons, [0, *pair.lessons], strict=False)
        if value != before
    ]
    assert changes == [1.0, 2.0, 3.0]
    assert result.behaviors["One"].n_updates >= 1
    state = load_checkpoint(result.behaviors["One"].checkpoint)
    assert state["run"]["lessons"]["curriculum"]["lessons"] == {"lesson": 2}


class Called(Chase):
    """Gives its behavior the name that it is given."""

    def __init__(self, name):
        super().__init__(n_agents=4)
        self.name = name

    @property
    def behavior_specs(self):
        return {self.name: self.spec}

    def reset(self):
        return {self.name: super().reset()[BEHAVIOR]}

    def step(self, actions):
        return {self.name: super().step({BEHAVIOR: actions[self.name]})[BEHAVIOR]}


HOSTILE = ["../../../evil", "/evil", "a/b", "..", ".", "", "a\\b", "a\0b", "\n", "e" * 300]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("team", ["", "?team=0"])
def test_a_behavior_whose_name_would_lead_elsewhere_is_refused_before_anything_is_written(
    name, team, everything, tmp_path, train_in
):
    run_dir = tmp_path / "a" / "b" / "c" / "run"
    toy = Called(f"{name}{team}")
    with pytest.raises(SettingsError, match=r"^behavior '.*cannot name a folder, because"):
        train_in(toy, everything(), run_dir=run_dir)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("name", ["My Behavior", "Ähre", "[ab]*", ".hidden", "a.b-1", "CON"])
def test_other_names_are_those_of_the_folder_and_its_files_and_are_resumed(
    name, everything, tmp_path, caplog, train_in
):
    def train(max_steps, *, resume):
        settings = everything(checkpoint_interval=50, keep_checkpoints=2, max_steps=max_steps)
        train_in(Called(f"{name}?team=0"), settings, exporter=publish, resume=resume)

    train(300, resume=False)
    folder = tmp_path / name
    step = load_checkpoint(folder / "checkpoint.pt")["learner"]["step"]
    with caplog.at_level("INFO"):
        train(600, resume=True)
    assert f"Resuming training of {name} from step {step}." in caplog.text
    assert (tmp_path / f"{name}.onnx").is_file()
    assert len([path for path in folder.iterdir() if path.suffix == ".onnx"]) == 2 + 1
    assert len([path for path in folder.iterdir() if path.suffix == ".pt"]) == 2 + 2


class EverySecondStep(Pair):
    """Has agents of `Two` only in every second step; in the others, a value is reported."""

    def __init__(self) -> None:
        super().__init__(Corridor(n_agents=2), Corridor(n_agents=2))
        self.actions = None

    def step(self, actions):
        (other,) = (name for name in actions if name != TWO)
        result = {other: self.toys[other].step({BEHAVIOR: actions[other]})[BEHAVIOR]}
        if self.actions is None:
            self.actions = actions[TWO]
            spec = self.behavior_specs[TWO]
            return {**result, TWO: (DecisionSteps.empty(spec), TerminalSteps.empty(spec))}
        delayed, self.actions = self.actions, None
        return {**result, TWO: self.toys[TWO].step({BEHAVIOR: delayed})[BEHAVIOR]}


def test_what_an_environment_reports_counts_for_behaviors_with_agents_in_that_step(
    quick, tmp_path, recorder
):
    pair = EverySecondStep()

    class Reports(InProcessEnvironment):
        def take_stats(self):
            if pair.actions is None:
                return {}
            return {"Game/Score": [(2.0, StatsAggregationMethod.AVERAGE)]}

    pipeline.train(
        Reports(pair),
        quick("One", "Two", max_steps=400),
        seed=1,
        run_dir=tmp_path,
        sinks=[recorder],
    )
    scores = {
        name: [row.get("Game/Score") for behavior, _, row in recorder.rows if behavior == name]
        for name in ("One", "Two")
    }
    assert set(scores["One"]) == {2.0}
    assert set(scores["Two"]) == {None}
