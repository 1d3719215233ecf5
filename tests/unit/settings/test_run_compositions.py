"""What a whole configuration says of one behavior, file or experiment, and not of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.plugins import Group
from pipeline.settings import load_run_settings, parse_yaml, to_mapping
from pipeline.settings.params import Params, load_params
from pipeline.settings.plan import plan
from pipeline.settings.reader import ContradictionError
from pipeline.settings.run_file import structure
from pipeline.settings.schema import (
    CuriositySettings,
    ExtrinsicSettings,
    NetworkSettings,
    POCASettings,
    RNDSettings,
    RunSettings,
    SACSettings,
    TrainerSettings,
)
from pipeline.settings.sweeps import BestParams, SweepParams


def network(encoder: str) -> NetworkSettings:
    return NetworkSettings(vis_encode_type=encoder)


def test_packages_are_those_of_every_behavior_signal_network_and_of_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def versions(group: Group, *names: str) -> dict[str, str]:
        return {f"{name} of {group.name.partition('.')[2]}": "1" for name in names}

    monkeypatch.setattr(Group, "versions", versions)
    settings = RunSettings(
        behaviors={
            "A": TrainerSettings(
                network_settings=network("resnet"),
                reward_signals={
                    "extrinsic": ExtrinsicSettings(),
                    "rnd": RNDSettings(network_settings=network("nature_cnn")),
                },
            ),
            "B": TrainerSettings(
                trainer_type="sac",
                hyperparameters=SACSettings(),
                reward_signals={"curiosity": CuriositySettings()},
            ),
        },
        default_settings=TrainerSettings(
            trainer_type="poca",
            hyperparameters=POCASettings(),
            network_settings=network("match3"),
        ),
    )
    assert list(settings.plugins()) == [
        "curiosity of reward_signals",
        "extrinsic of reward_signals",
        "match3 of encoders",
        "nature_cnn of encoders",
        "poca of algorithms",
        "ppo of algorithms",
        "resnet of encoders",
        "rnd of reward_signals",
        "sac of algorithms",
        "simple of encoders",
    ]


def test_a_path_is_where_the_behavior_has_it_and_else_where_the_defaults_have_it() -> None:
    settings = RunSettings(
        places={
            "default_settings.init_path": "f:1",
            "behaviors.A.init_path": "f:2",
            "env_settings.env_path": "f:3",
            "default_settings.env_path": "f:4",
        }
    )
    places = {
        key: settings.place_of(key)
        for key in (
            "behaviors.A.init_path",
            "behaviors.B.init_path",
            "behaviors.B.demo_path",
            "env_settings.env_path",
            "torch_settings.B.init_path",
        )
    }
    assert list(places.values()) == ["f:2", "f:1", None, "f:3", None]


def test_a_behavior_that_took_the_defaults_is_not_listed_afterwards() -> None:
    settings = load_run_settings(
        None,
        overrides={
            "default_settings": {"trainer_type": "sac"},
            "behaviors": {"A": {"trainer_type": "ppo"}},
        },
    )
    before = to_mapping(settings)
    taken = {name: settings.for_behavior(name) for name in ("B?team=1", "A?team=0", "C", "B")}
    assert {name: taken[name].trainer_type for name in taken} == {
        "B?team=1": "sac",
        "A?team=0": "ppo",
        "C": "sac",
        "B": "sac",
    }
    assert to_mapping(settings) == before


FILE = """
environments: {ball: {source: builtin, name: balance_ball}}
experiments:
  first:
    environment: ball
    trainer: t.yaml
    overrides: OVERRIDES
    seeds: [3]
    stages: [train]
  base:
    environment: ball
    trainer: u.yaml
    overrides: {behaviors.Ball.max_steps: 800}
    seeds: [1, 2]
    stages: [train, export, evaluate]
    evaluation: {episodes: 2, seed: 9}
sweeps:
  grid:
    experiment: base
    method: grid
    parameters: {behaviors.Ball.hyperparameters.learning_rate: [0.1, 0.2]}
    seeds: [5]
    best: {seeds: [7]}
