"""`pipeline attach`: bring a player of this machine to a trainer on another one."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from pipeline.commands.parser import Parser

DESCRIPTION = """\
Bring a Unity player, or any program that takes --mlagents-port, to a trainer on another machine.
Run this on the player's machine, once for each player. It says the token to the trainer, which a
player cannot do itself, and then passes on what both say, until the trainer ends. A player that
ends is brought back.

There is NO ENCRYPTION: who can read the network between the machines can read and change what is
said, though not learn the token. Use it in a network that you trust; anywhere else an ssh tunnel,
which needs neither this command nor a token:
  ssh -N -L 5004:localhost:5004 trainer-machine           and let the player call port 5004 here
"""

EPILOG = """\
example
  on the trainer's machine, 10.0.0.5
    openssl rand -hex 32 > token; chmod 600 token              and copy it to the players' machines
    pipeline learn my.yaml --attach 2 --listen 10.0.0.5 --token-file token
  on the players' machines
    pipeline attach --to 10.0.0.5:5004 --token-file token --env Game.x86_64
    pipeline attach --to 10.0.0.5:5005 --token-file token      then press Play in the Unity Editor

Exit code 0: the trainer has ended. See docs/reference/learn.md.
"""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline attach`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--to", required=True, metavar="HOST:PORT", help="where the trainer waits for this player")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the trainer's token; without it, that of the environment variable PIPELINE_TOKEN",
    )
    add(
        "--env",
        metavar="NAME",
        help="the player to start, named as for `pipeline learn`: a path, balance_ball, ...; "
        "without it, one is waited for that calls --port",
    )
    add(
        "--port",
        type=int,
        metavar="PORT",
        help="port of this machine where the player calls (default: 5004, the Unity Editor's; with "
        "--env one that the system chooses)",
    )
    add(
        "--timeout-wait",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the trainer (default: 60)",
    )
    add("--no-graphics", action="store_true", help="start the player without rendering")
    add(
        "--env-args",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="...",
        help="everything after this goes to the player, so give it last",
    )


def run(arguments: argparse.Namespace) -> None:
    """Relay the messages between player and trainer until the trainer has ended."""
    from pipeline.envs.forward import Trainer, forward
    from pipeline.envs.sources.programs import runs_headless
    from pipeline.envs.unity import UnityEnvironment
    from pipeline.protocol.token import VARIABLE, read_token
    from pipeline.stages.shared.named_env import executable_of

    # All options are checked before a player is built or started.
    host, port = _address(arguments.to)
    # Without a token the trainer may still accept: it asks for one only when it listens for
    # other machines.
    has_token = arguments.token_file is not None or VARIABLE in os.environ
    token = read_token(arguments.token_file) if has_token else None
    executable = None if arguments.env is None else executable_of(arguments.env)
    # Port 0 lets the system choose. The Editor only knows its own port.
    default_port = 0 if executable is not None else UnityEnvironment.DEFAULT_EDITOR_PORT
    forward(
        Trainer(host=host, port=port, token=token),
        port=default_port if arguments.port is None else arguments.port,
        executable=executable,
        no_graphics=arguments.no_graphics or (executable is not None and runs_headless(executable)),
        additional_args=arguments.env_args,
        timeout_s=arguments.timeout_wait,
    )


def _address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, where an IPv6 address stands in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"--to {text}: needs the form HOST:PORT, such as 10.0.0.5:5004")
    return host.removeprefix("[").removesuffix("]"), int(port)
