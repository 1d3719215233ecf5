"""Builds a Unity project with the Unity Editor in batch mode."""

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.envs import launch
from pipeline.envs.sources.executables import executable_in
from pipeline.errors import FetchError
from pipeline.settings.project.environments import UnitySource

_log = logging.getLogger(__name__)

EDITOR_VARIABLE = "PIPELINE_UNITY_EDITOR"
OUTPUT_ARGUMENT = "-pipelineOutput"
"""Argument of the build method: the path of the executable to write, without its suffix."""

_LOG_INTERVAL_S = 15.0

_VERSION_FILE = "ProjectSettings/ProjectVersion.txt"
_EDITORS = {"linux": "Editor/Unity", "win32": "Editor/Unity.exe"}
_MACOS_EDITOR = "Unity.app/Contents/MacOS/Unity"
# Log lines that tell the cause of a failed build, which the exit code does not, and what to do.
_KNOWN_CAUSES = {
    r"(?i)no valid unity (editor )?licen[cs]e|licen[cs]e is (not valid|invalid|expired)"
    r"|has no valid licen[cs]e|not been activated with a valid licen[cs]e"
    r"|failed to (activate|acquire).*licen[cs]e|token not found in cache"
    r"|licen[cs]e (has )?expired|no ulf license found": "has no valid licence on this machine; "
    "activate one in Unity Hub, or with `-serial` or a licence file on a server",
    r"(?i)another unity instance is running with this project": "has this project open already; "
    "close it",
    r"(?i)executeMethod (class|method) '.*' could not be found": "does not know the method "
    "{method}; copy workflow/unity/PipelineBuild.cs to Assets/Editor, or set `method` in "
    "params.yaml",
}
# The beginning of log lines that do not tell a cause: successful builds also have them if the
# Editor is not signed in.
_NOISE = "[Licensing::"
# Lines that may name a cause other than the three above, from the most to the least specific: the
# compiler's errors, the build's errors, exceptions, and last any line with "error" or "fatal".
_FIRST_ERRORS = (
    r"\berror CS\d+:",
    r"(?i)^(Build ?Failed|Error building Player)",
    r"\w*Exception\b.*: ",
    r"(?i)\b(error|fatal)\b",
)


def build(source: UnitySource, *, root: Path, name: str, folder: Path, log: Path) -> Path:
    """Build a project into a new `folder`, and return the executable in it.

    The project's path is relative to `root`. The Editor's log is written to `log`. After an error
    the folder does not exist.

    Raises:
        FetchError: There is no project or no Editor, or the build failed; the message quotes the
            first error of the log, and names a missing licence.
    """
    project = (root / source.project).resolve()
    if not (project / _VERSION_FILE).is_file():
        raise FetchError(
            f"{source.project}: is not a Unity project, because it has no {_VERSION_FILE}; correct "
            "`project` in params.yaml"
        )
    editor = find_editor(source.editor, project)
    # Files of an earlier build could be taken for files of this build.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [str(editor), "-batchmode", "-quit", "-nographics", "-projectPath", str(project)]
    # `-logFile -` prints the log, so that it is written to our file and can be read meanwhile.
    command += ["-executeMethod", source.method, "-logFile", "-", *source.build_args]
    command += [OUTPUT_ARGUMENT, str(folder / name)]
    _log.info("Building %s with %s; the Editor's log goes to %s", source.project, editor, log)
    try:
        _run(source, command, log)
        return executable_in(folder, label=f"the build of {source.project}")
    except BaseException:
        # The folder is deleted, because the folder of an interrupted build may look complete.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def find_editor(setting: str | None, project: Path) -> Path:
    """Return the Editor from the environment variable, the setting, Unity Hub's folders or PATH.

    From Unity Hub's folders only an Editor of the project's version is returned, because another
    version would change the project.

    Raises:
        FetchError: There is no such Editor.
    """
    for origin, setting_or_variable in (
        (EDITOR_VARIABLE, os.environ.get(EDITOR_VARIABLE)),
        ("editor", setting),
    ):
        if setting_or_variable:
            path = Path(setting_or_variable).expanduser()
            if not path.is_file():
                raise FetchError(f"{origin}: there is no Unity Editor at {setting_or_variable}")
            return path.absolute()
    version = _project_version(project)
    other_versions = []
    for folder in _hub_folders():
        editor = folder / version / _EDITORS.get(sys.platform, _MACOS_EDITOR)
        if editor.is_file():
            return editor
        other_versions += [path.name for path in sorted(folder.glob("*")) if path.name != version]
    for command in ("unity-editor", "Unity"):
        if command_path := shutil.which(command):
            return Path(command_path)
    installed = f"; installed are {', '.join(other_versions)}" if other_versions else ""
    raise FetchError(
        f"{project.name}: needs the Unity Editor {version}, which is not on this machine"
        f"{installed}. Install it with Unity Hub, or set {EDITOR_VARIABLE} to its executable."
    )


