"""Demonstrations from and as CSV, JSON lines and Parquet files, and specification files."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refusals import refusal

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.demos.behavior_spec import read_spec_file, spec_file, spec_of
from pipeline.demos.demo_file import read_demo, writing_demo
from pipeline.demos.demonstrations import load_expert_rows
from pipeline.demos.table_import import import_table
from pipeline.demos.tables import read_table, table_of, write_table
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.settings.yaml_file import dump_yaml

SPEC = BehaviorSpec(
    [ObservationSpec.vector(3, "state"), ObservationSpec.visual(1, 2, 3, "eye")],
    ActionSpec(2, (3, 2)),
)
SMALL = BehaviorSpec([ObservationSpec.vector(2, "state")], ActionSpec(0, (3,)))


def recorded(path, *, done=(0, 0, 1, 0, 1, 1), interrupted=(4,), masked=True):
    """Write a demonstration with every kind of field; one episode has a closing pair only."""
    rng, n = np.random.default_rng(0), len(done)
    ends = np.array(done, dtype=bool)
    begins = np.append(True, ends[:-1])
    actions = SPEC.action_spec.random_action(n, rng)
    actions.continuous[ends], actions.discrete[ends] = 0, 0
    masks = [(rng.random((n, size)) < 0.3) & ~ends[:, None] for size in (3, 2)]
    with writing_demo(path, "B", SPEC) as writer:
        writer.append(
            obs=[rng.random((n, *o.shape), dtype=np.float32) for o in SPEC.observation_specs],
            actions=actions,
            reward=np.where(begins, 0, rng.normal(size=n)).astype(np.float32),
            done=ends,
            interrupted=np.isin(np.arange(n), interrupted),
            action_mask=masks if masked else None,
        )
    return path


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_demonstration_round_trips_through_a_table_with_equal_bytes(tmp_path, suffix, masked):
    path = recorded(tmp_path / "a.demo", masked=masked)
    table = tmp_path / f"a{suffix}"
    fields, _ = table_of(read_demo(path))
    assert ("mask0" in fields) == masked
    write_table(fields, table)
    import_table(read_table(table), "B", SPEC, tmp_path / "b.demo")
    assert (tmp_path / "b.demo").read_bytes() == path.read_bytes()


def test_table_columns_of_equal_shapes_are_imported_in_the_right_order(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(2)] * 2, ActionSpec(2, (4, 4)))
    table = {
        "obs0": [[1, 2], [3, 4]],
        "obs1": [[5, 6], [7, 8]],
        "continuous": [[15, -0.5], [-30, 1]],
        "discrete": [[1, 2], [3, 0]],
        "terminated": [0, 1],
    }
    pd.DataFrame(table).to_parquet(tmp_path / "a.parquet")
    read = read_table(tmp_path / "a.parquet")
    import_table(read, "B", spec, tmp_path / "b.demo", action_scale=[30, 1])
    demo = read_demo(tmp_path / "b.demo")
    for i, values in enumerate(demo.obs):
        assert values[:2].tolist() == table[f"obs{i}"]
    assert demo.continuous[:2].tolist() == [[0.5, -0.5], [-1, 1]]
    assert demo.discrete[:2].tolist() == table["discrete"]


def test_action_branch_of_a_table_without_a_mask_column_forbids_no_action(tmp_path):
    path = recorded(tmp_path / "a.demo", done=(*[0] * 11, 1), interrupted=())
    fields, _ = table_of(read_demo(path))
    del fields["mask1"]
    write_table(fields, tmp_path / "a.parquet")
    import_table(read_table(tmp_path / "a.parquet"), "B", SPEC, tmp_path / "b.demo")
    masks, before = (read_demo(tmp_path / f"{name}.demo").action_mask for name in "ba")
    np.testing.assert_array_equal(masks[0], before[0])
    assert before[1].any()
    assert not masks[1].any()


def test_open_episode_at_the_end_of_a_table_is_closed_as_interrupted(tmp_path):
    path = recorded(tmp_path / "a.demo", done=(0, 1, 0, 0), interrupted=())
    fields, steps = table_of(read_demo(path))
    assert "ended by      1 terminated, 0 truncated, the last has not ended" in steps
    write_table(fields, tmp_path / "a.parquet")
    steps = import_table(read_table(tmp_path / "a.parquet"), "B", SPEC, tmp_path / "b.demo")
    assert "ended by      1 terminated, 1 the end of the table (as cut short)" in steps
    demo = read_demo(tmp_path / "b.demo")
    assert demo.done.tolist() == [False, True, False, False, True]
    assert demo.interrupted.tolist() == [False, False, False, False, True]
    original, reimported = (
        load_expert_rows([tmp_path / name], SPEC) for name in ("a.demo", "b.demo")
    )
    np.testing.assert_array_equal(original.continuous, reimported.continuous)
    assert original.done.tolist() == reimported.done.tolist()


PLAY = """\
x;y;key;points;over
1;0.5;2;1;no

