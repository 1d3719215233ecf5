"""The configurations with which the reference trains on every executable."""

import catalogue
import interoperability
import pytest
import yaml

from pipeline.settings import load_run_settings


def small(name, config=None, demo="expert.demo"):
    (listed,) = catalogue.chosen([name])
    return interoperability.settings(listed, config, 2000, demo)


# Box2D cannot be imported where warnings are errors: its import then ends the interpreter.
IN_PROCESS = [listed for listed in catalogue.ALL if "LunarLander" not in listed.name]
IN_PROCESS = [listed for listed in IN_PROCESS if "CarRacing" not in listed.name]


@pytest.mark.parametrize("listed", IN_PROCESS, ids=lambda entry: entry.name)
def test_configuration_lists_every_behavior_and_has_a_buffer_smaller_than_max_steps(
    listed, tmp_path
):
    qualified = interoperability.scores.action_specs(listed.name, **listed.options)
    for config in listed.configs or (None,):
        content = interoperability.settings(listed, config, 2000, tmp_path / "expert.demo")
        assert set(content["behaviors"]) == {
            behavior_id.partition("?")[0] for behavior_id in qualified
        }
        file = tmp_path / "trainer.yaml"
        file.write_text(yaml.safe_dump(content))
        for behavior in load_run_settings(file).behaviors.values():
            assert behavior.max_steps == 2000
            assert behavior.hyperparameters.buffer_size == 512


def test_only_a_team_game_gets_self_play_and_imitation_gets_the_given_demonstration_file():
    content = small("pettingzoo:classic.tictactoe_v3")
    assert content["behaviors"]["player"]["self_play"]["team_change"] == 500
    assert "self_play" not in small("gymnasium:Taxi-v4")["behaviors"]["Taxi-v4"]
    behavior = small("pyramids", "imitation/Pyramids.yaml")["behaviors"]["Pyramids"]
    assert behavior["behavioral_cloning"]["demo_path"] == "expert.demo"
    assert behavior["reward_signals"]["gail"]["demo_path"] == "expert.demo"
    assert "demo_path" not in behavior["reward_signals"]["extrinsic"]


def test_run_is_successful_if_it_has_updates_all_models_all_steps_and_the_exit_code_0():
    run = interoperability.Run(behaviors=("A", "B"), code=0, steps={"A": 2000, "B": 2001})
    run.updates = 1
    run.onnx = ("A",)
    assert not run.is_well(2000)
    run.onnx = ("A", "B")
    assert run.is_well(2000)
    assert not run.is_well(2001)
    run.updates = 0
    assert not run.is_well(2000)
    run.updates, run.code = 1, 1
    assert not run.is_well(2000)
    # updates are counted at any depth of the timers
    leaf = {"TorchPPOOptimizer.update": {"count": 3}}
    nested = {"a": {"count": 1, "children": leaf}, "TorchSACOptimizer.update": {"count": 2}}
    assert interoperability._updates({"children": nested}) == 5
