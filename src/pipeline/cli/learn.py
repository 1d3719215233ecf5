"""`pipeline learn`: all options of any release of `mlagents-learn`.

`learn_run` does the work. It is imported late, because its imports take seconds, and mistakes in
the command line are reported before.
"""

import argparse
import logging
import sys
from difflib import get_close_matches
from typing import Any

from pipeline import __version__, machine
from pipeline.cli.learn_settings import GROUPS, OPTIONS, Option, flags_named, plan_of
from pipeline.cli.parser import BY_SSH, Parser

_log = logging.getLogger(__name__)

_INSTEAD = dict.fromkeys(
    ("arg", "option"),
    "`pipeline env build ENV -o FILE` takes --arg and --option; then give --env FILE",
) | dict.fromkeys(("listen", "token_file"), f"it was removed; {BY_SSH}")
"""For options that were removed, or that belong to another command: what to do instead."""

DESCRIPTION = """\
Train every behavior of an environment with a trainer configuration in ML-Agents' format.

Without CONFIG every behavior gets the built-in PPO settings. An option on the command line wins
over the configuration file, and the file wins over the defaults: `--num-envs=1` overrides 4 in the
file.
"""

EPILOG = """\
examples
  pipeline learn config/ppo/3DBall.yaml --env balance_ball --run-id first
  pipeline learn config/ppo/CartPole.yaml --env gymnasium:CartPole-v1 --run-id cart
  pipeline learn my.yaml --env my_env:make --run-id own          make() of my_env.py in this folder
  pipeline learn config/ppo/3DBall.yaml --run-id editor          then press Play in the Unity Editor
  pipeline learn my.yaml --env Game --run-id big --num-envs 4 --no-graphics --time-scale 50
  pipeline learn my.yaml --run-id by-hand --attach 2      then start players, on ports 5004 and 5005
  pipeline learn my.yaml --env Game --run-id big --resume        continue a stopped run
  pipeline learn my.yaml --env Game --run-id next --initialize-from big
  pipeline learn my.yaml --env Game --run-id big --resume --inference     watch without learning
  pipeline learn my.yaml --env Game --run-id a --env-args --level 7       arguments of the game

files in results/<run-id>/
  <Behavior>.onnx                   the policy for Unity
  <Behavior>/checkpoint.pt          the state that --resume continues; and events.out.tfevents.*
  configuration.yaml                every setting of the run, itself a valid CONFIG
  progress.csv                      the learning curve
  run_logs/                         timers.json, Player-<worker>.log

Ctrl+C saves and stops; the same command with --resume continues. See docs/reference/learn.md.
"""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline learn`; only options that are given become attributes."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [CONFIG] [options]"
    text = "trainer configuration in ML-Agents' format (default: built-in settings)"
    parser.add_argument("config", nargs="?", metavar="CONFIG", help=text)
    version, text = f"pipeline {__version__}", "print the version, and exit"
    parser.add_argument("--version", action="version", version=version, help=text)
    groups = {name: parser.add_argument_group(name, text) for name, text in GROUPS.items()}
    for option in OPTIONS:
        groups[option.group].add_argument(option.flag, **_arguments(option))
    parser.retired = {option.dest for option in OPTIONS if option.note is not None}
    parser.given_elsewhere = _given_elsewhere


def _given_elsewhere(option: str) -> str | None:
    """Return where to give the setting or sink that an unknown option names, or None."""
    from pipeline.settings.project.experiments import SINKS
    from pipeline.settings.trainer.schema import WORDS, places_in_behavior

    key = option.strip("-").replace("-", "_")
    if key in _INSTEAD:
        return _INSTEAD[key]
    if key in SINKS.ours:
        return f"give --track {key}"
    if key == "config":
        return "CONFIG is given without an option"
    places = places_in_behavior()
    # The cutoff is high, because most mistyped words are options, and the parser itself proposes
    # the nearest option.
    options = {option.dest for option in OPTIONS if not option.note}
    near = get_close_matches(key, places.keys() - options, n=1, cutoff=0.9)
    place = WORDS[key][0] if key in WORDS else places[near[0]] if near else None
    return place and f"{place} is a key of CONFIG, under a behavior's name"


def run(arguments: argparse.Namespace) -> str:
    """Train, and return where the results are; a further learner of torchrun exits instead."""
    if hasattr(arguments, "portable"):
        machine.restart_in_portable_mode()
    from pipeline.algos.process_group import launched

    if launched()[0] > 0:
        # This process is a further learner: the first learner has the settings.
        from pipeline.trainer.worker import work

        sys.exit(work())
    from pipeline.envs.named_env import environment_of

    plan = plan_of(arguments)  # this reports mistakes before imports that take seconds
    env = plan.settings.env_settings.env_path
    if env is None and not hasattr(arguments, "attach"):
        _log.info("No --env: waiting for the Unity Editor; --env NAME uses another environment.")
    if env is not None:
        with flags_named(plan.flags):
            environment_of(env)
    from pipeline.cli.learn_run import learn

    return learn(plan)


def _arguments(option: Option) -> dict[str, Any]:
    """Return the arguments of `add_argument`; values are checked later, with the settings."""
    # Options have no defaults, because only given options may win over the configuration file.
    common = {"dest": option.dest, "default": argparse.SUPPRESS, "help": option.help}
    if option.metavar is None:
        return {**common, "action": "store_true"}
    if option.metavar == "...":
        return {**common, "nargs": argparse.REMAINDER}
    if option.flag == "--track":  # this is the only option that may be repeated
        return {**common, "metavar": option.metavar, "action": "append"}
    kind = _number if option.metavar in ("N", "X", "S", "PORT") else str
    return {**common, "metavar": option.metavar, "type": kind}


def _number(text: str) -> int | float | str:
    """Return the number in a text, or the text itself, which the check of settings then refuses."""
    # int is tried first, so that `--num-envs 4` gives 4 and not 4.0.
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
