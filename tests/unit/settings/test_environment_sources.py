"""`environments.<name>` of params.yaml: one set of keys for each source."""

from __future__ import annotations

import pytest

from pipeline.errors import SettingsError
from pipeline.settings.external_sources import PathSource
from pipeline.settings.reader import to_map
from pipeline.settings.source import EnvironmentParams
from pipeline.settings.sources import (
    BridgeSource,
    BuiltinSource,
    GymnasiumSource,
    PettingzooSource,
)
from pipeline.settings.yaml_file import parse_yaml


def read(text: str) -> EnvironmentParams:
    node = parse_yaml(f"cart: {text}", source="params.yaml").value["cart"]
    return EnvironmentParams.from_node(node, "environments.cart")


def test_each_source_has_keys_of_its_own() -> None:
    assert read("{source: builtin, name: x}") == BuiltinSource(source="builtin", name="x")
    assert read("{source: path, path: a, args: [b]}") == PathSource(
        source="path", path="a", args=("b",)
    )
    assert read("{source: gymnasium, id: CartPole-v1}") == GymnasiumSource(
        source="gymnasium", id="CartPole-v1", copies=16
    )
    assert read("{source: pettingzoo, id: a.b_v1, teams: {x_0: 1}}") == PettingzooSource(
        source="pettingzoo", id="a.b_v1", copies=4, teams={"x_0": 1}
    )


def test_a_bridge_is_told_what_was_written_and_no_defaults() -> None:
    plain = read("{source: gymnasium, id: Hopper-v5}")
    assert isinstance(plain, BridgeSource)
    assert plain.options() == {"id": "Hopper-v5", "n_agents": 16}
    full = read(
        "{source: pettingzoo, id: a.b_v1, copies: 2, kwargs: {n: 3, deep: {x: [1.5, true]}},"
        " api: aec, teams: index, groups: all, visual: never, action_scale: 2, args: [--x]}"
    )
    assert isinstance(full, BridgeSource)
    assert full.options() == {
        "id": "a.b_v1",
        "n_agents": 2,
        "kwargs": {"n": 3, "deep": {"x": [1.5, True]}},
        "api": "aec",
        "teams": "index",
        "groups": "all",
        "visual": "never",
        "action_scale": 2.0,
    }
    assert to_map(full)["kwargs"] == {"n": 3, "deep": {"x": [1.5, True]}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{id: x}", "environments.cart: the key 'source' is required"),
        ("{source: gymnasum, id: x}", "source: 'gymnasum' is not allowed; did you mean 'gymnasi"),
        ("{source: gymnasium}", "environments.cart: the key 'id' is required"),
        ("{source: gymnasium, id: [x]}", "environments.cart.id: needs text, got ['x']"),
        ("{source: gymnasium, id: x, copies: 0}", "cart.copies: must be at least 1, got 0"),
        ("{source: gymnasium, id: x, kwargs: 3}", "cart.kwargs: needs a map of keys to values"),
        (
            "{source: gymnasium, id: x, kwargs: {render_mode: human}}",
            "environments.cart.kwargs.render_mode: cannot be set",
        ),
        (
            "{source: gymnasium, id: x, kwargs: {a: {b: [.inf]}}}",
            "environments.cart.kwargs.a.b: must be finite, got inf",
        ),
        (
            "{source: gymnasium, id: x, teams: index}",
            "environments.cart.teams: belongs to the source 'pettingzoo', but the source is 'gy",
        ),
        (
            "{source: builtin, id: x}",
            "environments.cart.id: belongs to the source 'gymnasium' and 'pettingzoo', but the",
        ),
        ("{source: gymnasium, id: x, copis: 2}", "'copis' (value 2); did you mean 'copies'?"),
        ("{source: gymnasium, id: x, visual: yess}", "cart.visual: 'yess' is not allowed"),
        ("{source: gymnasium, id: x, action_scale: 0}", "action_scale: must be greater than 0"),
        ("{source: pettingzoo, id: x, teams: two}", "cart.teams: must be none, index, or a map"),
        ("{source: pettingzoo, id: x, teams: {a: -1}}", "cart.teams: must be none, index"),
        ("{source: pettingzoo, id: x, api: both}", "cart.api: 'both' is not allowed"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(text)
    assert said in str(refused.value)
    assert str(refused.value).startswith("params.yaml:1: environments.cart")
