"""The `main` of every packed executable: command line, log, signals and exit code."""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.core.simulator import Simulator, no_state, state_of
from pipeline.errors import PipelineError, SettingsError, UnityException, brief, where
from pipeline.simulators import registry
from pipeline.wire.channels.state import encode

_log = logging.getLogger(__name__)
# Number of the option PR_SET_PDEATHSIG in linux/prctl.h; Python has no constant for it.
_PR_SET_PDEATHSIG = 1

_USAGE = """\
usage: {program} --mlagents-port PORT [options]

{summary}

An environment for a trainer that speaks the ML-Agents protocol. The trainer starts this executable,
which connects to it. Options may be written with one dash or two. Options of Unity's own players,
such as -screen-width 640, are ignored.

  --mlagents-port PORT   port on localhost where the trainer listens
  --num-agents N         {counted} in this process, before the trainer's num_areas
                         multiplies them ({n_agents} unless given)
  --compress             send images as PNG, as a Unity player does: smaller messages, more work;
                         numbers are rounded to multiples of 1/255
  --connect-timeout S    seconds to wait for the trainer to listen (30 unless given)
  -logFile FILE          write log lines to FILE instead of the standard error
  -nographics -batchmode accepted; there are no graphics
  --describe             print what the agents observe and do, and end
  --help                 print this and end
"""
_VALUED = ("mlagents-port", "num-agents", "connect-timeout", "logfile")
_FLAGS = ("nographics", "batchmode", "compress", "describe", "help")
# Options of Unity's players, which are accepted and ignored.
_UNITY_VALUED = (
    *("screen-width", "screen-height", "screen-quality", "screen-fullscreen", "window-mode"),
    *("monitor", "adapter", "gpu-index", "parenthwnd", "job-worker-count", "profiler-log-file"),
    "stacktracelogtype",
)
_UNITY_FLAGS = (
    *("nolog", "popupwindow", "single-instance", "show-screen-selector", "hidewindow"),
    *("timestamps", "silent-crashes", "no-stereo-rendering", "disable-gpu-skinning", "quit"),
)


