"""`environments.<name>` of params.yaml: one set of keys for each source."""

from __future__ import annotations

import importlib.util

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings.environments import (
    BridgeSource,
    BuiltinSource,
    EnvironmentParams,
    FetchSource,
    GymnasiumSource,
    ModuleSource,
    PathSource,
    PettingzooSource,
    UnitySource,
    named,
)
from pipeline.settings.params import load_params
from pipeline.settings.plan import plan
from pipeline.settings.reader import to_map
from pipeline.settings.yaml_file import parse_yaml

DIGEST = "ab" * 32


def read(text: str) -> EnvironmentParams:
    node = parse_yaml(f"cart: {text}", source="params.yaml").value["cart"]
    return EnvironmentParams.from_node(node, "environments.cart")


def _fetch(**changed: str) -> str:
    keys = {"source": "fetch", "url": "'https://x/g.zip'", "sha256": DIGEST} | changed
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"


FETCH = _fetch()[:-1] + ", "


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("balance_ball", BuiltinSource(source="builtin", name="balance_ball")),
        (
            "gymnasium:ale_py:ALE/Pong-v5",
            GymnasiumSource(source="gymnasium", id="ale_py:ALE/Pong-v5"),
        ),
        (
            "pettingzoo:mpe2.simple_tag_v3",
            PettingzooSource(source="pettingzoo", id="mpe2.simple_tag_v3"),
        ),
        ("my.env:make", ModuleSource(source="module", id="my.env:make")),
        ("./Game", PathSource(path="./Game")),
        ("Game.x86_64", PathSource(path="Game.x86_64")),
        ("C:\\Games\\Game", PathSource(path="C:\\Games\\Game")),
    ],
)
def test_a_name_alone_is_one_of_the_sources(name: str, meant: EnvironmentParams) -> None:
    assert named(name) == meant
    assert read(f"'{name}'") == meant


def test_a_word_is_the_file_that_lies_under_it_where_files_are_asked_for() -> None:
    assert named("tag", is_file=lambda text: text == "tag") == PathSource(path="tag")
    assert named("my:env", is_file=lambda _: True) == PathSource(path="my:env")
    assert named("tag", is_file=lambda _: False) == BuiltinSource(source="builtin", name="tag")


def test_a_bridge_is_told_what_was_written_and_no_defaults() -> None:
    plain = read("{source: gymnasium, id: Hopper-v5}")
    assert isinstance(plain, BridgeSource)
    assert plain.packed()[1] == {"id": "Hopper-v5", "n_agents": 16}
    full = read(
        "{source: pettingzoo, id: a.b_v1, copies: 2, kwargs: {n: 3, deep: {x: [1.5, true]}},"
        " api: aec, teams: index, groups: all, visual: never, action_scale: 2, args: [--x]}"
    )
    assert isinstance(full, BridgeSource)
    assert full.packed()[1] == {
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
            "environments.cart.teams: belongs to the source 'pettingzoo' and 'module', but the",
        ),
        (
            "{source: builtin, id: x}",
            "cart.id: belongs to the source 'gymnasium' and 'pettingzoo' and 'module', but the",
        ),
        ("{source: gymnasium, id: x, copis: 2}", "'copis' (value 2); did you mean 'copies'?"),
        ("{source: gymnasium, id: x, visual: yess}", "cart.visual: 'yess' is not allowed"),
        ("{source: gymnasium, id: x, action_scale: 0}", "action_scale: must be greater than 0"),
        ("{source: pettingzoo, id: x, teams: two}", "cart.teams: must be none, index, or a map"),
        ("{source: pettingzoo, id: x, teams: {a: -1}}", "cart.teams: must be none, index"),
        ("{source: pettingzoo, id: x, api: both}", "cart.api: 'both' is not allowed"),
        ("{source: module, id: my_env}", "cart.id: needs the form module:function, got 'my_env'"),
        ("'gymnasium:'", "environments.cart: gymnasium: needs an id, as in gymnasium:CartPole-v1"),
        ("https://x.org/game.zip", "`pipeline env fetch` downloads the archive"),
        ("gym:CartPole-v1", "cart: 'gym:CartPole-v1' names no environment; did you mean 'gymnas"),
        ("my-env:make", "'my-env:make' names no environment. Give a path (./Game), a simulator"),
        (
            "{source: fetch, url: 'https://x/g.zip'}",
            "cart.sha256: the source 'fetch' needs the archive's digest; `pipeline env fetch https:"
            "//x/g.zip` finds it out",
        ),
        (f"{{source: fetch, sha256: {DIGEST}}}", "url: the source 'fetch' needs to know where"),
        (_fetch(url="'http://['"), "url: must start with one of https, http, file, got"),
        (_fetch(url="'ftp://x/g.zip'"), "url: must start with one of https, http, file, got"),
        (_fetch(sha256="abc"), "cart.sha256: needs 64 hex digits, got 'abc'"),
        (_fetch(url="{linus: x}"), "cart.url: 'linus' is not allowed; did you mean 'linux'?"),
        (_fetch(url="{linux: 'https://x'}"), "cart.sha256: needs the same platforms as 'url' (l"),
        (_fetch(url="[a]"), "cart.url: needs text, got ['a']"),
        (_fetch(url="{linux: []}"), "cart.url.linux: needs text, got []"),
        (FETCH + "platform: amiga}", "cart.platform: 'amiga' is not allowed. Allowed: linux, da"),
        (
            _fetch(url="{linux: 'file:///x'}", sha256=f"{{linux: {DIGEST}}}", platform="linux"),
            "cart.platform: is said by the keys of 'url' already",
        ),
        (FETCH + "executable: ../x}", "executable: must lie inside the archive, got '../x'"),
        (FETCH + "max_ratio: 9}", "cart.max_ratio: was removed; max_unpacked_gb limits what an"),
        (FETCH + "path: x}", "cart.path: belongs to the source 'path', but the source is 'fetch'"),
        (FETCH + "name: x}", "cart.name: belongs to the source 'builtin', but the source is 'fe"),
        (FETCH + "urls: x}", "cart: unknown key 'urls' (value 'x'); did you mean 'url'?"),
        ("{source: builtin, project: x}", "cart.project: belongs to the source 'unity', but"),
        ("{source: unity}", "project: the source 'unity' needs to know where the Unity project is"),
        (
            "{source: unity, project: p, method: Build}",
            "cart.method: needs 'Class.Method' of a script in Assets/Editor, got 'Build'",
        ),
        ("{source: path}", "cart.path: the source 'path' needs to know where the build is"),
        (
            "{source: editor}",
            "cart.source: 'editor' waits until someone presses Play, so nothing that came of it "
            "could be made again; train with `pipeline learn` without --env",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, said: str) -> None:
    message = refusal(SettingsError, read, text)
    assert said in message
    assert message.startswith("params.yaml:1: environments.cart")


