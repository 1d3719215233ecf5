import fcntl
import os
import select
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import SettingsError
from pipeline.simulators import registry
from pipeline.simulators.pack import pack

WAIT_S = 30


@pytest.fixture(scope="module")
def executable(tmp_path_factory):
    return pack("grid_world", tmp_path_factory.mktemp("built") / "env" / "grid_world")


@pytest.fixture
def environment(tmp_path_factory):
    """Variables with the interpreter of the tests, and wrong Python paths without effect."""
    cache = tmp_path_factory.getbasetemp() / "cache"
    return {
        "PIPELINE_PYTHON": sys.executable,
        "PIPELINE_CACHE": str(cache),
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": "/nonexistent",
        "PYTHONHOME": "/nonexistent",
    }


@pytest.fixture
def launch(executable, environment, tmp_path):
    started = []

    def start(*arguments, program=executable, **changes):
        started.append(
            subprocess.Popen(  # noqa: S603  # built by the test
                [str(program), *map(str, arguments)],
                cwd=tmp_path,
                env=environment | changes,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=WAIT_S)


def help_of(program, environment):
    return subprocess.run(  # noqa: S603  # built by the test
        [str(program), "--help"], env=environment, capture_output=True, text=True, check=False
    )


def test_executable_contains_no_path_of_the_machine_and_no_tests(executable):
    repository = str(Path(__file__).parents[3]).encode()
    with zipfile.ZipFile(executable) as archive:
        for name in archive.namelist():
            if name.startswith("lib/pipeline") or "/" not in name:
                assert repository not in archive.read(name)
            assert not {"tests", "__pycache__"} & set(name.split("/"))
            assert not name.endswith((".pyc", ".pyi"))
            assert ".." not in name
            assert "RECORD" not in name


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nothing", {}, "unknown simulator 'nothing'; choose one of balance_ball, "),
        ("grid_world", {"size": 9}, "grid_world: unknown option 'size'"),
        ("gymnasium", {}, "gymnasium: the option 'id' is missing"),
        ("gymnasium", {"id": "CartPole-v1", "teams": "index"}, "unknown option 'teams'"),
    ],
)
def test_simulator_that_cannot_be_packed_is_refused_and_no_file_is_written(
    name, options, said, tmp_path
):
    with pytest.raises(SettingsError, match=said):
        pack(name, tmp_path / "env", **options)
    assert list(tmp_path.iterdir()) == []


def test_packed_environment_runs_and_exits_with_code_0(launch, trainer, tmp_path):
    log = tmp_path / "logs" / "Player-0.log"
    process = launch(
        *("-nographics", "-batchmode", "--mlagents-port", trainer.port),
        *("-logFile", log, "--num-agents", 2, "-screen-width", "640"),
    )
    hello = trainer.greet(seed=5, num_areas=2)
    assert hello.package_version == "3.0.0"
    decisions, _ = trainer.reset()
    simulator = registry.make("grid_world", seed=5, n_agents=4)
    expected, _ = simulator.reset()["GridWorld?team=0"]
    policy = registry.expert("grid_world")
    for _ in range(20):
        assert decisions.agent_id.tolist() == [0, 1, 2, 3]
        for remote_obs, local_obs in zip(decisions.obs, expected.obs, strict=True):
            assert np.array_equal(remote_obs, local_obs)
        actions = policy(decisions)
        decisions, _ = trainer.step(actions)
        expected, _ = simulator.step({"GridWorld?team=0": actions})["GridWorld?team=0"]
    assert "python" in Path(f"/proc/{process.pid}/exe").readlink().name
    trainer.end()
    assert process.wait(timeout=WAIT_S) == 0
    assert process.stderr.read() == ""
    assert "Ignored arguments: -screen-width 640" in log.read_text()


def test_number_of_agents_chosen_while_packing_is_the_default_of_the_executable(
    launch, tmp_path, trainer
):
    built = pack("grid_world", tmp_path / "few", n_agents=3)
    process = launch("--mlagents-port", trainer.port, program=built)
    trainer.greet()
    decisions, _ = trainer.reset()
    assert len(decisions) == 3
    trainer.end()
    assert process.wait(timeout=WAIT_S) == 0


