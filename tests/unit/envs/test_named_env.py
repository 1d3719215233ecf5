"""Environments by name: the meaning of each name, and builds that are made once and kept."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline import api
from pipeline.envs import named_env
from pipeline.envs.named_env import CACHE, environment_of, executable_of, in_folder
from pipeline.envs.sources import fetch
from pipeline.errors import SettingsError, StageError, UnityEnvironmentException
from pipeline.settings.project.environments import BuiltinSource, PathSource
from pipeline.simulators import pack
from pipeline.simulators.pack import Needs

WAIT_S = 30
NAME = "my_env:make"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "locks"))
    return tmp_path


@pytest.fixture
def packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace packing by a copy of my_env.py; gives the text of each build, in order."""
    source = folder / "my_env.py"
    source.write_text("1")
    built: list[str] = []

    def pack_with(_needs: Needs, simulator: str, target: Path, options: dict) -> Path:
        built.append(source.read_text())
        target.parent.mkdir(parents=True)
        target.write_text(built[-1])
        return target

    module_needs = Needs(distributions=("numpy",), files={"my_env.py": source})
    monkeypatch.setattr(pack, "needs_of", lambda *_: module_needs)
    monkeypatch.setattr(pack, "pack_with", pack_with)
    return built


def test_environment_name_means_an_existing_executable_or_else_a_simulator(folder: Path):
    assert environment_of("tag") == BuiltinSource(source="builtin", name="tag")
    (folder / "tag").mkdir()
    assert environment_of("tag") == BuiltinSource(source="builtin", name="tag")
    (folder / "tag.x86_64").touch()
    assert environment_of("tag") == PathSource(path="tag")
    assert executable_of("tag") == folder / "tag.x86_64"


@pytest.mark.parametrize("name", ["builds", "./builds/", "../{here}/builds"])
def test_folder_given_as_environment_means_its_only_executable_which_the_log_names(
    name, folder: Path, caplog
):
    caplog.set_level(logging.INFO)
    name = name.format(here=folder.name)
    program = folder / "builds/Game.x86_64"
    (folder / "builds/Game_Data").mkdir(parents=True)
    program.touch()
    assert environment_of(name) == PathSource(path=name)
    assert executable_of(name).samefile(program)
    assert in_folder(name).samefile(in_folder(Path(name)))
    assert caplog.messages == [
        f"{given}: using the executable in this folder, builds/Game.x86_64."
        for given in (name, name, Path(name))
    ]
    (folder / "params.yaml").write_text("environments: {game: {source: path, path: builds}}")
    assert Path(api._path_of("game")).samefile(program)
    (folder / "builds/Other.x86_64").touch()
    with pytest.raises(UnityEnvironmentException, match=r"folder has .*; name one of them"):
        executable_of(name)
    assert in_folder("tag") == "tag"
    assert in_folder(program) == program


PARAMS = """
environments:
  mine: {source: module, id: "my_env:make", copies: 3, args: [--log, x]}
  tag: {source: gymnasium, id: CartPole-v1, kwargs: {a: 1}}
  grid_world: {source: builtin}
  other: {source: builtin, name: grid_world}
  game: {source: path, path: ./Game.x86_64}
  wrong: {source: module}
  far: {source: fetch, url: "https://example.org/a.zip", sha256: "%064d"}
unknown: 1
"""


def test_environment_in_params_yaml_has_precedence_over_a_simulator_of_the_same_name(
    folder: Path, caplog
):
    caplog.set_level(logging.INFO)
    (folder / "params.yaml").write_text(PARAMS % 0)
    assert environment_of("mine").packed() == ("module", {"id": "my_env:make", "n_agents": 3})
    assert (
        "Only stages use the args of params.yaml; here give them: --env-args --log x" in caplog.text
    )
    gymnasium = {"id": "CartPole-v1", "n_agents": 16, "kwargs": {"a": 1}}
    assert environment_of("tag").packed() == ("gymnasium", gymnasium)
    for name in ("grid_world", "other"):
        assert environment_of(name) == BuiltinSource(source="builtin", name="grid_world")
    assert environment_of("hallway") == BuiltinSource(source="builtin", name="hallway")
    with pytest.raises(UnityEnvironmentException, match=r"Looked for \./Game\.x86_64"):
        environment_of("game")
    (folder / "Game.x86_64").touch()
    assert executable_of("game") == folder / "Game.x86_64"
    (folder / "mine").touch(mode=0o755)
    assert environment_of("mine") == PathSource(path="mine")
    with pytest.raises(SettingsError, match=r"params.yaml:8: environments.wrong"):
        environment_of("wrong")
    with pytest.raises(UnityEnvironmentException, match="far: build/env/far does not exist"):
        environment_of("far")


