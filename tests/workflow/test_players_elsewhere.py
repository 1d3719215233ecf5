"""Players that are not started by the run that trains in them, here and behind a network."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from free_ports import free_ports
from learn_command import PPO, checkpoint


@dataclass(frozen=True)
class Elsewhere:
    """Where players run, and where they find the trainer."""

    address: str
    within: tuple[str, ...] = ()
    is_far: bool = False


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Elsewhere]:
    """This machine's loopback, or a network of its own behind a cable."""
    if request.param == "loopback":
        yield Elsewhere("127.0.0.1")
        return
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs ip, and root, for a network of its own")
    pid = os.getpid()
    name, cable = f"pipeline-{pid}", f"pt{pid}"
    # a network for tests of networks (RFC 2544), another for each process
    near, far = (f"198.18.{pid // 64 % 256}.{4 * (pid % 64) + k}" for k in (1, 2))
    steps = (
        f"ip netns add {name}",
        f"ip link add {cable} type veth peer name far netns {name}",
        f"ip addr add {near}/30 dev {cable}",
        f"ip link set {cable} up",
        f"ip -n {name} addr add {far}/30 dev far",
        f"ip -n {name} link set far up",
        f"ip -n {name} link set lo up",
    )
    try:
        for step in steps:
            completed = subprocess.run(step.split(), capture_output=True, check=False)  # noqa: S603  # our own
            if completed.returncode:
                pytest.skip(f"{step}: {completed.stderr.decode()}")
        yield Elsewhere(near, ("ip", "netns", "exec", name), is_far=True)
    finally:
        delete = f"ip netns del {name}".split()
        subprocess.run(delete, capture_output=True, check=False)  # noqa: S603  # our own


def write_inputs(folder: Path) -> None:
    settings = {"behaviors": {"3DBall": PPO | {"max_steps": 5000}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    for name in ("token", "wrong"):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(secrets.token_hex(32))


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", ["loopback", "namespace"], indirect=True)
def test_players_with_the_token_train_and_one_that_is_killed_comes_back(
    elsewhere, started, packed, tmp_path
):
    write_inputs(tmp_path)
    build = str(packed("balance_ball", tmp_path / "balance_ball", n_agents=3))
    port, local = free_ports(3), free_ports(1)

    def attach(player: int, *options: str, file: str = "token"):
        to = ["--to", f"{elsewhere.address}:{port + player}", "--token-file", file]
        return started("pipeline.cli", "attach", *to, *options, within=elsewhere.within)

    def by_hand(port: int, within: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        command = [*within, build, "--mlagents-port", str(port)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603  # ours

    address_options = [
        "--base-port",
        str(port),
        "--listen",
        elsewhere.address,
        "--token-file",
        "token",
    ]
    trainer = started(
        "pipeline.cli", "learn", "config.yaml", "--seed", "1", "--attach", "3", *address_options
    )
    trainer.until("Players of other machines come to")
    refused = attach(2, "--env", build, file="wrong")
    assert refused.end() == 2
    assert "error: " in refused.told
    assert "the trainer refuses this player: a wrong token" in refused.told
    forwarders = [attach(0, "--env", build), attach(1, "--port", str(local))]
    forwarders[1].until("Waiting for the player")
    players = [by_hand(local, elsewhere.within)]
    if elsewhere.is_far:
        players.append(by_hand(port + 2))  # of this machine, so without the token
    else:
        forwarders.append(attach(2, "--env", build))
    trainer.until(r"Step: 2000\.")
    (player,) = psutil.Process(forwarders[0].process.pid).children()
    player.send_signal(signal.SIGKILL)
    assert trainer.end() == 0, trainer.told
    assert [forwarder.end() for forwarder in forwarders] == [0] * len(forwarders)
    assert [process.wait(60) for process in players] == [0] * len(players)
    assert (
        trainer.told.count("Restarting worker") == trainer.told.count("Restarting worker[0]") == 1
    )
    assert re.search(r"from \S+ to port \d+ is cut off: the peer sent a wrong token", trainer.told)
    assert checkpoint(tmp_path, "ppo")["learner"]["step"] >= 5000