def main(name: str, argv: Sequence[str], options: dict[str, Any] | None = None) -> int:
    """Run a simulator or bridge as an environment, with the `options` that were packed with it.

    Return the exit code: 0 after the trainer ended the conversation, 1 if there is no trainer or it
    is gone, 2 for a mistake in the arguments or parameters.
    """
    entry = registry.entry(name)
    chosen = dict(options or {})
    # A number of agents that was packed replaces the simulator's default; --num-agents replaces
    # both.
    n_agents = chosen.pop("n_agents", registry.n_agents_of(name, chosen))
    display = str(chosen.get("id", name))
    texts = {"summary": entry.summary, "counted": entry.counted, "n_agents": n_agents}
    usage = _USAGE.format(program=display, **texts)
    try:
        parsed = parse(argv)
    except PipelineError as error:
        sys.stderr.write(f"{display}: {error}\n")
        return 2
    if parsed.help:
        sys.stdout.write(usage)
        return 0
    # The trainer sends the number of areas later, in its answer to the greeting.
    per_area = parsed.n_agents or n_agents
    if parsed.describe:
        return _describe(name, per_area, chosen)
    if parsed.port is None:
        sys.stderr.write(f"{display}: --mlagents-port is missing.\n\n{usage}")
        return 2
    _set_up_log(parsed.log_file)
    if parsed.ignored:
        _log.info("Ignored arguments: %s", " ".join(parsed.ignored))
    _set_up_signals()
    return _run(name, parsed, parsed.port, per_area, chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutableArguments:
    """The parsed command line of an executable: Unity's arguments and this project's."""

    port: int | None = None  # TCP port that the trainer listens on; None if not given
    n_agents: int | None = None  # number of agents in one area; None for the simulator's default
    connect_timeout_s: float = 30.0  # longest wait for the trainer to listen, in seconds
    compress: bool = False  # whether images are sent as PNG
    log_file: str | None = None  # file for log lines; None for the standard error
    describe: bool = False  # whether to print the observations and actions, and to end
    help: bool = False  # whether to print the usage and end
    ignored: tuple[str, ...] = ()  # arguments of Unity's players that have no effect, as written


def parse(argv: Sequence[str]) -> ExecutableArguments:
    """Read the arguments of an executable; raise SettingsError for a mistake."""
    # argparse is not used: it accepts neither one dash instead of two nor capital letters.
    values: dict[str, str] = {}
    ignored = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals_sign, value = word.lstrip("-").partition("=")
        name = name.lower()
        is_option = word.startswith("-")
        # Unity has many options such as -force-vulkan, which choose a graphics interface.
        if is_option and (name in _UNITY_FLAGS or name.startswith("force-")):
            ignored.append(word)
        # The value of an ignored option is ignored, too.
        elif is_option and name in _UNITY_VALUED:
            ignored += [word, *(() if equals_sign else rest[:1])]
            rest = rest if equals_sign else rest[1:]
        elif not is_option or name not in _VALUED + _FLAGS:
            near = get_close_matches(name, _VALUED + _FLAGS, n=1)
            meant = f"did you mean --{near[0]}? " if near else ""
            raise SettingsError(
                f"'{brief(word)}' is not an option; {meant}--help lists all options."
            )
        elif name in _FLAGS:
            values[name] = "yes"
        elif equals_sign:
            values[name] = value
        elif rest:
            values[name] = rest.pop(0)
        else:
            raise SettingsError(f"{word}: the value is missing.")
    return ExecutableArguments(
        port=_integer(values, "mlagents-port", 1, 65535),
        n_agents=_integer(values, "num-agents", 1, 1_000_000),
        connect_timeout_s=_seconds(values.get("connect-timeout", "30")),
        compress="compress" in values,
        log_file=values.get("logfile"),
        describe="describe" in values,
        help="help" in values,
        ignored=tuple(ignored),
    )


def _integer(values: dict[str, str], name: str, low: int, high: int) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    # `isdigit` alone accepts digits of other writing systems.
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise SettingsError(f"--{name}: '{text}' is not a whole number from {low} to {high}.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    # This also refuses NaN, because every comparison with NaN is false.
    if not 0 < value < float("inf"):
        raise SettingsError(f"--connect-timeout: '{text}' is not a positive number of seconds.")
    return value


def _describe(name: str, n_agents: int, options: dict[str, Any]) -> int:
    try:
        with closing(registry.make(name, n_agents=n_agents, **options)) as simulator:
            sys.stdout.write(_description(simulator))
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _description(simulator: Simulator) -> str:
    steps = simulator.reset()
    paragraphs = []
    for name, spec in simulator.behavior_specs.items():
        n_asking = len(steps[name][0]) if name in steps else 0
        lines = [f"{name}: {n_asking} agents ask for a decision first"]
        for obs in spec.observation_specs:
            kind = "image (channels, height, width)" if len(obs.shape) == 3 else "vector"
            shape = obs.shape if len(obs.shape) > 1 else obs.shape[0]
            lines.append(f"  observes  {obs.name}: {kind} {shape}")
        if spec.action_spec.continuous_size:
            lines.append(f"  acts      {spec.action_spec.continuous_size} continuous actions")
        if spec.action_spec.discrete_branches:
            lines.append(f"  acts      branches of {spec.action_spec.discrete_branches} choices")
        paragraphs.append("\n".join(lines) + "\n")
    # The user is told whether the simulator gives its state, because only then does a resumed run
    # continue exactly (docs/explanation/resume.md).
    try:
        state = state_of(simulator)
        answer = None if state is None else f"gives its state: {len(encode(state))} bytes now"
    except ValueError as error:
        answer = f"gives no state: {error}"
    paragraphs.append(answer or f"gives no state: {no_state(simulator)}")
    return "\n".join(paragraphs) + "\n"


def _run(
    name: str, parsed: ExecutableArguments, port: int, per_area: int, options: dict[str, Any]
) -> int:
    from pipeline.simulators import client  # imported here, because the usage does not need it

    reported: list[BaseException] = []

    def report(error: BaseException) -> None:
        """Log an error; the last line is complete, because the trainer quotes it."""
        if error in reported:
            return
        reported.append(error)
        is_explained = isinstance(error, PipelineError)
        if not is_explained:
            _log.error("The environment failed:", exc_info=error)
        _log.error("%s: %s", options.get("id", name), error if is_explained else where(error))

    try:
        client.converse(
            partial(_make, name, per_area, options),
            port=port,
            connect_timeout_s=parsed.connect_timeout_s,
            compress=parsed.compress,
            report=report,
        )
    # A third-party environment may raise any exception, and may call `sys.exit` in a step.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        report(error)
        return (
            2 if isinstance(error, PipelineError) and not isinstance(error, UnityException) else 1
        )
    return 0


def _make(name: str, per_area: int, options: dict[str, Any], seed: int, areas: int) -> Simulator:
    simulator = registry.make(name, seed=seed, n_agents=per_area * areas, **options)
    gc.collect()
    gc.freeze()  # all objects made so far live until the end, so garbage collection can skip them
    return simulator


def _set_up_log(log_file: str | None) -> None:
    """Write log lines to `log_file`; to the standard error if it is None or cannot be written."""
    handler: logging.Handler = logging.StreamHandler()
    problem = None
    if log_file not in (None, "-"):
        try:
            Path(str(log_file)).parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(str(log_file), mode="w", encoding="utf-8")
        except OSError as error:
            problem = error
    logging.basicConfig(level=logging.INFO, handlers=[handler], format="%(levelname)s %(message)s")
    if problem is not None:
        _log.warning("-logFile: %s; log lines are written here instead.", problem)


def _set_up_signals() -> None:
    """Make this process end without a traceback at Ctrl+C, and when its parent process ends.

    Linux sends the parent-death signal when the thread that started this process ends (prctl(2)),
    so the handler checks whether the whole parent process is gone.
    """
    # The default handler prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()

    def leave_with_parent(_number: int, _frame: object) -> None:
        if os.getppid() != parent:
            with contextlib.suppress(OSError):
                # The line is not logged: the signal may have interrupted code that holds the log's
                # lock.
                os.write(
                    2, b"the process that started this environment is gone; the environment ends.\n"
                )
            # `sys.exit` is not used, because a library may catch the exception that it raises.
            os._exit(1)

    signal.signal(signal.SIGUSR1, leave_with_parent)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1), 0, 0, 0)