# --- environments from outside ---------------------------------------------------------------


def test_one_archive_for_all_platforms_is_read() -> None:
    game = read(f"{{source: fetch, url: 'https://x/g.zip', sha256: {DIGEST.upper()}, args: [--a]}}")
    assert game.source == "fetch"
    assert game.args == ("--a",)
    assert isinstance(game, FetchSource)
    for platform in ("linux", "darwin", "windows"):
        assert game.archive(platform) == ("https://x/g.zip", DIGEST)


@pytest.mark.parametrize("number", ["1" * 64, "12e" + "3" * 61, "0" * 64])
def test_a_digest_that_looks_like_a_number_is_text(number: str) -> None:
    game = read(f"{{source: fetch, url: 'https://x/g.zip', sha256: {number}}}")
    assert isinstance(game, FetchSource)
    assert game.archive("linux") == ("https://x/g.zip", number)


def test_an_archive_for_one_platform_is_for_no_other() -> None:
    game = read(FETCH + "platform: linux}")
    assert isinstance(game, FetchSource)
    assert game.archive("linux")
    assert game.archive("darwin") is None
    assert game.platforms() == ("linux",)


def test_archives_for_several_platforms_are_read() -> None:
    game = read(
        "{source: fetch, url: {linux: 'https://x/l.zip', windows: 'https://x/w.zip'},"
        f" sha256: {{linux: {DIGEST}, windows: {'cd' * 32}}}, executable: game/Game.x86_64}}"
    )
    assert isinstance(game, FetchSource)
    assert game.archive("windows") == ("https://x/w.zip", "cd" * 32)
    assert game.archive("darwin") is None


def test_the_module_that_is_watched_is_the_one_that_python_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for folder in ("regular_one", "namespace_one", "only_folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "regular_one/__init__.py").touch()
    for name in ("regular_one", "namespace_one", "only_file"):
        (tmp_path / f"{name}.py").touch()
    for name in ("regular_one", "namespace_one", "only_folder", "only_file"):
        spec = importlib.util.find_spec(name)
        origin = spec.origin or spec.submodule_search_locations[0]
        watched = ModuleSource(source="module", id=f"{name}:make").found(tmp_path)
        assert str(tmp_path / watched) == origin.removesuffix("/__init__.py")
    assert ModuleSource(source="module", id="missing:make").found(tmp_path) is None


def test_a_path_without_suffix_means_the_build_that_is_there(tmp_path):
    for name in ("linux.x86_64", "windows.exe", "plain", "plain.x86_64"):
        (tmp_path / name).touch()
    (tmp_path / "mac.app").mkdir()
    builds = {
        name: PathSource(path=name).found(tmp_path)
        for name in ("linux", "windows", "mac", "plain", "linux.x86_64", "missing")
    }
    assert builds == {
        "linux": "linux.x86_64",
        "windows": "windows.exe",
        "mac": "mac.app",
        "plain": "plain",
        "linux.x86_64": "linux.x86_64",
        "missing": "missing",
    }


def test_the_plan_says_what_a_build_depends_on(tmp_path):
    file = tmp_path / "params.yaml"
    (tmp_path / "game.x86_64").touch()
    file.write_text(
        "environments:\n"
        "  fetched: {source: fetch, url: 'https://x/g.zip', sha256: " + DIGEST + "}\n"
        "  there: {source: path, path: game}\n"
        "  project: {source: unity, project: ../My Game/}\n"
        "  own: {source: module, id: 'my_env:make'}\n"
        "  packed: my_package.envs:make\n"
        "  installed: json.tool:main\n"
    )
    (tmp_path / "my_env.py").touch()
    (tmp_path / "my_package").mkdir()
    tables = plan(load_params(file))["runs"]
    installed = {"source": "module"}
    assert tables["environments"] == {"fetched": {"source": "fetch"}, "installed": installed}
    assert tables["path_environments"] == {
        "there": {"source": "path", "path": "game.x86_64"},
        "own": {"source": "module", "path": "my_env.py"},
        "packed": {"source": "module", "path": "my_package"},
    }
    assert tables["unity_environments"] == {
        "project": {
            "source": "unity",
            "assets": "../My Game/Assets",
            "packages": "../My Game/Packages",
            "settings": "../My Game/ProjectSettings",
        }
    }
    assert isinstance(load_params(file).environments["project"], UnitySource)