"""


def project(folder: Path, overrides: str) -> Params:
    for name, trainer in (("t", "sac"), ("u", "ppo")):
        behaviors = {"behaviors": {"Ball": {"trainer_type": trainer}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(behaviors))
    (folder / "params.yaml").write_text(FILE.replace("OVERRIDES", overrides))
    return load_params(folder / "params.yaml")


def test_equal_overrides_are_one_text_however_they_are_written_and_each_experiment_has_its_own(
    tmp_path: Path,
) -> None:
    """The best of a sweep, whose values are not known yet, is not among the experiments."""
    dotted = project(tmp_path, "{behaviors.Ball.max_steps: 7e2}").in_one_spelling()
    nested = project(tmp_path, "{behaviors: {Ball: {max_steps: '700'}}}").in_one_spelling()
    assert dotted == nested
    overrides = {name: values["overrides"] for name, values in dotted["experiments"].items()}
    assert overrides == {
        "base": {"behaviors": {"Ball": {"max_steps": 800}}},
        "first": {"behaviors": {"Ball": {"max_steps": 700}}},
    }
    assert type(overrides["first"]["behaviors"]["Ball"]["max_steps"]) is int


def test_a_trial_is_checked_over_the_experiment_of_its_own_sweep(tmp_path: Path) -> None:
    params = project(tmp_path, "{}")
    rate = "behaviors.Ball.hyperparameters.learning_rate"
    for value in (0.5, 0.25):
        ball = params.trial_settings("grid", {rate: value}).behaviors["Ball"]
        assert (ball.trainer_type, ball.max_steps) == ("ppo", 800)
        assert ball.hyperparameters.learning_rate == value


def read_text(text: str) -> RunSettings:
    return structure(parse_yaml(text, source="f"))


def lessons(*values: str) -> str:
    listed = ", ".join(f"{{name: l{k}, value: {k}{value}}}" for k, value in enumerate(values))
    return f"environment_parameters: {{wind: {{curriculum: [{listed}]}}}}\n"


def test_every_lesson_but_the_last_has_to_end_not_the_first_alone() -> None:
    ends = ", completion_criteria: {behavior: A, threshold: 1}"
    said = refusal(SettingsError, read_text, lessons(ends, ends, "", ""))
    assert "curriculum[2]: A non-terminal lesson does not have a completion_criteria" in said
    read_text(lessons(ends, ends, ends, ""))


def test_a_misspelt_signal_is_told_together_with_what_is_wrong_in_one_above_it() -> None:
    signals = "{extrinsic: {gamma: 7}, gial: {}}"
    with pytest.raises(SettingsError) as caught:
        read_text(f"behaviors: {{A: {{reward_signals: {signals}}}}}")
    assert [word in str(part) for part in caught.value.parts for word in ("gamma", "gial")] == [
        *(True, False),
        *(False, True),
    ]


def test_reward_signals_keep_the_order_in_which_they_are_written() -> None:
    text = "behaviors: {A: {reward_signals: {rnd: {}, extrinsic: {}, curiosity: {}}}}"
    assert list(read_text(text).behaviors["A"].reward_signals) == ["rnd", "extrinsic", "curiosity"]


def test_a_document_with_keys_of_the_past_is_read_alike_a_second_time(caplog) -> None:
    document = parse_yaml(
        "behaviors: {A: {framework: x, network_settings: {conditioning_type: none},"
        " reward_signals: {curiosity: {encoding_size: 9}}}}",
        source="f",
    )
    first, n_told = structure(document), len(caplog.messages)
    assert structure(document) == first
    assert first.behaviors["A"].reward_signals["curiosity"].network_settings.hidden_units == 9
    assert (n_told, len(caplog.messages)) == (3, 6)


def more(folder: Path, text: str) -> Params:
    project(folder, "{}")
    (folder / "params.yaml").write_text(FILE.replace("OVERRIDES", "{}") + text)
    return load_params(folder / "params.yaml")


LIST = "{experiment: EXPERIMENT, method: list, configurations: [{a.b: 1}, {a.c: 2}], seeds: [1]}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"  other: {LIST.replace('EXPERIMENT', 'bose')}\n", "sweeps.other.experiment"),
        (f"  a.b: {LIST.replace('EXPERIMENT', 'base')}\n", "sweeps.a.b: the name 'a.b'"),
        ("subsets: {a.b: [base]}\n", "subsets.a.b: the name 'a.b'"),
        ("subsets: {few: [base, bose]}\n", "subsets.few: there is no experiment"),
    ],
)
def test_a_mistake_in_the_second_of_two_is_found_too(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(SettingsError, more, tmp_path, text)


def test_an_experiment_may_not_be_called_as_the_best_of_a_sweep(tmp_path: Path) -> None:
    project(tmp_path, "{}")
    (tmp_path / "params.yaml").write_text(
        FILE.replace("OVERRIDES", "{}").replace("  first:", "  grid_best:")
    )
    said = refusal(SettingsError, load_params, tmp_path / "params.yaml")
    assert "would lie in those of the experiment 'grid_best'" in said


def test_a_subset_has_each_run_once_and_a_run_may_be_of_a_name_with_hyphens(tmp_path: Path) -> None:
    project(tmp_path, "{}")
    text = FILE.replace("OVERRIDES", "{}").replace("  first:", "  to-and-fro:")
    (tmp_path / "params.yaml").write_text(
        f"{text}subsets: {{few: [base-2, to-and-fro-3, base, grid_best]}}\n"
    )
    params = load_params(tmp_path / "params.yaml")
    runs = [("base", 2), ("to-and-fro", 3), ("base", 1), ("grid_best", 7)]
    assert params.runs_of("few") == runs
    assert params.runs_of("to-and-fro-3") == runs[1:2]


def test_each_configuration_of_a_list_is_alone_and_seeds_of_the_best_are_checked() -> None:
    changes = ({"a.b": 1}, {"a.c": 2})
    common = {"experiment": "e", "method": "list", "configurations": changes, "seeds": (1,)}
    assert SweepParams(**common).trials() == {"001": {"a.b": 1}, "002": {"a.c": 2}}
    with pytest.raises(ContradictionError, match="best"):
        SweepParams(**common, best=BestParams(seeds=(5, 5)))


def test_a_proposal_depends_on_whose_score_counts_and_every_sweep_has_its_proposals(
    tmp_path: Path,
) -> None:
    parameters = "{behaviors.Ball.hyperparameters.learning_rate: {min: 0.1, max: 0.2}}"
    search = f"experiment: base, method: optuna, parameters: {parameters}, seed: 1, seeds: [4]"
    params = more(
        tmp_path,
        f"  one: {{{search}, runs: 2, behavior: Ball}}\n"
        f"  two: {{{search}, runs: 3, behavior: Foe, parallel: 2}}\n",
    )
    first, second = params.sweeps["one"], params.sweeps["two"]
    assert first.search() != second.search()
    proposals = plan(params)["runs"]["proposals"]
    assert {name: (entry["trial"], entry["told"]) for name, entry in proposals.items()} == {
        "one-002": ("one/002", "one/001"),
        "two-003": ("two/003", "two/001"),
    }
