"""`pipeline completion`: a script with which a shell completes commands, options and files."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from pipeline.cli.parser import Parser

SHELLS = ("bash", "zsh", "fish")


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")


def run(arguments: argparse.Namespace) -> str:
    """Return the completion script of a shell; it completes file names for options with a path."""
    import shtab

    # The parser that has read this command line has only the options of `pipeline completion`.
    parser: argparse.ArgumentParser = arguments.whole_parser()
    for action in _actions(parser):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # documented by shtab
    script: str = shtab.complete(parser, shell=arguments.shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # argparse has no public way to list a parser's options
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
