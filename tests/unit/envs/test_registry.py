import json
from pathlib import Path

import pytest
from fake_player import START
from loopback import Site
from made_archives import digest, zipped

from pipeline.envs.registry import RemoteRegistryEntry, UnityEnvRegistry
from pipeline.envs.sources import executables
from pipeline.errors import FetchError, SettingsError

PLAYER = f'#!/bin/sh\necho "$@" > "$0.args"\n{START} --quiet "$@"\n'.encode()
BUILD = zipped({"Game/Game.x86_64": PLAYER, "Game/UnityCrashHandler64.exe": b"MZ"})


@pytest.fixture(autouse=True)
def on_linux(private_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables.sys, "platform", "linux")


@pytest.fixture
def web(web: Site) -> Site:
    web.add("game.zip", BUILD)
    return web


def manifest(url: str, more: str = "") -> str:
    return (
        "environments:\n"
        "  - Game:\n"
        "      expected_reward: 0.93\n"
        "      description: |\n"
        "        Find the exit.\n"
        "        It moves.\n"
        f"      linux_url: {url}\n"
        f"      darwin_url: {url}.mac\n"
        "      additional_args: ['--wide']\n"
        f"{more}"
        "  - Other:\n"
        "      win_url: https://example.org/win.zip\n"
    )


@pytest.fixture
def registry(web, tmp_path) -> UnityEnvRegistry:
    (tmp_path / "envs.yaml").write_text(manifest(f"{web.url}/game.zip"))
    env_registry = UnityEnvRegistry()
    env_registry.register_from_yaml(tmp_path / "envs.yaml")
    return env_registry


def test_registry_manifest_is_read_as_a_mapping_of_entries(registry):
    assert list(registry) == ["Game", "Other"]
    assert len(registry) == 2
    game = registry["Game"]
    assert (game.identifier, game.expected_reward) == ("Game", 0.93)
    assert game.description == "Find the exit.\nIt moves.\n"
    assert set(game.urls) == {"linux", "darwin"}
    assert registry["Other"].urls == {"windows": "https://example.org/win.zip"}
    with pytest.raises(KeyError, match=r"The entry Gmae is not present in the registry\."):
        registry["Gmae"]


def test_registry_manifest_is_not_read_before_an_entry_is_needed(tmp_path):
    registry = UnityEnvRegistry()
    registry.register_from_yaml(tmp_path / "later.yaml")
    registry.register(RemoteRegistryEntry("Game", 1.0, "mine"))
    (tmp_path / "later.yaml").write_text(manifest("https://example.org/g.zip"))
    assert registry["Game"].description == "mine"
    assert "Other" in registry
    registry.clear()
    assert list(registry) == []


def test_registry_manifest_may_be_given_as_a_url(web):
    registry = UnityEnvRegistry()
    text = manifest(f"{web.url}/game.zip")
    registry.register_from_yaml(web.add("envs.yaml", text.encode()))
    assert registry["Game"].executable().name == "Game.x86_64"


def test_registry_entries_without_an_executable_raise_the_errors_of_ml_agents(registry, web):
    with pytest.raises(FileNotFoundError, match="does not contain a valid url for this platform"):
        registry["Other"].make()
    web.add("game.zip", zipped({"readme": b"x"}))
    with pytest.raises(FileNotFoundError, match=r"Binary not found, make sure .*game\.zip is a"):
        registry["Game"].executable()


def test_make_launches_the_fetched_executable_with_user_arguments_before_manifest_arguments(
    registry, web
):
    with registry["Game"].make(additional_args=["--nan-at", "7"], timeout_wait=30) as env:
        env.reset()
        (spec,) = env.behavior_specs.values()
    assert spec.observation_specs[0].shape == (5,)
    args = registry["Game"].executable().with_name("Game.x86_64.args").read_text()
    assert args.endswith(" --nan-at 7 --wide\n")
    with pytest.raises(ValueError, match="file_name"):
        registry["Game"].make(file_name="x")


def test_archive_without_a_known_digest_is_trusted_at_first_use_and_checked_later(
    registry, web, tmp_path, caplog, monkeypatch
):
    url = f"{web.url}/game.zip"
    program = registry["Game"].executable()
    assert program.read_bytes() == PLAYER
    lock = tmp_path / "envs.yaml.lock"
    assert json.loads(lock.read_text()) == {"sha256": {url: digest(BUILD)}}
    assert f"written to {lock} at this first use" in caplog.text
    assert len(web.asked) == 1
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "another"))
    caplog.clear()
    assert registry["Game"].executable().read_bytes() == PLAYER
    assert "first use" not in caplog.text
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "third"))
    web.add("game.zip", zipped({"Game/Game.x86_64": b"#!/bin/sh\nevil\n"}))
    with pytest.raises(FetchError, match=f"expected {digest(BUILD)} but got"):
        registry["Game"].executable()


def test_archive_with_a_digest_in_the_manifest_is_checked_at_first_use(web, tmp_path):
    path = tmp_path / "envs.yaml"
    path.write_text(manifest(f"{web.url}/game.zip", f"      linux_sha256: {'0' * 64}\n"))
    registry = UnityEnvRegistry()
    registry.register_from_yaml(path)
    with pytest.raises(FetchError, match=f"expected {'0' * 64} but got"):
        registry["Game"].executable()
    assert not (tmp_path / "envs.yaml.lock").exists()


def test_damaged_file_of_trusted_digests_is_not_overwritten(registry, tmp_path):
    lock = tmp_path / "envs.yaml.lock"
    for text, message in (("{", "is damaged"), ("[]", "has no map 'sha256'")):
        lock.write_text(text)
        with pytest.raises(FetchError, match=message):
            registry["Game"].executable()
        assert lock.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "needs a map of keys"),
        ("envs: []\n", "has the one key 'environments'"),
        ("environments: {A: {}}\n", "has the one key 'environments'"),
        ("environments:\n  - A:\n      linux_ur: x\n", "A: unknown key 'linux_ur'.*did you mean"),
        ("environments:\n  - A:\n      expected_reward: high\n", "A.expected_reward: needs a numb"),
    ],
)
def test_error_for_an_invalid_manifest_names_the_file_and_the_mistake(tmp_path, text, message):
    path = tmp_path / "envs.yaml"
    path.write_text(text)
    registry = UnityEnvRegistry()
    registry.register_from_yaml(path)
    for _ in range(2):
        with pytest.raises(SettingsError, match=message) as caught:
            list(registry)
        assert str(caught.value).startswith(f"{path}:")
