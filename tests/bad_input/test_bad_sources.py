"""Fetched environments that cannot be used: one line, exit code 2, and a clean cache."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Done, Place  # pytest reads the types of fixtures
from made_archives import GAME, digest, zipped

BUILD = zipped(GAME)
BIG = zipped({**GAME, "noise": os.urandom(1 << 20)}, compressed=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shop:
    """A folder to run commands in, with a separate cache of environments."""

    place: Place
    cache: Path

    def env(self, *arguments: str) -> Done:
        return self.place.pipeline("env", *arguments)

    def left(self) -> list[str]:
        """Paths in the cache, without locks."""
        paths = [p.relative_to(self.cache).as_posix() for p in self.cache.rglob("*")]
        return [name for name in paths if not name.startswith("locks") and name != "downloads"]


@pytest.fixture
def shop(place: Place, tmp_path_factory, monkeypatch: pytest.MonkeyPatch) -> Shop:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PIPELINE_CACHE", str(cache))
    return Shop(place=place, cache=cache / "environments")


def test_fetch_without_digest_is_refused_and_prints_the_digest_of_the_archive(shop, web):
    url = web.add("game.zip", BUILD)
    error = shop.env("fetch", url).error
    assert f"If you trust it, give --sha256 {digest(BUILD)}" in error
    assert [name for name in shop.left() if not name.startswith("downloads/")] == []
    result = shop.env("fetch", url, "--sha256", digest(BUILD))
    assert result.code == 0, result.err
    assert Path(result.out.strip()) == shop.cache / digest(BUILD) / "game/Game.x86_64"
    assert len(web.asked) == 1


def test_unknown_environment_is_refused_and_similar_names_are_proposed(shop):
    shop.place.config("environments:\n  - Basic:\n      linux_url: https://x/b.zip\n", "envs.yaml")
    error = shop.env("fetch", "Bsic", "--manifest", "envs.yaml").error
    assert error == (
        "unknown environment 'Bsic'; did you mean Basic? `pipeline env list` shows the names."
    )
    assert "names come from a manifest" in shop.env("fetch", "Basic").error.lower()
    assert "is built in and is not fetched" in shop.env("fetch", "grid_world").error
    assert "are only for a URL" in shop.env("fetch", "Basic", "--sha256", "0" * 64).error
    assert shop.left() == []


def test_unavailable_or_invalid_manifest_is_refused(shop, web):
    assert "no.yaml" in shop.env("list", "--manifest", "no.yaml").error
    assert "404" in shop.env("list", "--manifest", f"{web.url}/no.yaml").error
    bad = web.add("bad.yaml", b"environments:\n  - A:\n      url: x\n")
    assert "bad.yaml:3: environments[0].A: unknown key 'url'" in (
        shop.env("list", "--manifest", bad).error
    )
    assert shop.left() == []


def test_env_list_and_env_fetch_use_the_entries_of_a_given_manifest(shop, web):
    url = web.add("game.zip", BUILD)
    entry = f"  - Game:\n      linux_url: {url}\n      description: Find the exit.\n"
    shop.place.config(f"environments:\n{entry}", "envs.yaml")
    result = shop.env("list", "--manifest", "envs.yaml")
    assert "Game             Find the exit. (linux)" in result.out.splitlines()
    assert result.out.startswith("balance_ball ")
    result = shop.env("fetch", "Game", "--manifest", "envs.yaml")
    assert result.out.strip().endswith("/game/Game.x86_64")
    assert "[WARNING]" in result.err
    assert "envs.yaml.lock at this first use" in result.err
    web.add("game.zip", BIG)
    shutil.rmtree(shop.cache)
    error = shop.env("fetch", "Game", "--manifest", "envs.yaml").error
    assert f"expected {digest(BUILD)} but got {digest(BIG)}" in error


def stage(project: Place, source: str) -> Done:
    """Run the stage `env` for an environment with this source."""
    (project.folder / "params.yaml").write_text(f"environments:\n  game: {{{source}}}\n")
    result = project.pipeline("plan")
    assert result.code == 0, result.err
    result = project.python("workflow/scripts/env.py", "game")
    if result.code:
        assert not (project.folder / "build").exists()
    return result


def test_env_stage_refuses_an_archive_for_another_system(project, web):
    url = web.add("game.zip", BUILD)
    error = stage(
        project, f"source: fetch, url: '{url}', sha256: {digest(BUILD)}, platform: windows"
    ).error
    assert error == (
        "params.yaml: environments.game: has builds for windows, but this machine runs linux; give "
        "'url' and 'sha256' of a build for linux"
    )


def test_env_stage_refuses_a_missing_build_or_incomplete_unity_project(project):
    folder = project.folder
    error = stage(project, "source: path, path: x").error
    assert error == "x: does not exist; a build is expected here; correct `path` in params.yaml"
    (folder / "Assets").mkdir()
    error = stage(project, "source: unity, project: .").error
    assert error.startswith("./Packages: does not exist; a Unity project has this folder; correct ")
