"""What users of ML-Agents reported: recordings with teams, and configurations of other versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.demonstrations import merge_demos, trim_demo
from pipeline.errors import DemonstrationError
from pipeline.protocol.demo import describe, read_demo, writing_demo
from pipeline.protocol.demo_file import BRAIN_OFFSET, delimited_message, parse_demo
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec

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