2;0;0;3;yes
3;0;1;0.5;no
4;1;1;1;yes
"""
OWN = {"obs0": ["x", "y"], "discrete": ["key"], "reward": ["points"], "terminated": ["over"]}


def imported(tmp_path, text, *, spec=SMALL, columns=OWN, suffix=".csv", **options):
    path = tmp_path / f"play{suffix}"
    path.write_text(text, encoding="utf-8-sig")
    target = tmp_path / "play.demo"
    steps = import_table(read_table(path), "B?team=0", spec, target, columns=columns, **options)
    return read_demo(target), steps


def test_table_with_columns_named_by_the_user_is_imported_as_the_expected_demonstration(tmp_path):
    demo, steps = imported(tmp_path, PLAY)
    rows = load_expert_rows([tmp_path / "play.demo"], SMALL)
    assert rows.obs[0].tolist() == [[1, 0.5], [2, 0], [3, 0], [4, 1]]
    assert rows.discrete[:, 0].tolist() == [2, 0, 1, 1]
    assert rows.lengths.tolist() == [2, 2]
    assert rows.done.tolist() == [False, True, False, True]
    assert demo.behavior_name == "B"
    assert demo.returns() == [4, 1.5]
    assert demo.obs[0][2].tolist() == [2, 0], "the table has no last observation"
    assert steps == [
        f"read          {tmp_path}/play.csv: 4 rows, 2 episodes",
        "observation 0 state (2,): columns x, y, 0 to 4",
        "actions       discrete, column key: 0 to 2, branches of 3 choices; "
        "0 rows without an action",
        "rewards       column points: finite; returns 1.5 to 4, mean 2.75",
        "ended by      2 terminated",
        "last obs      0 in the table, 2 repeated",
        f"wrote         {tmp_path}/play.demo: 6 pairs, behavior B",
    ]


def test_episodes_of_a_table_may_be_identified_by_the_column_episode_alone(tmp_path):
    text = "obs0.0,obs0.1,discrete,episode\n1,1,0,a\n2,2,1,a\n3,3,2,b\n"
    demo, steps = imported(tmp_path, text, columns={})
    assert demo.done.tolist() == [False, False, True, False, True]
    assert demo.interrupted[demo.done].tolist() == [True, True]
    endings = "1 the next episode (as cut short), 1 the end of the table (as cut short)"
    assert f"ended by      {endings}" in steps
    assert any("no column reward: zeros" in step for step in steps)


def test_an_observation_of_size_0_needs_no_column(tmp_path):
    spec = BehaviorSpec([ObservationSpec.vector(0), ObservationSpec.vector(1)], ActionSpec(0, (2,)))
    demo, _ = imported(tmp_path, "obs1,discrete,truncated\n1,1,1\n", spec=spec, columns={})
    assert demo.obs[0].shape == (2, 0)


def write(path, image):
    """Write a Parquet file of one step with an image of bytes."""
    nested = pa.array(image.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8()))))
    pq.write_table(pa.table({"obs0": nested, "discrete": [1], "terminated": [True]}), path)


@pytest.mark.parametrize(("pixels", "divisor"), [([0, 51, 102, 255], 255), ([0, 1, 1, 0], 1)])
def test_image_bytes_are_divided_by_255_if_a_value_exceeds_1(tmp_path, pixels, divisor):
    spec = BehaviorSpec([ObservationSpec.visual(1, 2, 2)], ActionSpec(0, (2,)))
    image = np.array(pixels, dtype=np.uint8).reshape(1, 1, 2, 2)
    path = tmp_path / "a.parquet"
    write(path, image)
    steps = import_table(read_table(path), "B", spec, tmp_path / "a.demo")
    divided = any(step.endswith("0 to 1, bytes divided by 255") for step in steps)
    assert divided == (divisor == 255)
    seen = read_demo(tmp_path / "a.demo").obs[0][0].ravel()
    np.testing.assert_array_equal(seen, np.float32(pixels) / np.float32(divisor))
    write(path, image.reshape(1, 2, 2, 1))
    with pytest.raises(DemonstrationError, match=r"obs0 has the shape \(2, 2, 1\) in each row"):
        import_table(read_table(path), "B", spec, tmp_path / "b.demo")
    assert not (tmp_path / "b.demo").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("2;0;0", "2;north;0", "line 4, column y: 'north' is not a number; write 0.5"),
        ("2;0;0", "2;;0", "line 4, column y: nan is not a finite number"),
        ("2;0;0", "2;1e99;0", "line 4, column y: 1e+99 is not a finite number"),
        ("2;0;0", "2;0;3", "line 4, column key: 3 is not a choice; choices are 0 to 2"),
        ("2;0;0", "2;0;0.5", "line 4, column key: 0.5 is not a choice"),
        ("0;3;", "0;inf;", "line 4, column points: inf is not a finite reward"),
        ("0;3;", "0;1e99;", "line 4, column points: 1e+99 is not a finite reward"),
        ("3;yes", "3;perhaps", "line 4, column over: 'perhaps' is not a number"),
        ("3;yes", "3;2", "line 4, column over: 2 is neither 0 nor 1"),
        ("0.5;2;1;no", "0.5;;1;no", "line 2: has no action, but no episode ends here"),
        ("x;y;key", "x;z;key", "there is no column 'y'; the columns are x, z, key"),
        ("x;y;key", "x;x;key", "Duplicate names are not allowed"),
        ("2;0;0;3;yes", "2;0;0;3;yes;9", "cannot be read as CSV: "),
        (PLAY, "x;y;key;points;over\n", "play.csv: has no rows"),
        (PLAY, "", "play.csv: has no rows"),
    ],
)
def test_mistake_in_a_table_is_reported_with_row_and_column(tmp_path, old, new, told):
    assert old in PLAY
    message = refusal(DemonstrationError, imported, tmp_path, PLAY.replace(old, new, 1))
    assert told in message
    assert "play.csv" in message
    assert not (tmp_path / "play.demo").exists()


HYBRID = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, (2,)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0,2.5,1,0,1", "line 2, column continuous: the action 2.5 exceeds -1..1"),
        ("0,2.5,1,0,1", "by its largest absolute value: --action-scale 2.5"),
        (
            "0,,1,0,1",
            "line 2, column continuous: an action is missing (nan), but the row has other actions",
        ),
        ("0,1,,0,1", "line 2, column discrete: an action is missing (nan)"),
        ("0,,,0,1", "no row has an action to learn from"),
        ("0,1,1,1,1\n0,1,1,0,1", "line 3, column episode: episode 1 continues after its end"),
        ("0,1,1,0,1\n0,1,1,0,2\n0,1,1,0,1", "line 4, column episode: episode 1 comes again"),
        ("0,1,1,0,1\n0,1,1,0,", "line 3, column episode: nan is not usable as a name"),
    ],
)
def test_impossible_episodes_and_actions_are_refused(tmp_path, text, told):
    text = f"obs0,continuous,discrete,truncated,episode\n{text}\n"
    assert told in refusal(DemonstrationError, imported, tmp_path, text, spec=HYBRID, columns={})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"columns": {}}, "there is no column obs0 or obs0.0, which holds observation 0 state"),
        ({"columns": {**OWN, "obs0": ["x"]}}, "obs0 has 2 numbers, but x has 1"),
        ({"columns": {**OWN, "terminated": ["over", "x"]}}, "terminated has 1 numbers, but"),
        (
            {"columns": {**OWN, "episode": ["x", "y"]}},
            "episode must be one number or text in each row",
        ),
        ({"columns": {**OWN, "rewards": ["x"]}}, "has no field 'rewards'; did you mean 'reward'?"),
        (
            {"columns": {key: OWN[key] for key in ("obs0", "discrete")}},
            "there is no column terminated, truncated or episode, which says where episodes end",
        ),
        ({"spec": HYBRID, "columns": {"obs0": ["x"]}}, "there is no column continuous or"),
    ],
)
def test_columns_that_do_not_fit_the_behavior_are_refused(tmp_path, options, told):
    message = refusal(DemonstrationError, imported, tmp_path, PLAY, **options)
    assert told in message
    assert any(remedy in message for remedy in ("--column", "Its fields", "; name"))


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"obs0": [1, 2]\n', "line 1: Expecting"),
        ("[1]\n", "line 1: is not an object"),
        ('{"obs0": [1, 2]}\n\n{"obs0": [1]}\n', "line 3, column obs0: has the shape (1,)"),
        ('{"obs0": [1, "x"]}\n', "line 1, column obs0: [1, 'x'] is not a number"),
        (f'{{"obs0": [1, 1{"0" * 400}]}}\n', "line 1, column obs0: [1, 1000"),
        ('{"obs0": [1, 1], "discrete": 1, "episode": [1]}\n', "line 1, column episode: [1] is not"),
        ("[" * 100_000, "cannot be read as JSONL: "),
    ],
)
def test_mistake_in_a_json_lines_file_is_reported_with_the_line_number(tmp_path, lines, told):
    options = {"columns": {}, "suffix": ".jsonl"}
    assert told in refusal(DemonstrationError, imported, tmp_path, lines, **options)


def test_damaged_tables_and_unsupported_file_formats_are_refused(tmp_path):
    pd.DataFrame({"obs0": [1.0, 2.0]}).to_parquet(tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"no table", whole[:-30], whole[:40] + whole[70:]):
        (tmp_path / "b.parquet").write_bytes(content)
        with pytest.raises(DemonstrationError, match=r"b\.parquet: cannot be read as PARQUET"):
            read_table(tmp_path / "b.parquet")
    for use in (read_table, lambda path: write_table({}, path)):
        with pytest.raises(DemonstrationError, match=r"a\.xlsx: is not a table; name a file that"):
            use(tmp_path / "a.xlsx")
        with pytest.raises(DemonstrationError, match=r"a\.npz: NPZ is not read or written"):
            use(tmp_path / "a.npz")


def test_specification_file_round_trips_with_its_columns(tmp_path):
    goal = ObservationSpec.entities(4, 2, "list")._replace(observation_type=1)
    spec = BehaviorSpec([*SPEC.observation_specs, goal], SPEC.action_spec)
    path = tmp_path / "spec.yaml"
    path.write_text(dump_yaml(spec_file("B", spec)) + "columns: {obs0: [x, y, z], reward: r}\n")
    assert read_spec_file(path) == ("B", spec, {"obs0": ["x", "y", "z"], "reward": ["r"]})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("observations: []\nactions: {}\n", r"spec\.yaml:1: the key 'behavior' is required"),
        ("behavior: B\nobservation: []\nactions: {}\n", r"spec\.yaml:2: unknown key 'observation'"),
        (
            "behavior: B\nobservations: [{shape: [1, 2, 3, 4]}]\nactions: {}\n",
            r"observations\[0\]\.shape: needs 1 to 3 sizes",
        ),
        (
            "behavior: B\nobservations: []\nactions: {}\ncolumns: {reward: 3}\n",
            r"spec\.yaml:4: columns\.reward: needs the name of a column",
        ),
        ("behaviors: {A: {}}\n", r"spec\.yaml: is a trainer configuration; "),
    ],
)
def test_mistake_in_a_specification_file_is_reported_with_the_line_number(tmp_path, text, told):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=told):
        read_spec_file(path)


@pytest.mark.parametrize(
    ("teams", "behavior", "expected"),
    [
        (["B?team=0", "B?team=1"], None, "B"),
        (["B?team=0"], "C", "C"),
        (["B?team=0", "C?team=1"], "C", "C"),
    ],
)
def test_specification_of_a_demonstration_can_be_read_from_an_environment(
    teams, behavior, expected
):
    """Teams with the same name have one behavior, and `behavior` may give it another name."""
    closed = []
    env = SimpleNamespace(reset=lambda: None, close=lambda: closed.append(1))
    env.behavior_specs = {team: SMALL if team[0] == expected[0] else SPEC for team in teams}
    if len(teams) == 1:
        env.behavior_specs = {teams[0]: SMALL}
    assert spec_of("env", lambda _: env, behavior) == (expected, SMALL, {})
    assert closed


def test_behavior_must_be_named_if_an_environment_has_several_behaviors():
    specs = {"B?team=0": SMALL, "C": SPEC}
    env = SimpleNamespace(reset=lambda: None, close=lambda: None, behavior_specs=specs)
    with pytest.raises(DemonstrationError, match="has the behaviors B, C; name one of them"):
        spec_of("env", lambda _: env, None)
