"""Demonstrations as rows to imitate: which pairs they are, and whose."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.demonstrations import demonstration_files, load_expert_rows
from pipeline.errors import DemonstrationError
from pipeline.protocol.demo import DemoWriter
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.settings.schema import DemoSource

SPEC = BehaviorSpec([ObservationSpec.vector(2), ObservationSpec.vector(1)], ActionSpec(1, (3,)))


def write(path, done, *, interrupted=(), spec=SPEC, first=0.0):
    """A file whose pairs see `first`, `first` + 1 and so on; `done` ones close an episode."""
    n = len(done)
    numbers = first + np.arange(n, dtype=np.float32)
    cut = np.zeros(n, np.bool_)
    cut[list(interrupted)] = True
    with DemoWriter(path, "B?team=0", spec) as writer:
        writer.append(
            obs=[
                np.repeat(numbers[:, None], one.shape[0], axis=1) for one in spec.observation_specs
            ],
            actions=ActionTuple(
                np.repeat(numbers[:, None] / 100, spec.action_spec.continuous_size, axis=1),
                np.repeat(
                    (numbers[:, None] % 3).astype(np.int32), spec.action_spec.discrete_size, axis=1
                ),
            ),
            reward=np.zeros(n, np.float32),
            done=np.array(done, np.bool_),
            interrupted=cut,
        )
    return path


def test_rows_are_all_pairs_but_those_that_close_an_episode(tmp_path):
    done = [False, False, True, False, True, True, False]
    rows = load_expert_rows([write(tmp_path / "a.demo", done, interrupted=[4])], SPEC)
    assert len(rows) == 4
    assert [one[:, 0].tolist() for one in rows.obs] == [[0.0, 1.0, 3.0, 6.0]] * 2
    assert rows.obs[0].shape == (4, 2)
    assert rows.continuous[:, 0].tolist() == pytest.approx([0.0, 0.01, 0.03, 0.06])
    assert rows.discrete[:, 0].tolist() == [0, 1, 0, 0]
    assert rows.lengths.tolist() == [2, 1, 1]
    # the second is followed by the end of its task; the third by one that was cut short
    assert rows.done.tolist() == [False, True, False, False]
    assert rows.weights is None


def test_files_follow_each_other_with_their_weights_and_no_episode_spans_two(tmp_path):
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


def test_a_path_names_itself_or_the_demonstrations_in_it(tmp_path):
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
def test_demonstrations_of_another_behavior_are_refused_by_what_differs(spec, message, tmp_path):
    with pytest.raises(DemonstrationError, match=message):
        load_expert_rows([write(tmp_path / "a.demo", [False])], spec)


def test_demonstrations_without_a_step_are_refused_by_their_names(tmp_path):
    sources = [
        write(tmp_path / "a.demo", [True]),
        DemoSource(path=str(write(tmp_path / "b.demo", [True, True])), weight=1.0),
    ]
    with pytest.raises(DemonstrationError, match=r"a\.demo, .*b\.demo: no step holds an action"):
        load_expert_rows(sources, SPEC)
