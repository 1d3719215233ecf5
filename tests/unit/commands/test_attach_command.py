"""`pipeline attach` between a trainer and a player, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from free_ports import free_ports

from pipeline import cli
from pipeline.envs import forward as forward_module
from pipeline.envs.attach import attach_workers
from pipeline.protocol import server as server_module
from pipeline.protocol.server import Server
from pipeline.protocol.token import VARIABLE

if TYPE_CHECKING:
    from pipeline.envs.workers import WorkerSet

TOKEN = b"the players' own token"


@pytest.fixture
def port() -> int:
    return free_ports(1)


@pytest.fixture
def attach(port, tmp_path, monkeypatch) -> Callable[..., int]:
    """Run `pipeline attach` to the port, with the token; gives its exit code."""
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_bytes(TOKEN)

    def run(*options: str | Path) -> int:
        arguments = ["--to", f"127.0.0.1:{port}", "--token-file", file, *options]
        return cli.main(["attach", *map(str, arguments)])

    return run


@pytest.fixture
def trainer(port) -> Callable[..., WorkerSet]:
    """Wait for one player on the port, which has to say the token."""
    return lambda **options: attach_workers(
        1, seed=1, timeout_wait=20, base_port=port, listen=("127.0.0.1", TOKEN), **options
    )


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def test_a_player_on_the_general_runtime_is_brought_to_the_trainer_until_that_ends(
    attach, trainer, fake, pool, caplog
):
    caplog.set_level("INFO", "pipeline")
    code = pool.submit(attach, "--env", fake())
    with trainer() as workers:
        workers.reset()
        for _ in range(3):
            workers.step()
        assert len(workers.get_steps("Echo?team=0")[0][0]) == 3
    assert code.result(60) == 0
    assert "has ended." in caplog.text


def test_a_player_that_ends_is_started_again_once_a_minute(
    attach, port, tmp_path, monkeypatch, caplog, capsys
):
    monkeypatch.setattr(server_module, "_KEEP_S", 0.05)
    player = tmp_path / "player"
    player.write_text("#!/bin/sh\necho cannot find the scene\nexit 3\n")
    player.chmod(0o755)
    with Server(port, host="127.0.0.1", token=TOKEN):
        assert attach("--env", player) == 2
    restart_message = "Starting the player again after 'Environment shut down with return code 3."
    assert caplog.text.count(restart_message) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: The player ended again (1 of 1 in 60 s")
    assert "cannot find the scene" in error


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--to", "10.0.0.5"], "--to 10.0.0.5: needs the form HOST:PORT, such as 10.0.0.5:5004"),
        (["--to", "[::1]:x"], "--to [::1]:x: needs the form HOST:PORT"),
        (["--timeout-wait", "0"], "--to 127.0.0.1:{port}: no trainer listens there (waited 0 s)"),
        (["--to", "a..b:5004"], "--to a..b:5004: no machine of this name is known here"),
        (["--env", "missing"], "Couldn't launch the missing environment."),
        (["--token-file", "missing"], "missing: No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_two(options, expected, attach, port, capsys):
    assert attach("--port", "0", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: " + expected.format(port=port))
    assert error.count("\n") == 1


def test_a_port_that_has_its_player_is_said_after_a_while(
    attach, trainer, fake, pool, capsys, monkeypatch
):
    monkeypatch.setattr(forward_module, "_TAKEN_S", 0.5)
    pool.submit(attach, "--env", fake())
    with trainer() as workers:
        workers.reset()
        assert attach("--port", "0") == 2
    assert "the player of this port is there already" in capsys.readouterr().err
