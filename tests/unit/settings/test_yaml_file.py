"""The YAML reader: numbers of YAML 1.2, nothing but data, and a place for every error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings import dump_yaml, parse_yaml, read_yaml, yaml_file
from pipeline.settings.nodes import find, to_plain

if TYPE_CHECKING:
    from pathlib import Path


def value_of(text: str) -> Any:
    return to_plain(parse_yaml(text, source="x.yaml"))


FLOATS = "1e-05 3e-4 3.0e-4 5.0e5 1e4 1.0e+4 1E6 .5 5. -2.5"
TEXTS = "1_000 1:30 0b11 on off yes No y 2020-01-01 = . 1.2.3 e5"
OTHERS = {"+7": 7, "010": 10, "-0": 0, "0o17": 15, "0x1F": 31, "null": None, "~": None, "": None}
OTHERS |= {".inf": math.inf, "-.INF": -math.inf, ".nan": math.nan, "\n-": [None]}
OTHERS |= {"true": True, "True": True, "FALSE": False, "'1e4'": "1e4", '"true"': "true"}
SCALARS = {text: float(text) for text in FLOATS.split()} | {text: text for text in TEXTS.split()}


@pytest.mark.parametrize(("text", "value"), (SCALARS | OTHERS).items())
def test_yaml_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = value_of(f"key: {text}")["key"]
    assert parsed == value or (math.isnan(parsed) and math.isnan(value))
    assert type(parsed) is type(value)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "\ufeff"])
def test_yaml_file_without_content_is_read_as_an_empty_map(text: str, tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(text, encoding="utf-8")
    assert to_plain(read_yaml(file)) == {}


def test_yaml_anchors_and_merge_keys_are_expanded() -> None:
    text = """
base: &base {a: 1, b: 2}
more: &more {b: 3, c: 4}
one: {<<: *base, b: 5}
two:
  <<: [*more, *base]
  d: 6
