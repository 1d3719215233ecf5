import logging
from pathlib import Path

import pytest

from pipeline.envs.sources import executables
from pipeline.envs.sources.executables import executable_in, runs_headless
from pipeline.errors import FetchError


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables.sys, "platform", "linux")


def build(folder: Path, *names: str, mode: int = 0o644) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.chmod(mode)
    return folder


def found(folder: Path, **options: str) -> str:
    return executable_in(folder, label="it", **options).relative_to(folder).as_posix()


ALL = (
    "g/G.x86_64",
    "g/sub/Tool.x86_64",
    "g/G.exe",
    "g/UnityCrashHandler64.exe",
    "g/UnityPlayer.so",
    "m/G.app/Contents/MacOS/G",
    "m/G.app/Contents/MacOS/helper",
)


def test_archive_for_several_platforms_gives_the_executable_of_each_platform(tmp_path):
    folder = build(tmp_path / "all", *ALL)
    assert found(folder) == "g/G.x86_64"
    assert found(folder, platform="windows") == "g/G.exe"
    assert found(folder, platform="darwin") == "m/G.app/Contents/MacOS/G"
    # Without a suffix, the executable is the only file with permission to be executed.
    folder = build(tmp_path / "plain", "bin/player", "bin/UnityPlayer.so", mode=0o755)
    assert found(build(folder, "readme")) == "bin/player"
    with pytest.raises(FetchError, match="expected one executable, found none"):
        found(build(tmp_path / "none", "readme"))


def test_setting_executable_chooses_among_several_executables_of_an_archive(tmp_path):
    build(tmp_path, "a.x86_64", "b.x86_64", "m/G.app/Contents/MacOS/G")
    with pytest.raises(
        FetchError, match=r"a\.x86_64, b\.x86_64\. .* the right one with the setting 'executable'"
    ):
        found(tmp_path)
    assert found(tmp_path, wanted="b.x86_64") == "b.x86_64"
    assert found(tmp_path, wanted="m/G.app") == "m/G.app/Contents/MacOS/G"
    with pytest.raises(FetchError, match=r"has no file 'c'; .* suffix are a\.x86_64, b\.x86_64"):
        found(tmp_path, wanted="c")


@pytest.mark.parametrize("other", [("G.exe", "windows"), ("G.app/Contents/MacOS/G", "darwin")])
def test_error_for_a_build_for_another_platform_names_both_platforms(tmp_path, other):
    build(tmp_path, other[0], mode=0o755)
    with pytest.raises(
        FetchError, match=f"has a build for {other[1]} .* a build for linux is needed"
    ):
        found(tmp_path)


@pytest.fixture
def player(tmp_path) -> Path:
    path = tmp_path / "G.x86_64"
    path.write_bytes(b"\x7fELF and more")
    return path


def without_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "PIPELINE_GRAPHICS"):
        monkeypatch.delenv(name, raising=False)


def test_program_on_a_machine_without_a_display_runs_headless_and_the_log_says_so(
    player, monkeypatch, caplog
):
    without_display(monkeypatch)
    with caplog.at_level(logging.INFO):
        assert runs_headless(player)
    (record,) = caplog.records
    assert "G.x86_64 runs with no_graphics" in record.getMessage()


@pytest.mark.parametrize("name", ["DISPLAY", "WAYLAND_DISPLAY", "PIPELINE_GRAPHICS"])
def test_binary_does_not_run_headless_if_there_is_a_display_or_pipeline_graphics_is_set(
    player, monkeypatch, name
):
    without_display(monkeypatch)
    monkeypatch.setenv(name, "1")
    assert not runs_headless(player)


def test_script_missing_file_and_executable_on_windows_do_not_run_headless(
    player, tmp_path, monkeypatch
):
    without_display(monkeypatch)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    assert not runs_headless(script)
    assert not runs_headless(tmp_path / "missing")
    monkeypatch.setattr(executables.sys, "platform", "win32")
    assert not runs_headless(player)
