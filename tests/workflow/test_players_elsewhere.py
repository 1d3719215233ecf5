"""Players that the trainer does not start: on the trainer's machine, and through ssh."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml
from free_ports import free_ports
from learn_command import PPO, checkpoint

Forward = Callable[[int, int], None]


@pytest.fixture
def forward(tmp_path: Path) -> Iterator[Forward]:
    """Forward a port through the test's own ssh server, as `ssh -R` to another machine."""
    # Debian installs sshd outside of the PATH of users.
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if sshd is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh, ssh-keygen and sshd, as of Debian's openssh-server")
    folder, server_port = tmp_path / "ssh", free_ports(1)
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True)  # noqa: S603  # our own
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    host_key = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{server_port} {host_key}")
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{server_port}\n"
        f"HostKey {folder}/host\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\n"
        "PidFile none\n"
        "StrictModes no\n"  # the test's folder is below /tmp, to which all may write
        "UsePAM no\n"
        "PasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # without it, root's sshd does not start
    client = ["ssh", "-N", "-F", "none", "-p", str(server_port), "-i", str(folder / "user")]
    for option in (
        "BatchMode=yes",
        "ExitOnForwardFailure=yes",
        "IdentitiesOnly=yes",
        f"UserKnownHostsFile={folder}/known_hosts",
        "GlobalKnownHostsFile=none",
    ):
        client += ["-o", option]
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb+"))

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(words, stderr=log)  # noqa: S603  # our own
            stack.callback(process.wait, 10)
            stack.callback(process.terminate)
            return process

        def until(line: bytes, count: int, process: subprocess.Popen[bytes]) -> None:
            deadline = time.monotonic() + 20
            while (folder / "log").read_bytes().count(line) < count:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)

        until(b"Server listening", 1, start(sshd, "-D", "-e", "-f", str(folder / "sshd_config")))
        n_forwarded = 0

        def forward(far: int, near: int) -> None:
            nonlocal n_forwarded
            n_forwarded += 1
            way = f"{far}:localhost:{near}"
            until(b"remote forward success for", n_forwarded,
                  start(*client, "-v", "-R", way, "127.0.0.1"))  # fmt: skip

        yield forward


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Forward | None:
    """The forwarding from players to the trainer; None for a direct connection."""
    return request.getfixturevalue("forward") if request.param == "ssh" else None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["direct", "ssh"], indirect=True)
def test_training_continues_after_an_attached_player_is_killed_and_started_again(
    way, started, packed, tmp_path
):
    settings = {"behaviors": {"3DBall": PPO | {"max_steps": 5000}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    build = str(packed("balance_ball", tmp_path / "balance_ball", n_agents=3))
    ports = far_ports = free_ports(2)
    options = ["--seed", "1", "--attach", "2", "--base-port", str(ports)]
    trainer = started("pipeline.cli.main", "learn", "config.yaml", *options)
    trainer.until("Start each player with --mlagents-port")
    if way is not None:
        far_ports = free_ports(2)
        for player in range(2):
            way(far_ports + player, ports + player)

    def play(player: int) -> subprocess.Popen[bytes]:
        command = [build, "--mlagents-port", str(far_ports + player)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603  # our own

    killed, *players = play(0), play(1)
    trainer.until(r"Step: 2000\.")
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    players.append(play(0))
    assert trainer.end() == 0, trainer.told
    assert [player.wait(60) for player in players] == [0, 0]
    assert trainer.told.count("Restarting worker") == 1
    assert "Restarting worker[0]" in trainer.told
    assert checkpoint(tmp_path, "ppo")["learner"]["step"] >= 5000