again: *base
"""
    parsed = value_of(text)
    assert parsed["one"] == {"a": 1, "b": 5}
    assert parsed["two"] == {"a": 1, "b": 3, "c": 4, "d": 6}
    assert parsed["again"] == {"a": 1, "b": 2}


def test_every_yaml_key_and_list_item_keeps_its_line_number() -> None:
    text = "a:\n  b: 1\n\n  c:\n    - x\n    - y: 2\n"
    root = parse_yaml(text, source="x.yaml")
    assert (find(root, "a").line, find(root, "a.b").line, find(root, "a.c").line) == (1, 2, 4)
    items = find(root, "a.c").value
    assert [item.line for item in items] == [5, 6]
    assert items[1].value["y"].where == "x.yaml:6"


def test_yaml_keys_are_read_as_text_in_their_original_spelling() -> None:
    assert value_of("3: a\n007: b\ntrue: c\n") == {"3": "a", "007": "b", "true": "c"}


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3:", "the key 'a' is written twice, first in line 1"),
        ("o:\n  p: {q: 1, q: 1}\n", "x.yaml:2:", "'q' is written twice"),
        ("x: &x {a: 1}\ny:\n  <<: *x\n  <<: *x\n", "x.yaml:4:", "'<<' is written twice"),
        ("a: !!python/object/apply:os.getcwd []\n", "x.yaml:1:", "tag"),
        ("a: 1\nb: !!str 5\n", "x.yaml:2:", "tag"),
        ("a: !mine {b: 1}\n", "x.yaml:1:", "tag"),
        ("! a: 1\n", "x.yaml:1:", "tag"),
        ("a: [1, 2\nb: 3\n", "x.yaml:1:", "not closed"),
        ("a: 1\n\tb: 2\n", "x.yaml:2:", "YAML"),
        ("a: b: c\n", "x.yaml:1:", "YAML"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:", "document"),
        ("a: *missing\n", "x.yaml:1:", "missing"),
        ("a: &a [*a]\n", "x.yaml:1:", "alias"),
        ("[1, 2]: 3\n", "x.yaml:1:", "key must be text"),
        ("x:\n  <<: 5\n", "x.yaml:2:", "merge key"),
        (f"a: {' ' * 4_000_000}1\n", "x.yaml:", "more than the maximum of 4000000 for settings"),
        ("a: ok\nb: \x07\n", "x.yaml:2:", "U+0007"),
        ('a: ok\nb: "\\0"\n', "x.yaml:2:", "U+0000"),
        ('a: ok\n"\\ud800": 3\n', "x.yaml:2:", "U+D800"),
        (f"a: {'9' * 5000}\n", "x.yaml:1:", "too many digits"),
        (f"a: 0x{'f' * 4000}\n", "x.yaml:1:", "too many digits"),
        (f"a: [1, 0o{'7' * 5000}]\n", "x.yaml:1:", "too many digits"),
    ],
)
def test_error_for_yaml_text_that_is_invalid_or_not_plain_data_names_the_line(text, where, words):
    message = refusal(SettingsError, parse_yaml, text, source="x.yaml")
    assert message.startswith(where)
    assert words in message


def test_yaml_bomb_and_deep_nesting_are_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 9)]
    for text, said in {
        "\n".join(lines): "more than 50000 values",
        "[" * 20000 + "]" * 20000: "nested too deeply",
    }.items():
        assert said in refusal(SettingsError, parse_yaml, text, source="x.yaml")


def test_missing_settings_file_is_reported_with_its_absolute_path(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    remedy = "`pipeline init DIR` writes a project with one."
    message = f"Config file could not be found at {path}. {remedy}"
    assert refusal(SettingsError, read_yaml, path) == message
    (tmp_path / "ppo").mkdir()
    message = f"Config file could not be found at {path}; {tmp_path} has ppo/. {remedy}"
    assert refusal(SettingsError, read_yaml, path) == message
    said = refusal(SettingsError, read_yaml, path, what="Parameter file")
    assert said == f"Parameter file could not be found at {path}. {remedy}"


def test_unreadable_settings_file_is_reported_with_the_reason(tmp_path):
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo/3DBall.yaml").write_bytes("a: 1\nb: café\n".encode("latin-1"))
    for name, said in {
        "3DBal.yaml": f"3DBal.yaml; did you mean '{tmp_path}/ppo/3DBall.yaml'?",
        "ppo": "cannot be read: Is a directory",
        "ppo/3DBall.yaml": f"{tmp_path}/ppo/3DBall.yaml:2: Config file is not UTF-8 (byte 0xe9)",
    }.items():
        assert said in refusal(SettingsError, read_yaml, tmp_path / name)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
    | st.sampled_from(["1e4", "yes", "010", "null", "~", "<<", "=", "1_000", "2020-01-01", ""])
)
VALUES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
    st.recursive(
        PLAIN,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text("abc01~.", max_size=5), inner)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@given(VALUES)
def test_value_that_is_written_as_yaml_is_read_back_as_an_equal_value(value: Any) -> None:
    text = dump_yaml(value)
    assert value_of(text) == value
    assert dump_yaml(value_of(text)) == text


@given(st.dictionaries(st.text("abc", min_size=1), PLAIN, max_size=4))
def test_value_that_is_written_as_yaml_is_read_as_an_equal_value_by_a_yaml_1_1_reader(value):
    assert yaml.safe_load(dump_yaml(value)) == value


def test_yaml_reader_stops_at_the_value_limit_before_it_reads_the_rest_of_the_text(monkeypatch):
    monkeypatch.setattr(yaml_file, "_MOST_VALUES", 100)
    with pytest.raises(SettingsError, match=r"x\.yaml:100: .* more than 100 values"):
        parse_yaml("- 1\n" * 99 + "- [1, 2}", source="x.yaml")  # the invalid end is never read


def test_written_yaml_keeps_the_order_of_keys_and_has_block_style() -> None:
    shared = [1, 2]
    text = dump_yaml({"b": shared, "a": {"z": (1.0, "x"), "y": shared}, "e": {}})
    assert text == "b:\n- 1\n- 2\na:\n  z:\n  - 1.0\n  - x\n  y:\n  - 1\n  - 2\ne: {}\n"
