"""What users of ML-Agents reported: recordings with teams, and configurations of other versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.demonstrations import merge_demos, trim_demo
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.protocol.demo import describe, read_demo, writing_demo
from pipeline.protocol.demo_file import BRAIN_OFFSET, delimited_message, parse_demo
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings, read_yaml

SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec(1, ()))


def recorded(path: Path, behavior: str) -> Path:
    """Two episodes, with the behavior's name in the file as Unity's recorder writes it."""
    with writing_demo(path, behavior, SPEC) as writer:
        writer.append(
            obs=[np.zeros((4, 2), np.float32)],
            actions=ActionTuple(np.zeros((4, 1), np.float32), np.zeros((4, 0), np.int32)),
            reward=np.arange(4, dtype=np.float32),
            done=np.array([False, True, False, True]),
        )
    content = parse_demo(path)
    content.brain.brain_name = behavior
    data = path.read_bytes()
    (length, *_), start = data[BRAIN_OFFSET:], BRAIN_OFFSET + 1
    path.write_bytes(
        data[:BRAIN_OFFSET] + delimited_message(content.brain) + data[start + length :]
    )
    assert behavior.encode() in path.read_bytes()
    return path


def test_a_recording_with_a_team_is_trimmed_and_merged_with_what_was_trimmed(tmp_path: Path):
    """Each recording of Unity has a team in its name."""
    whole = recorded(tmp_path / "whole.demo", "Soccer?team=1")
    part, both = tmp_path / "part.demo", tmp_path / "both.demo"
    for target, printed in (
        (part, trim_demo(whole, part, episodes=[2])),
        (both, merge_demos([whole, part], both)),
        (both, merge_demos([part, whole, recorded(tmp_path / "c.demo", "Soccer?team=0")], both)),
        (both, merge_demos([whole], both, behavior="Soccer?team=1")),
    ):
        assert printed[-1] == f"wrote     {target}: behavior Soccer"
        assert parse_demo(target).brain.brain_name == "Soccer"
        assert "behavior      Soccer\n" in describe(read_demo(target))
    assert len(read_demo(both)) == 4


def test_recordings_of_two_behaviors_are_still_not_merged(tmp_path: Path):
    files = [
        recorded(tmp_path / "a.demo", "Soccer?team=0"),
        recorded(tmp_path / "b.demo", "Goalie?team=0"),
    ]
    with pytest.raises(DemonstrationError, match=r"of the behavior 'Goalie', but .* of 'Soccer'"):
        merge_demos(files, tmp_path / "c.demo")


@pytest.mark.parametrize(
    "text",
    [
        "behaviors:\n" + "".join(f"  B{i}: {{max_steps: 1}}\n" for i in range(20_000)),
        "environment_parameters:\n" + "".join(f"  p{i}: {i}\n" for i in range(40_000)),
        f"env_settings: {{env_args: [{', '.join(map(str, range(60_000)))}]}}\n",
    ],
    ids=["behaviors", "parameters", "arguments"],
)
def test_a_file_with_tens_of_thousands_of_entries_is_refused_by_the_limit(tmp_path, text):
    """It took `config check` more than ten seconds; reading stops at the limit."""
    path = tmp_path / "trainer.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match="the file describes more than 50000 values"):
        load_run_settings(path)


OBJECT = "!!python/object/apply:mlagents.trainers.settings.DefaultTrainerDict"
CLASS = "!!python/name:mlagents.trainers.settings.TrainerSettings ''"
WRITTEN = f"""\
default_settings: null
behaviors: {OBJECT}
  args:
  - {CLASS}
  dictitems:
    Ball:
      trainer_type: sac
      hyperparameters:
        learning_rate: 0.0002
        learning_rate_schedule: constant
        batch_size: 32
      network_settings:
        hidden_units: 17
        conditioning_type: hyper
      max_steps: 1234
      threaded: true
      framework: pytorch
    Goalie:
      max_steps: 7
env_settings:
  env_path: null
  num_envs: 2
checkpoint_settings:
  run_id: ball
debug: false
"""


def test_the_configuration_that_a_run_of_mlagents_025_wrote_is_read(tmp_path: Path):
    path = tmp_path / "configuration.yaml"
    path.write_text(WRITTEN)
    settings = load_run_settings(path)
    ball = settings.behaviors["Ball"]
    assert (ball.trainer_type, ball.max_steps, ball.hyperparameters.batch_size) == ("sac", 1234, 32)
    assert (ball.network_settings.hidden_units, settings.behaviors["Goalie"].max_steps) == (17, 7)
    assert (settings.env_settings.num_envs, settings.checkpoint_settings.run_id) == (2, "ball")
    assert read_yaml(path).value["behaviors"].value["Goalie"].line == 18


def test_a_run_without_behaviors_wrote_a_list(tmp_path: Path):
    text = f"default_settings: {{max_steps: 5}}\nbehaviors: {OBJECT}\n- {CLASS}\ndebug: true\n"
    path = tmp_path / "configuration.yaml"
    path.write_text(text)
    settings = load_run_settings(path)
    assert (settings.behaviors, settings.debug) == ({}, True)
    assert settings.for_behavior("Any").max_steps == 5


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (OBJECT, "!!python/object/apply:os.system", 2),
        (OBJECT, "!!python/object/apply:collections.OrderedDict", 2),
        (CLASS, "!!python/name:os.system ''", 4),
        (CLASS, "!!python/object/apply:os.system [ls]", 4),
        ("trainer_type: sac", f"trainer_type: {CLASS}", 7),
        ("max_steps: 7", f"max_steps: [{CLASS}]", 19),
        ("num_envs: 2", "num_envs: !!int 2", 22),
        ("  args:\n", "  state: {a: 1}\n  args:\n", 2),
    ],
)
def test_every_other_tag_stays_refused(tmp_path: Path, old: str, new: str, line: int):
    path = tmp_path / "configuration.yaml"
    path.write_text(WRITTEN.replace(old, new, 1))
    with pytest.raises(SettingsError, match=rf"\.yaml:{line}: .*(is not allowed|no more than)"):
        load_run_settings(path)
