"""Demonstrations as rows to imitate: selected pairs, merged and trimmed files, other behaviors."""

import numpy as np
import pytest

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import parse_demo, read_demo, writing_demo
from pipeline.demos.demonstrations import (
    demonstration_files,
    load_expert_rows,
    merge_demos,
    trim_demo,
)
from pipeline.errors import DemonstrationError
from pipeline.settings.trainer.schema import DemoSource

SPEC = BehaviorSpec([ObservationSpec.vector(2), ObservationSpec.vector(1)], ActionSpec(1, (3,)))


def write(path, done, *, interrupted=(), spec=SPEC, first=0.0, behavior="B?team=0", reward=0):
    """Write a file whose pairs observe `first`, `first` + 1, ...; `done` pairs close an episode."""
    n, (n_continuous, n_discrete) = len(done), (spec.action_spec[0], spec.action_spec.discrete_size)
    numbers = first + np.arange(n, dtype=np.float32)[:, None]
    with writing_demo(path, behavior, spec, name="people") as writer:
        writer.append(
            obs=[np.repeat(numbers, obs_spec.shape[0], axis=1) for obs_spec in spec[0]],
            actions=ActionTuple(
                np.repeat(numbers / 100, n_continuous, axis=1),
                np.repeat((numbers % 3).astype(np.int32), n_discrete, axis=1),
            ),
            reward=np.full(n, reward, np.float32),
            done=np.array(done, np.bool_),
            interrupted=np.isin(np.arange(n), interrupted),
        )
    return path


def test_expert_rows_are_all_recorded_steps_except_the_closing_step_of_each_episode(tmp_path):
    done = [False, False, True, False, True, True, False]
    rows = load_expert_rows([write(tmp_path / "a.demo", done, interrupted=[4])], SPEC)
    assert len(rows) == 4
    assert [obs[:, 0].tolist() for obs in rows.obs] == [[0.0, 1.0, 3.0, 6.0]] * 2
    assert rows.obs[0].shape == (4, 2)
    assert rows.continuous[:, 0].tolist() == pytest.approx([0.0, 0.01, 0.03, 0.06])
    assert rows.discrete[:, 0].tolist() == [0, 1, 0, 0]
    assert rows.lengths.tolist() == [2, 1, 1]
    # The task ends after the second row; after the third row the episode was cut short.
    assert rows.done.tolist() == [False, True, False, False]
    assert rows.weights is None


def test_rows_of_several_files_are_concatenated_with_file_weights_and_separate_episodes(tmp_path):
    (tmp_path / "more").mkdir()
    for name, first in (("b.demo", 20), ("a.demo", 10)):
        write(tmp_path / "more" / name, [False, False], first=first)
    (tmp_path / "more" / "notes.txt").write_text("no demonstration")
    sources = [
        DemoSource(path=str(write(tmp_path / "c.demo", [False] * 3)), weight=2.0),
        DemoSource(path=str(tmp_path / "more"), weight=0.5),
    ]
    rows = load_expert_rows(sources, SPEC)
    assert rows.obs[1][:, 0].tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert rows.weights.tolist() == [2.0] * 3 + [0.5] * 4
    assert rows.weights.dtype == np.float32
    assert rows.lengths.tolist() == [3, 2, 2]
    equal = [DemoSource(path=str(tmp_path / "more"), weight=3.0), tmp_path / "c.demo"]
    assert load_expert_rows(equal[:1], SPEC).weights is None
    assert load_expert_rows(equal, SPEC).weights.tolist() == [3.0] * 4 + [1.0] * 3


def test_path_may_be_a_demonstration_or_a_folder_of_demonstrations(tmp_path):
    file = write(tmp_path / "b.demo", [False])
    other = write(tmp_path / "a.demo", [False])
    assert demonstration_files(str(file)) == [file]
    assert demonstration_files(tmp_path) == [other, file]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DemonstrationError, match=r"empty: there are no '\.demo' files"):
        demonstration_files(empty)
    with pytest.raises(DemonstrationError, match=r"nothing\.demo: .* does not exist"):
        demonstration_files(tmp_path / "nothing.demo")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SPEC._replace(action_spec=ActionSpec(2, (3,))), r"a\.demo: its actions are .*, the"),
        (SPEC._replace(observation_specs=SPEC.observation_specs[:1]),
         r"a\.demo: it has 2 observations, the behavior has 1"),
        (SPEC._replace(observation_specs=[ObservationSpec.vector(2)] * 2),
         r"a\.demo: observation 1 has shape \(1,\), the behavior's has \(2,\)"),
    ],
)  # fmt: skip
def test_error_for_demonstrations_of_another_behavior_names_the_difference(spec, message, tmp_path):
    with pytest.raises(DemonstrationError, match=message):
        load_expert_rows([write(tmp_path / "a.demo", [False])], spec)


