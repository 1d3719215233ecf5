"""Fetched environments that cannot be used: one line, exit code 2, and a clean cache."""

import os
import shutil
from pathlib import Path

from command import Done, Place
from made_archives import GAME, digest, zipped

BUILD = zipped(GAME)
BIG = zipped({**GAME, "noise": os.urandom(1 << 20)}, compressed=False)


def left(cache: Path) -> list[str]:
    """Return the paths in the cache, without locks."""
    paths = [p.relative_to(cache / "environments").as_posix() for p in cache.rglob("*/*")]
    return [name for name in paths if not name.startswith("locks") and name != "downloads"]


def test_fetch_without_digest_is_refused_and_prints_the_digest_of_the_archive(
    private_cache, web, refused, printed
):
    url = web.add("game.zip", BUILD)
    assert f"If you trust it, give --sha256 {digest(BUILD)}" in refused("env", "fetch", url)
    assert [name for name in left(private_cache) if not name.startswith("downloads/")] == []
    path = Path(printed("env", "fetch", url, "--sha256", digest(BUILD)).strip())
    assert path == private_cache / "environments" / digest(BUILD) / "game/Game.x86_64"
    assert len(web.asked) == 1


def test_unknown_environment_is_refused_and_similar_names_are_proposed(
    here, private_cache, refused
):
    Path("envs.yaml").write_text("environments:\n  - Basic:\n      linux_url: https://x/b.zip\n")
    assert refused("env", "fetch", "Bsic", "--manifest", "envs.yaml") == (
        "unknown environment 'Bsic'; did you mean Basic? `pipeline env list` shows the names."
    )
    assert "names come from a manifest" in refused("env", "fetch", "Basic").lower()
    assert "is built in and is not fetched" in refused("env", "fetch", "grid_world")
    assert "are only for a URL" in refused("env", "fetch", "Basic", "--sha256", "0" * 64)
    assert left(private_cache) == []


def test_unavailable_or_invalid_manifest_is_refused(here, private_cache, web, refused):
    assert "no.yaml" in refused("env", "list", "--manifest", "no.yaml")
    assert "404" in refused("env", "list", "--manifest", f"{web.url}/no.yaml")
    bad = web.add("bad.yaml", b"environments:\n  - A:\n      url: x\n")
    error = "bad.yaml:3: environments[0].A: unknown key 'url'"
    assert error in refused("env", "list", "--manifest", bad)
    assert left(private_cache) == []


def test_env_list_and_env_fetch_use_the_entries_of_a_given_manifest(
    here, private_cache, web, refused, printed, caplog
):
    url = web.add("game.zip", BUILD)
    entry = f"  - Game:\n      linux_url: {url}\n      description: Find the exit.\n"
    Path("envs.yaml").write_text(f"environments:\n{entry}")
    text = printed("env", "list", "--manifest", "envs.yaml")
    assert "Game             Find the exit. (linux)" in text.splitlines()
    assert text.startswith("balance_ball ")
    path = printed("env", "fetch", "Game", "--manifest", "envs.yaml")
    assert path.strip().endswith("/game/Game.x86_64")
    assert "WARNING" in caplog.text
    assert "envs.yaml.lock at this first use" in caplog.text
    web.add("game.zip", BIG)
    shutil.rmtree(private_cache)
    error = refused("env", "fetch", "Game", "--manifest", "envs.yaml")
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
