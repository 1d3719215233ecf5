"""Builds of Unity projects with a script that behaves like the Unity Editor in batch mode."""

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.envs.sources import unity_build
from pipeline.envs.sources.unity_build import build, find_editor
from pipeline.errors import FetchError
from pipeline.settings.project.environments import UnitySource

EDITOR = f"""#!{sys.executable}
import os, pathlib, subprocess, sys, time
arguments = sys.argv[1:]
value = lambda name: arguments[arguments.index(name) + 1]
project = pathlib.Path(value("-projectPath"))
(project / "arguments").write_text("\\n".join(arguments))
assert value("-logFile") == "-"
mode = (project / "Assets/mode").read_text()
print("Unity Editor version:    2022.3.10f1", flush=True)
print("[Licensing::Module] Error: Access token is unavailable; failed to update", flush=True)
said = {{
    "licence": ["No valid Unity Editor license found. Please activate your license."],
    "open": ["It looks like another Unity instance is running with this project open."],
    "method": ["executeMethod class 'PipelineBuild' could not be found."],
    "script": [
        "Assets/Ball.cs(3,14): warning CS0168: unused",
        "Assets/Ball.cs(7,2): error CS1002: ; expected",
        "Assets/Ball.cs(9,2): error CS1003: another",
        "Aborting batchmode due to failure:",
    ],
    "silent": [],
}}
if mode in said:
    print(*said[mode], sep="\\n", flush=True)
    sys.exit({{"licence": 198, "silent": 7}}.get(mode, 1))
helper = subprocess.Popen(["sleep", "600"])
(project / "helper").write_text(str(helper.pid))
if mode == "hang":
    time.sleep(600)
if mode != "nothing":
    player = pathlib.Path(value("-pipelineOutput") + ".x86_64")
    player.write_text("#!/bin/sh\\nexit 0\\n")
    player.chmod(0o755)
helper.kill()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Unity project on a machine where the script EDITOR is the only Unity Editor."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(unity_build.sys, "platform", "linux")
    editor = tmp_path / "Unity"
    editor.write_text(EDITOR)
    editor.chmod(0o755)
    monkeypatch.setenv(unity_build.EDITOR_VARIABLE, str(editor))
    folder = tmp_path / "My Game"
    (folder / "Assets").mkdir(parents=True)
    (folder / "ProjectSettings").mkdir()
    version = "m_EditorVersion: 2022.3.10f1\nm_EditorVersionWithRevision: 2022.3.10f1 (ff3792e5)\n"
    (folder / "ProjectSettings/ProjectVersion.txt").write_text(version)
    return folder


def built(project: Path, mode: str = "good", **options) -> Path:
    (project / "Assets/mode").write_text(mode)
    root = project.parent
    return build(
        UnitySource(project=project.name, **options),
        root=root,
        name="game",
        folder=root / "out/player",
        log=root / "out/editor.log",
    )


def failure(project: Path, mode: str, **options) -> str:
    with pytest.raises(FetchError) as caught:
        built(project, mode, **options)
    assert not (project.parent / "out/player").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_unity_project_is_built_with_the_method_and_arguments_of_its_settings(project):
    program = built(project, method="Tools.Make.Player", build_args=("-buildTarget", "Linux64"))
    assert program == project.parent / "out/player/game.x86_64"
    output = str(project.parent / "out/player/game")
    assert (project / "arguments").read_text().split("\n") == [
        "-batchmode",
        "-quit",
        "-nographics",
        "-projectPath",
        str(project),
        "-executeMethod",
        "Tools.Make.Player",
        "-logFile",
        "-",
        "-buildTarget",
        "Linux64",
        "-pipelineOutput",
        output,
    ]
    assert "Unity Editor version" in (project.parent / "out/editor.log").read_text()


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("licence", "My Game: the Unity Editor has no valid licence on this machine; activate one"),
        ("licence", "Its log says: No valid Unity Editor license found. Please activate your lic"),
        ("open", "has this project open already; close it"),
        ("method", "does not know the method PipelineBuild.Build; copy workflow/unity/PipelineBu"),
        ("script", "exit code 1. Its log says: Assets/Ball.cs(7,2): error CS1002: ; expected. Th"),
        (
            "silent",
            "failed with exit code 7. Its log says: no error; the last line is 'Unity Editor vers",
        ),
        ("nothing", "the build of My Game: expected one executable, found none"),
    ],
)
def test_failed_build_of_a_unity_project_is_reported_in_one_line(project, mode, message):
    assert message in failure(project, mode)


def ends(pid: int, *, within_s: float) -> bool:
    """Return whether a process ends within `within_s` seconds: signals need time to arrive."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_hanging_build_of_a_unity_project_is_killed_with_its_child_processes(project):
    message = failure(project, "hang", timeout_s=5.0)
    assert "was ended after 5 s (timeout_s); the last line of its log is: [Licensing" in message
    helper = int((project / "helper").read_text())
    assert ends(helper, within_s=30.0)


def test_unity_build_without_a_unity_project_or_without_a_working_editor_is_refused(
    project, monkeypatch
):
    broken = project.parent / "broken"
    broken.write_bytes(b"\0")
    monkeypatch.setenv(unity_build.EDITOR_VARIABLE, str(broken))
    assert "broken: the Unity Editor cannot be started: Permission denied" in failure(project, "x")
    (project / "ProjectSettings/ProjectVersion.txt").unlink()
    assert ("My Game: is not a Unity project, because it has no ProjectSettings") in failure(
        project, "good"
    )


def editor_at(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    return path


def test_unity_editor_is_found_by_environment_variable_by_setting_or_in_unity_hub(
    project, monkeypatch, tmp_path
):
    named_editor = editor_at(tmp_path / "given/Unity")
    assert find_editor(str(named_editor), project).parent == tmp_path
    monkeypatch.delenv(unity_build.EDITOR_VARIABLE)
    assert find_editor(str(named_editor), project) == named_editor
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(FetchError, match=r"editor: there is no Unity Editor at /nowhere"):
        find_editor("/nowhere", project)
    home = tmp_path / "home"
    editor_at(home / "Unity/Hub/Editor/6000.0.1f1/Editor/Unity")
    with pytest.raises(
        FetchError,
        match=r"My Game: needs the Unity Editor 2022\.3\.10f1, which is not on this machine; "
        r"installed are 6000\.0\.1f1\. Install it with Unity Hub, or set PIPELINE_UNITY_EDITOR",
    ):
        find_editor(None, project)
    hub_editor = editor_at(home / "Unity/Hub/Editor/2022.3.10f1/Editor/Unity")
    assert find_editor(None, project) == hub_editor
    chosen = editor_at(tmp_path / "big/2022.3.10f1/Editor/Unity")
    settings = home / ".config/UnityHub/secondaryInstallPath.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps(str(tmp_path / "big")))
    assert find_editor(None, project) == chosen


def test_unity_editor_is_found_on_the_search_path(project, monkeypatch, tmp_path):
    monkeypatch.delenv(unity_build.EDITOR_VARIABLE)
    editor = editor_at(tmp_path / "bin/unity-editor")
    editor.chmod(0o755)
    monkeypatch.setenv("PATH", str(editor.parent))
    assert find_editor(None, project) == editor