def test_error_for_demonstrations_without_an_action_names_the_demonstration_files(tmp_path):
    sources = [
        write(tmp_path / "a.demo", [True]),
        DemoSource(path=str(write(tmp_path / "b.demo", [True, True])), weight=1.0),
    ]
    with pytest.raises(DemonstrationError, match=r"a\.demo, .*b\.demo: no step has an action"):
        load_expert_rows(sources, SPEC)


def assert_equal_rows(rows, other):
    for name in ("continuous", "discrete", "lengths", "done"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(other, name), err_msg=name)
    for left, right in zip(rows.obs, other.obs, strict=True):
        np.testing.assert_array_equal(left, right)


def test_merged_demonstration_has_the_rows_of_all_merged_files(tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    write(folder / "a.demo", [False, False, True, False], interrupted=[2])  # ends with an open one
    write(folder / "b.demo", [True, False, False, True], first=10)
    write(folder / "c.demo", [False], first=20)
    target = tmp_path / "one.demo"
    steps = merge_demos([folder], target)
    assert_equal_rows(load_expert_rows([target], SPEC), load_expert_rows([folder], SPEC))
    demo = read_demo(target)
    assert (demo.behavior_name, len(demo)) == ("B", 10)
    assert demo.interrupted.tolist() == [False, False, True, False, True] + [False] * 5
    assert steps[0].endswith("1 episodes ended, and an open episode closed as cut short")
    assert steps[1].endswith("4 pairs, 2 episodes ended")
    remerged = tmp_path / "again.demo"
    merge_demos([target], remerged)
    assert remerged.read_bytes() == target.read_bytes()


def test_merging_closes_an_open_episode_with_its_last_observation_and_without_a_second_reward(
    tmp_path,
):
    open_file = write(tmp_path / "a.demo", [False, True, False, False])
    content = parse_demo(open_file)
    for number, info in enumerate(content.infos, start=1):
        info.reward, info.group_reward, info.group_id = number, 10 * number, 7
    with writing_demo(open_file, "B", SPEC) as writer:
        writer.append_messages(content.infos, content.actions)
    target = tmp_path / "c.demo"
    merge_demos([open_file, write(tmp_path / "b.demo", [False, True], first=20)], target)
    demo = read_demo(target)
    assert demo.obs[0][:, 0].tolist() == demo.obs[1][:, 0].tolist() == [0, 1, 2, 3, 3, 20, 21]
    assert demo.reward.tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert demo.group_reward.tolist() == [10, 20, 30, 40, 0, 0, 0]
    assert demo.group_id.tolist() == [7] * 5 + [0] * 2
    assert demo.done.tolist() == [False, True, False, False, True, False, True]
    assert demo.interrupted.tolist() == [False] * 4 + [True] + [False] * 2
    assert not demo.continuous[4].any()


def test_files_of_other_behaviors_are_not_merged(tmp_path):
    source, target = write(tmp_path / "a.demo", [False, True]), tmp_path / "c.demo"
    other = write(tmp_path / "b.demo", [False], spec=SPEC._replace(action_spec=ActionSpec(2, ())))
    with pytest.raises(DemonstrationError, match=r"b\.demo: its actions are .*Continuous: 2"):
        merge_demos([source, other], target)
    write(tmp_path / "d.demo", [False, True], behavior="Other")
    with pytest.raises(DemonstrationError, match=r"behavior 'Other', but .* has 'B'; .*--behavior"):
        merge_demos([source, tmp_path / "d.demo"], target)
    with pytest.raises(DemonstrationError, match=r"a\.demo: is one of the files to merge"):
        merge_demos([source], source)
    assert not target.exists()
    merge_demos([source, tmp_path / "d.demo"], target, behavior="Both")
    assert read_demo(target).behavior_name == "Both"


def paid(path, returns):
    """Write an episode of two rows and a closing pair per return, then a row of an open episode."""
    done = [*[False, False, True] * len(returns), False]
    return write(path, done, reward=np.append(np.outer(returns, [0, 0, 1]), 0))


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({"episodes": [4, 2]}, [2, 4]),
        ({"min_return": 3.0}, [2, 3, 4]),
        ({"max_return": 3.0}, [1, 2, 4]),
        ({"best": 2}, [2, 3]),  # episodes 2 and 4 have equal returns: the earlier is kept
        ({"best": 9}, [1, 2, 3, 4]),
        ({"episodes": [1, 2, 4], "best": 2, "min_return": 3.0}, [2, 4]),
        ({"min_return": 2.0, "max_return": 4.0, "best": 1}, [2]),
    ],
)
def test_trimming_a_demonstration_keeps_the_episodes_that_meet_every_condition(
    tmp_path, conditions, kept
):
    path = paid(tmp_path / "a.demo", [1, 3, 5, 3])
    target = tmp_path / "b.demo"
    steps = trim_demo(path, target, **conditions)
    demo = read_demo(target)
    starts = [3 * (number - 1) for number in kept]
    assert demo.obs[0][:, 0].tolist() == [start + row for start in starts for row in range(3)]
    assert demo.returns() == [[1, 3, 5, 3][number - 1] for number in kept]
    meta = demo.metadata
    assert (meta.number_steps, meta.number_episodes) == (3 * len(kept), len(kept) + 1)
    assert meta.demonstration_name == "people"
    assert steps[0].endswith("13 pairs, 4 episodes ended; 1 pairs after the last end left out")
    assert steps[1].startswith(f"kept      {len(kept)} episodes, {3 * len(kept)} pairs, returns")