def _project_version(project: Path) -> str:
    text = (project / _VERSION_FILE).read_text(encoding="utf-8", errors="replace")
    version = re.search(r"^m_EditorVersion:\s*(\S+)", text, re.MULTILINE)
    if version is None:
        raise FetchError(
            f"{project / _VERSION_FILE}: has no line 'm_EditorVersion: <version>'; open the "
            "project in the Unity Editor, which writes this line"
        )
    return version[1]


def _hub_folders() -> Iterator[Path]:
    """Yield the folders of Unity Hub's Editors: the folder that the user chose, and the default."""
    home = Path.home()
    if sys.platform == "win32":
        settings = Path(os.environ.get("APPDATA", home)) / "UnityHub"
        default = Path(os.environ.get("PROGRAMFILES", "C:/Program Files")) / "Unity/Hub/Editor"
    elif sys.platform == "darwin":
        settings = home / "Library/Application Support/UnityHub"
        default = Path("/Applications/Unity/Hub/Editor")
    else:
        settings = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "UnityHub"
        default = home / "Unity/Hub/Editor"
    try:
        # Unity Hub stores the folder that the user chose as a JSON string.
        chosen = json.loads((settings / "secondaryInstallPath.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        chosen = None
    if isinstance(chosen, str) and chosen:
        yield Path(chosen)
    yield default


def _run(source: UnitySource, command: list[str], log: Path) -> None:
    """Run the Editor, and raise FetchError if it fails or takes too long."""
    # The output goes to a file, because the Editor's helper processes would keep a pipe open.
    end, reported = time.monotonic() + source.timeout_s, time.monotonic()
    with log.open("wb") as output:
        try:
            process = launch.start(command, output)
        except OSError as error:
            raise FetchError(
                f"{command[0]}: the Unity Editor cannot be started: {error.strerror}"
            ) from error
    try:
        with log.open("r", encoding="utf-8", errors="replace") as lines:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, max(0.0, end - time.monotonic())))
                code = process.poll()
                # The file grows, so each pass of the loop reads the lines that were added.
                new = [line.strip() for line in lines if line.strip()]
                if new and time.monotonic() - reported >= _LOG_INTERVAL_S:
                    _log.info("Unity: %s", new[-1])
                    reported = time.monotonic()
                if code is not None or time.monotonic() >= end:
                    break
    finally:
        if process.poll() is None:
            launch.kill(process)
    if code != 0:
        raise FetchError(_failure(source, code, log))


def _failure(source: UnitySource, code: int | None, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    start = f"{source.project}: the Unity Editor "
    if code is None:
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        return (
            f"{start}was ended after {source.timeout_s:g} s (timeout_s); the last line of its log "
            f"is: {last.strip()}"
        )
    # Known causes come first, because the first line with "error" is often a consequence.
    for pattern, remedy in _KNOWN_CAUSES.items():
        if line := _first(lines, pattern):
            return f"{start}{remedy.format(method=source.method)}. Its log says: {line}"
    lines = [line for line in lines if line.strip() and not line.startswith(_NOISE)]
    errors = (_first(lines, pattern) for pattern in _FIRST_ERRORS)
    last = f"no error; the last line is {(lines or ['nothing'])[-1]!r}"
    line = next(filter(None, errors), last)
    return f"{start}failed with exit code {code}. Its log says: {line}. The whole log: {log}"


def _first(lines: list[str], pattern: str) -> str:
    return next((line.strip()[:300] for line in lines if re.search(pattern, line)), "")