def test_executable_finds_the_python_that_packed_it_although_the_search_path_lacks_that_python(
    tmp_path, environment, monkeypatch
):
    folder = tmp_path / "a 'kept' folder"  # the shell must not split the path
    folder.mkdir()
    wrapper, real = folder / "python-of-this-test", Path(sys.executable)
    wrapper.write_text(f'#!/bin/sh\necho ran >> "$0.log"\nexec "{real}" "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    monkeypatch.setenv("PIPELINE_CACHE", str(tmp_path / "cache"))
    built = pack("grid_world", tmp_path / "built")
    assert str(wrapper).encode() not in built.read_bytes()
    del environment["PIPELINE_PYTHON"]
    environment["PIPELINE_CACHE"] = str(tmp_path / "cache")
    ended = help_of(built, environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (folder / "python-of-this-test.log").exists()
    wrapper.unlink()  # as if removed: another fitting Python is used
    ended = help_of(built, environment | {"PATH": f"{real.parent}:/usr/bin:/bin"})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_environment_ends_when_its_trainer_is_gone(launch, trainer):
    process = launch("--mlagents-port", trainer.port)
    trainer.greet()
    trainer.reset()
    trainer.stop()
    # The stop answers 400 or cuts the connection, whichever comes first.
    assert process.wait(timeout=WAIT_S) in (0, 1)


def test_an_environment_does_not_outlive_the_process_that_started_it(
    executable, environment, trainer
):
    starter = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL, process_group=0)\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    with subprocess.Popen(  # noqa: S603  # built by the test
        [sys.executable, "-I", "-c", starter, executable, "--mlagents-port", str(trainer.port)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        try:
            trainer.greet()
            trainer.reset()
            parent.kill()
            assert select.select([descriptor], [], [], WAIT_S)[0]
        finally:
            os.close(descriptor)


def test_several_processes_can_start_an_executable_for_the_first_time_at_the_same_moment(
    launch, tmp_path
):
    cache = tmp_path / "fresh"
    processes = [launch("--help", PIPELINE_CACHE=str(cache)) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (0, "")
        assert out.startswith("usage: grid_world --mlagents-port PORT")
    assert len(list((cache / "executables").iterdir())) == 1


def test_only_files_of_killed_processes_are_removed_from_the_cache_of_executables(
    executable, launch, tmp_path
):
    digest = zipfile.ZipFile(executable).read("DIGEST").decode()
    folder = tmp_path / "cache/executables"
    killed, living = (folder / f".{digest}.{name}" for name in ("killed", "living"))
    for start_folder in (killed, living):
        (start_folder / "lib").mkdir(parents=True)
        os.utime(start_folder, (0, 0))
    descriptor = os.open(living, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        process = launch("--help", PIPELINE_CACHE=str(tmp_path / "cache"))
        assert process.wait(WAIT_S) == 0
    finally:
        os.close(descriptor)
    assert {path.name for path in folder.iterdir()} == {digest, living.name}


def test_missing_python_is_reported_with_the_needed_version(executable, environment, tmp_path):
    tag = sys.implementation.cache_tag.encode()
    stranger = tmp_path / "stranger"
    stranger.write_bytes(executable.read_bytes().replace(b'"' + tag, b'"cpython-999', 1))
    stranger.chmod(0o755)
    ended = help_of(stranger, environment)
    assert ended.returncode == 3
    assert f"put python{sys.version_info[0]}.{sys.version_info[1]} on PATH" in ended.stderr
    assert "PIPELINE_PYTHON" in ended.stderr


def test_unwritable_cache_is_reported_at_the_start_and_does_not_stop_a_build(
    launch, tmp_path, monkeypatch
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    process = launch("--help", PIPELINE_CACHE=str(blocked))
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3
    assert f"cannot unpack into {blocked}" in err
    assert "PIPELINE_CACHE" in err
    monkeypatch.setenv("PIPELINE_CACHE", str(blocked))
    assert pack("grid_world", tmp_path / "built").exists()


def test_executable_without_a_listening_trainer_exits_with_code_1_and_a_one_line_error(launch):
    process = launch("--mlagents-port", 1, "--connect-timeout", 0.5)
    (line,) = process.communicate(timeout=WAIT_S)[1].splitlines()
    assert process.returncode == 1
    assert "no trainer listens on localhost:1 (waited 0.5 s)" in line
