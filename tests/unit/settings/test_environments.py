"""`environments.<name>` of params.yaml: one set of keys for each source."""

import importlib.util
import json

import pytest
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings.project.environments import (
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
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import plan, write_plan
from pipeline.settings.reader import to_map
from pipeline.settings.yaml_file import parse_yaml

DIGEST = "ab" * 32


def read(text: str) -> EnvironmentParams:
    node = parse_yaml(f"cart: {text}", source="params.yaml").value["cart"]
    return EnvironmentParams.from_node(node, "environments.cart")


def fetch(**changed: str) -> str:
    keys = {"source": "fetch", "url": "'https://x/g.zip'", "sha256": DIGEST} | changed
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"


FETCH = fetch()[:-1] + ", "


TAG = {"source": "pettingzoo", "id": "a.b_v1"}


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("{source: builtin, name: x}", BuiltinSource(source="builtin", name="x")),
        ("{source: path, path: a, args: [b]}", PathSource(path="a", args=("b",))),
        ("{source: gymnasium, id: x}", GymnasiumSource(source="gymnasium", id="x", copies=16)),
        (f"{TAG | {'teams': {'x': 1}}}", PettingzooSource(**TAG, copies=4, teams={"x": 1})),
    ],
)
def test_each_kind_of_environment_source_is_read_with_its_own_keys(text, meant):
    assert read(text) == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("balance_ball", BuiltinSource(source="builtin", name="balance_ball")),
        ("gymnasium:py:ALE/Pong-v5", GymnasiumSource(source="gymnasium", id="py:ALE/Pong-v5")),
        ("pettingzoo:a.b_v1", PettingzooSource(**TAG)),
        ("my.env:make", ModuleSource(source="module", id="my.env:make")),
        *((path, PathSource(path=path)) for path in ("./Game", "Game.x86_64", "C:\\Games\\Game")),
    ],
)
def test_environment_given_as_one_name_gets_its_source_from_the_form_of_the_name(name, meant):
    assert named(name) == meant
    assert read(f"'{name}'") == meant


def test_environment_name_is_a_path_if_an_executable_has_this_name() -> None:
    assert named("tag", is_file=lambda text: text == "tag") == PathSource(path="tag")
    assert named("my:env", is_file=lambda _: True) == PathSource(path="my:env")
    assert named("tag", is_file=lambda _: False) == BuiltinSource(source="builtin", name="tag")


def test_packed_options_of_a_third_party_environment_leave_out_default_values() -> None:
    plain = read("{source: gymnasium, id: Hopper-v5}")
    assert isinstance(plain, BridgeSource)
    assert plain.packed()[1] == {"id": "Hopper-v5", "n_agents": 16}
    options = {"kwargs": {"n": 3, "deep": {"x": [1.5, True]}}, "api": "aec", "teams": "index"}
    options |= {"groups": "all", "visual": "never", "action_scale": 2.0}
    full = read(json.dumps(TAG | options | {"copies": 2, "args": ["--x"]}))
    assert isinstance(full, BridgeSource)
    assert full.packed()[1] == {"id": "a.b_v1", "n_agents": 2} | options
    assert to_map(full)["kwargs"] == options["kwargs"]


# --- environments from outside ---------------------------------------------------------------


L, W = "https://x/l.zip", "https://x/w.zip"
BOTH = f"url: {{linux: '{L}', windows: '{W}'}}, sha256: {{linux: {DIGEST}, windows: {'cd' * 32}}}"


PLATFORMS = ("linux", "darwin", "windows")
TEXTS = (DIGEST, "1" * 64, "12e" + "3" * 61, "0" * 64)  # digests that look like numbers are text


@pytest.mark.parametrize(
    ("text", "archives"),
    [
        (f"url: '{L}', sha256: {DIGEST.upper()}", dict.fromkeys(PLATFORMS, (L, DIGEST))),
        *((f"url: '{L}', platform: linux, sha256: {n}", {"linux": (L, n)}) for n in TEXTS),
        (BOTH, {"linux": (L, DIGEST), "windows": (W, "cd" * 32)}),
    ],
)
def test_archive_with_a_platform_is_used_only_on_this_platform_and_other_archives_on_all(
    text, archives
):
    game = read(f"{{source: fetch, {text}, args: [--a]}}")
    assert (type(game), game.source, game.args) == (FetchSource, "fetch", ("--a",))
    found = {name: game.archive(name) for name in PLATFORMS}
    assert {name: archive for name, archive in found.items() if archive} == archives
    if "platform" in text:
        assert game.platforms() == ("linux",)


def test_dependency_path_of_an_environment_module_is_the_path_that_python_imports(
    tmp_path, monkeypatch
):
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


def test_environment_path_without_a_suffix_finds_the_executable_with_a_platform_suffix(tmp_path):
    builds = {"linux": "linux.x86_64", "windows": "windows.exe", "mac": "mac.app", "plain": "plain"}
    for name in ("linux.x86_64", "windows.exe", "plain", "plain.x86_64"):
        (tmp_path / name).touch()
    (tmp_path / "mac.app").mkdir()
    builds |= {name: name for name in ("linux.x86_64", "missing")}
    assert {name: PathSource(path=name).found(tmp_path) for name in builds} == builds


def test_missing_executable_outside_of_the_project_is_refused(tmp_path):
    """Regression: the plan was written, and Snakemake then failed with MissingInputException."""
    (tmp_path / "game").mkdir()
    file = tmp_path / "project/params.yaml"
    file.parent.mkdir()
    table = file.with_name("runs.yaml")
    for path, hint in {
        "../gmae": "../gmae does not exist; did you mean '../game'?",
        f"{tmp_path}/Other.app": "/Other.app does not exist; name the program, or its folder",
    }.items():
        file.write_text(f"environments:\n  a: {{source: path, path: {path}}}\n")
        assert f"{file}:2: environments.a.path: {path}" in (
            message := refusal(SettingsError, write_plan, load_params(file), table)
        )
        assert message.endswith(hint)
    for path in ("../game", "made/by/a/stage"):
        file.write_text(f"environments: {{a: {{source: path, path: {path}}}}}")
        write_plan(load_params(file), table)


def test_plan_lists_the_files_that_each_environment_is_made_from(tmp_path):
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