@pytest.mark.parametrize("text", ["a: [", "environments: 3", "- 1", ""])
def test_params_yaml_of_another_program_has_no_effect(folder: Path, text):
    (folder / "params.yaml").write_text(text)
    assert environment_of("tag") == BuiltinSource(source="builtin", name="tag")


def test_an_environment_of_params_yaml_is_built_again_when_its_options_change(folder, packed):
    for copies, builds in ((2, 1), (2, 1), (3, 2), (2, 2)):
        text = f"environments: {{mine: {{source: module, id: '{NAME}', copies: {copies}}}}}"
        (folder / "params.yaml").write_text(text)
        executable_of("mine")
        assert len(packed) == builds


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CartPole-v1", r"[Aa] registered environment of Gymnasium.*`gymnasium:CartPole-v1`\."),
        ("balnce_ball", r"No simulator has this name \(did you mean 'balance_ball'\?\)\. Give a p"),
        ("Game", r"No simulator has this name\. Give a path \(\./Game\), a simulator"),
        (
            "build/tag",
            "`pipeline env build tag -o build/tag` builds the executable; or give the name tag",
        ),
        (
            "build/game",
            r"`pipeline env build NAME -o build/game` builds an executable of a simulator\. Or",
        ),
    ],
)
def test_a_missing_executable_is_reported_with_its_build_command(name, said):
    with pytest.raises(UnityEnvironmentException, match=said) as refused:
        environment_of(name)
    assert str(refused.value).startswith("Couldn't launch the ")
    assert "\n" not in str(refused.value)


def test_error_for_a_module_file_as_environment_shows_the_form_module_colon_function(folder):
    (folder / "line.py").write_text("def make(): ...")
    with pytest.raises(UnityEnvironmentException, match=r"^line\.py: is a module.* line:make\.$"):
        environment_of("line.py")
    (folder / "line.py").chmod(0o755)
    assert environment_of("line.py") == PathSource(path="line.py")


def test_environment_is_built_once_and_again_when_the_source_of_its_module_changes(
    folder, packed, caplog
):
    caplog.set_level(logging.INFO)
    first = executable_of(NAME)
    assert first.read_text() == "1"
    assert first.is_relative_to(CACHE)
    assert "my_env:make: building into build/cache/my_env-make-" in caplog.text
    caplog.clear()
    assert executable_of(NAME) == first
    assert [record.getMessage() for record in caplog.records] == [
        f"my_env:make: using the build {first}."
    ]
    (folder / "my_env.py").write_text("2")
    second = executable_of(NAME)
    assert (second.read_text(), first.read_text()) == ("2", "1"), "a run may still start the first"
    assert packed == ["1", "2"]


@pytest.mark.parametrize("gone", ["build", "inputs", "distribution", "executable"])
def test_environment_is_built_again_if_its_build_is_incomplete_or_outdated(
    folder, packed, monkeypatch, gone
):
    first = executable_of(NAME)
    inputs = first.parents[1] / "inputs.json"
    if gone == "build":
        first.unlink()
    elif gone == "inputs":
        inputs.write_text(inputs.read_text()[:40])
    elif gone == "distribution":
        inputs.write_text(inputs.read_text().replace('"numpy"', '"no-such-package"'))
    else:
        monkeypatch.setattr(pack, "_package_files", lambda: [("lib/pipeline/new.py", b"")])
    assert executable_of(NAME).read_text() == "1"
    assert packed == ["1", "1"]
    executable_of(NAME)
    assert packed == ["1", "1"]


def test_failed_build_of_an_environment_leaves_no_files(packed, monkeypatch):
    original = pack.pack_with

    def half(needs, simulator, target, options):
        original(needs, simulator, target, options)
        raise StageError("the disk is full")

    monkeypatch.setattr(pack, "pack_with", half)
    with pytest.raises(StageError, match="the disk is full"):
        executable_of(NAME)
    assert [path for path in CACHE.rglob("*") if path.is_file()] == []
    monkeypatch.setattr(pack, "pack_with", original)
    executable_of(NAME)
    assert packed == ["1", "1"]


def test_only_the_latest_builds_of_an_environment_are_kept(folder, packed):
    for version in range(6):
        (folder / "my_env.py").write_text(str(version))
        last = executable_of(NAME)
    builds = [path for path in last.parents[1].iterdir() if path.is_dir()]
    assert len(builds) == named_env._KEPT
    assert last.parent in builds
    assert len(packed) == 6


def test_two_threads_that_start_an_environment_at_once_make_only_one_build(packed, monkeypatch):
    waiting = threading.Event()
    original = pack.pack_with

    def note(text, *_):
        if text.startswith("Waiting for another process"):
            waiting.set()

    def slow(*arguments):
        assert waiting.wait(WAIT_S)
        return original(*arguments)

    monkeypatch.setattr(pack, "pack_with", slow)
    monkeypatch.setattr(fetch._log, "info", note)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(executable_of, [NAME, NAME])
    assert first == second
    assert packed == ["1"]
