"""Demonstrations that three versions of ML-Agents recorded in Unity."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.specs import ActionSpec, ActionTuple
from pipeline.demos.demo_file import delimited_message, read_demo, writing_demo
from pipeline.wire.codec.generated.messages import DemonstrationMetaProto

pytestmark = pytest.mark.fixtures

EXPECTED = [
    ("v0.9/ExpertGrid.demo", 477, [(3, 84, 84)], ActionSpec(0, (5,)), 142),
    ("v1.0/Expert3DBall.demo", 549, [(8,)], ActionSpec(2, ()), 0),
    ("v1.0/ExpertBasic.demo", 73, [(20,)], ActionSpec(0, (3,)), 10),
    ("v1.0/ExpertPush.demo", 2558, [(105,), (105,)], ActionSpec(0, (7,)), 95),
    ("v2.0/hybrid_visual.demo", 25, [(3, 84, 84), (1,)], ActionSpec(3, (2,)), 0),
]


@pytest.mark.parametrize(("name", "n", "shapes", "actions", "n_done"), EXPECTED)
def test_recorded_demonstration_is_read_completely_and_round_trips(
    fixtures: Path, tmp_path: Path, name, n, shapes, actions, n_done
):
    demo = read_demo(fixtures / "demos" / name)
    assert len(demo) == n == demo.metadata.number_steps
    assert [obs.shape for obs in demo.obs] == [(n, *shape) for shape in shapes]
    assert [obs.shape for obs in demo.spec.observation_specs] == shapes
    assert demo.spec.action_spec == actions
    assert demo.continuous.shape == (n, actions.continuous_size)
    assert demo.discrete.shape == (n, actions.discrete_size)
    assert (demo.discrete < np.array(actions.discrete_branches)).all()
    assert demo.done.sum() == n_done
    # The recorder counts one more episode at its end, so the mean reward differs a little.
    assert demo.metadata.mean_reward == pytest.approx(
        demo.reward.sum() / demo.metadata.number_episodes, rel=0.05
    )
    for obs, spec in zip(demo.obs, demo.spec.observation_specs, strict=True):
        if len(spec.shape) == 3:
            assert obs.min() >= 0
            assert 0.5 < obs.max() <= 1
    # A header without counts, as after an interrupted recording.
    empty = DemonstrationMetaProto(
        api_version=1, demonstration_name=demo.metadata.demonstration_name
    )
    path = tmp_path / "begun.demo"
    begun = delimited_message(empty).ljust(33, b"\0")
    path.write_bytes(begun + (fixtures / "demos" / name).read_bytes()[33:])
    assert len(read_demo(path)) == n
    with writing_demo(tmp_path / "again.demo", demo.behavior_name, demo.spec) as writer:
        writer.append(
            obs=demo.obs,
            actions=ActionTuple(demo.continuous, demo.discrete),
            reward=demo.reward,
            done=demo.done,
            interrupted=demo.interrupted,
            action_mask=demo.action_mask,
        )
    again = read_demo(tmp_path / "again.demo")
    assert again.spec.action_spec == actions
    for field in ("continuous", "discrete", "reward", "done", "interrupted"):
        np.testing.assert_array_equal(getattr(again, field), getattr(demo, field))
    for got, expected in zip(again.obs, demo.obs, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_action_of_a_recorded_step_causes_the_next_observation(fixtures: Path):
    """In 3DBall the action stored with observation t turns the platform in observation t+1."""
    demo = read_demo(fixtures / "demos/v1.0/Expert3DBall.demo")
    change = np.diff(demo.obs[0][:, 0])
    beside = np.abs(np.corrcoef(change, demo.continuous[:-1, 0])[0, 1])
    other = np.abs(np.corrcoef(change, demo.continuous[:-1, 1])[0, 1])
    assert max(beside, other) > 0.9
