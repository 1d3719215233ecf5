import errno
import os
import sys
import time
from pathlib import Path

import pytest

from pipeline.envs import launch
from pipeline.errors import UnityEnvironmentException

linux = pytest.mark.skipif(sys.platform != "linux", reason="names of Linux builds")


def build(path: Path, text: str = "#!/bin/sh\nexit 0\n", mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@linux
@pytest.mark.parametrize("asked", ["Game", "Game.x86_64", " Game.exe ", "Game.app", "Game.x86"])
def test_executable_is_found_although_the_given_name_has_another_extension_or_none(
    tmp_path, monkeypatch, asked
):
    monkeypatch.chdir(tmp_path)
    path = build(tmp_path / "Game.x86_64")
    build(tmp_path / "Game.x86")
    assert launch.find_executable(asked) == path


@linux
def test_executable_with_an_extension_is_preferred_to_one_without_an_extension(tmp_path):
    plain = build(tmp_path / "sim")
    assert launch.find_executable(plain) == plain
    better = build(tmp_path / "sim.x86_64")
    assert launch.find_executable(plain) == better
    inner = build(tmp_path / "my.app.builds" / "sim")  # the folder's name has an extension, too
    assert launch.find_executable(inner) == inner


def test_missing_executable_raises_an_error_with_the_searched_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Game").mkdir()
    with pytest.raises(
        UnityEnvironmentException,
        match=rf"Couldn't launch the Game environment\. Provided filename does not match any .*"
        rf"Looked for Game from the folder {tmp_path}\.$",
    ):
        launch.find_executable("Game")


def test_environment_gets_arguments_in_mlagents_order_and_the_log_file_that_the_user_chose():
    log = Path("/logs/Player-0.log")
    line = launch.command_line(
        Path("env"), port=7105, no_graphics=True, log=log, additional_args=["--foo", "7"]
    )
    assert " ".join(line) == (
        f"env -nographics -batchmode --mlagents-port 7105 -logFile {log} --foo 7"
    )
    line = launch.command_line(Path("env"), port=1, log=log, additional_args=["-LOGFILE", "mine"])
    assert line == ["env", "--mlagents-port", "1", "-LOGFILE", "mine"]


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("#!/bin/sh\n", 0o644, "chmod -R 755 .*sim`"),
        ("\0\1 no program", 0o755, "exec format error.*another platform"),
        ("#!/no/such/interpreter\n", 0o755, "interpreter .* does not exist"),
    ],
)
def test_executable_that_cannot_be_started_is_reported_with_the_reason(tmp_path, text, mode, said):
    path = build(tmp_path / "sim", text, mode)
    with pytest.raises(UnityEnvironmentException, match=f"environment {path}: .*{said}"):
        launch.EnvironmentProcess([str(path)])


def test_system_error_that_prevents_the_start_of_an_environment_is_quoted(monkeypatch):
    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(launch.subprocess, "Popen", fail)
    with pytest.raises(UnityEnvironmentException, match="Cannot allocate memory"):
        launch.EnvironmentProcess(["sim"])


def test_error_quotes_the_last_lines_of_an_existing_log_of_the_player(tmp_path):
    log = tmp_path / "Player-0.log"
    log.write_text("\n".join(f"line {k}" for k in range(100)))
    process = launch.EnvironmentProcess([str(build(tmp_path / "sim"))], log=log)
    process._process.wait(60)
    with pytest.raises(UnityEnvironmentException) as caught:
        process.check()
    process.close(0)
    text = str(caught.value)
    assert "return code 0." in text
    assert text.endswith("line 98\nline 99")
    assert "line 79\n" not in text
    log.write_text("Traceback\nERROR mine: KeyError: 3 (my_env.py:9)\n")
    assert process.tail().endswith(f"environment's {log}:\nERROR mine: KeyError: 3 (my_env.py:9)")


def test_environment_gets_the_path_of_the_running_python_and_is_killed_at_close(tmp_path):
    path = build(tmp_path / "sim", '#!/bin/sh\necho "$PIPELINE_PYTHON"\nexec sleep 100\n')
    process = launch.EnvironmentProcess([str(path)])
    while sys.executable not in process.tail():
        time.sleep(0.01)
    process.close(0.0)
    assert process._process.returncode == -9


def test_long_output_of_an_environment_is_trimmed_to_the_last_bytes_while_the_process_runs(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(launch, "_OUTPUT_LIMIT_BYTES", 50_000)
    path = build(
        tmp_path / "sim",
        '#!/bin/sh\nexec "$PIPELINE_PYTHON" -c "print(\'x\' * 99_999, flush=True); '
        f"open('{tmp_path / 'fifo'}').read(); print('goodbye')\"\n",
    )
    os.mkfifo(tmp_path / "fifo")
    process = launch.EnvironmentProcess([str(path)])
    with (tmp_path / "fifo").open("w"):  # the process opens the other end after it has printed
        process.trim()
        assert os.fstat(process._output.fileno()).st_size == 4096
    process._process.wait(60)
    assert process.tail().endswith("xxx\ngoodbye")
    process.close(0)
