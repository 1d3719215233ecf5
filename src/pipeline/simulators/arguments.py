"""The command line of an environment executable: what a Unity player takes, and a little more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: {program} --mlagents-port PORT [options]

{summary}

An environment for a trainer that speaks the ML-Agents protocol: it connects to the trainer, which
starts it. Options may be written with one dash or two; others are ignored, as by a Unity player.

  --mlagents-port PORT   port on localhost where the trainer listens
  --num-agents N         {counted} in this process, before the trainer's num_areas
                         multiplies them ({n_agents} unless given)
  --compress             send images as PNG, as a Unity player does: less to send, more to do;
                         numbers are rounded to multiples of 1/255
  --connect-timeout S    seconds to wait for the trainer to listen (30 unless given)
  -logFile FILE          write log lines to FILE instead of the standard error
  -nographics -batchmode accepted; there are no graphics
  --describe             print what the agents observe and do, and end
  --help                 print this and end
"""
_VALUED = ("mlagents-port", "num-agents", "connect-timeout", "logfile")
_FLAGS = ("nographics", "batchmode", "compress", "describe", "help")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlayerArguments:
    """The parsed command line."""

    port: int | None = None
    """Where the trainer listens; None if not given."""
    n_agents: int | None = None
    """Agents of one area; None for the simulator's own number."""
    connect_timeout_s: float = 30.0
    """Longest wait for the trainer to listen."""
    compress: bool = False
    """Whether images are sent as PNG."""
    log_file: str | None = None
    """File for log lines; None for the standard error."""
    describe: bool = False
    """Whether only the description is wanted."""
    help: bool = False
    """Whether only the usage is wanted."""
    ignored: tuple[str, ...] = field(default=())
    """What was not understood, as written."""


def parse(argv: Sequence[str]) -> PlayerArguments:
    """Read the arguments of an executable.

    Raises:
        SettingsError: A known option lacks its value, or has one of the wrong kind.
    """
    values: dict[str, str] = {}
    ignored = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, given, value = word.lstrip("-").partition("=")
        name = name.lower()
        if not word.startswith("-") or name not in _VALUED + _FLAGS:
            ignored.append(word)
        elif name in _FLAGS:
            values[name] = "yes"
        elif given:
            values[name] = value
        elif rest:
            values[name] = rest.pop(0)
        else:
            raise SettingsError(f"{word}: a value must follow.")
    n_agents = _whole(values, "num-agents", 1, 1_000_000)
    return PlayerArguments(
        port=_whole(values, "mlagents-port", 1, 65535),
        n_agents=n_agents,
        connect_timeout_s=_seconds(values.get("connect-timeout", "30")),
        compress="compress" in values,
        log_file=values.get("logfile"),
        describe="describe" in values,
        help="help" in values,
        ignored=tuple(ignored),
    )


def _whole(values: dict[str, str], name: str, low: int, high: int) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise SettingsError(f"--{name}: '{text}' is not a whole number from {low} to {high}.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise SettingsError(f"--connect-timeout: '{text}' is not a positive number of seconds.")
    return value