def test_return_limit_for_trimming_tolerates_float32_rounding_errors(tmp_path):
    path = paid(tmp_path / "a.demo", [0.1])
    assert read_demo(path).returns() != [0.1]
    for conditions in ({"min_return": 0.1}, {"max_return": 0.1}):
        trim_demo(path, tmp_path / "b.demo", **conditions)
    for beyond, conditions in ((-1.6e-6, {"min_return": 0.1}), (1.6e-6, {"max_return": 0.1})):
        path = paid(tmp_path / "c.demo", [0.1, 0.1 + beyond])
        trim_demo(path, tmp_path / "d.demo", **conditions)
        assert len(read_demo(tmp_path / "d.demo").returns()) == 1


@pytest.mark.parametrize(
    ("conditions", "told"),
    [
        ({"episodes": [2, 5]}, "there is no episode 5; its ended episodes are 1 to 4"),
        ({"episodes": [0]}, "there is no episode 0"),
        ({"min_return": 6.0}, r"none of its 4 ended episodes \(returns 1 to 5\) meets"),
    ],
)
def test_trimming_to_no_episodes_is_refused(tmp_path, conditions, told):
    path = paid(tmp_path / "a.demo", [1, 3, 5, 3])
    with pytest.raises(DemonstrationError, match=rf"a\.demo: {told}"):
        trim_demo(path, tmp_path / "b.demo", **conditions)
    assert not (tmp_path / "b.demo").exists()


def named(*names):
    vectors = [ObservationSpec.vector(2, name) for name in names]
    return BehaviorSpec(vectors, ActionSpec(1, ()))


def test_demonstration_with_sensors_in_another_order_than_the_behavior_is_refused(tmp_path):
    """The shapes are equal, so only the names show the order."""
    write(tmp_path / "a.demo", [False, True], spec=named("ball", "paddle"))
    sources = [DemoSource(path=str(tmp_path / "a.demo"))]
    # The second order is Unity's if `paddle` is misspelled, because Unity sorts sensors by name.
    for moved in (named("paddle", "ball"), named("apddle", "ball")):
        with pytest.raises(DemonstrationError, match=r"demo: its observations come in the order"):
            load_expert_rows(sources, moved)


def test_sensors_with_other_names_are_accepted_with_a_warning(tmp_path, caplog):
    write(tmp_path / "a.demo", [False, True], spec=named("ball", "paddle"))
    sources = [DemoSource(path=str(tmp_path / "a.demo"))]
    load_expert_rows(sources, named("ball", "padle"))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "['ball', 'paddle']" in line
    assert "['ball', 'padle']" in line
    caplog.clear()
    load_expert_rows(sources, named("ball", "paddle"))
    load_expert_rows(sources, named("", ""))  # early packages send no names of sensors
    assert not caplog.records
