"""Parts that all commands share: a parser with subcommands, and tables for the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import brief, shell_command, shown
from pipeline.files import as_typed

# The search for similar names would not find these commands.
_OUR_NAMES = {"train": "learn", "eval": "evaluate"}
"""For names of commands in other programs: the name of the same command here."""
BY_SSH = (
    "players on other machines connect through ssh: `ssh -N -L 5004:localhost:5004 TRAINER` on the "
    "player's machine (docs/reference/learn.md)"
)
_SIGNING = "sign the folder with cosign or gpg (docs/how-to/share.md)"
_REMOVED = {"attach": BY_SSH, "sign": _SIGNING, "verify": _SIGNING}
"""For each removed command: what to do instead."""
_STAGES = {
    "report": "`pipeline run` makes it, `pipeline compare` prints its tables",
    "sweep": "`pipeline run SWEEP` runs it after the trials",
    "export": "`pipeline run EXPERIMENT --stage export` runs it, and `pipeline learn` does it",
    "pretrain": "`pipeline run EXPERIMENT --stage pretrain` runs it",
}
"""For each stage of the pipeline, which is not a command: how to run it."""
_TYPES: dict[str, type] = {"N": int, "X": float, "FILE": Path, "FOLDER": Path, "DIR": Path}
"""The type of an option's value, by the value's name in the help."""
_MAX_PATH_WORDS = 8
"""Maximum number of words in a path with blanks."""


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line and exits with code 2.

    Attributes:
        retired: destinations of options that an abbreviation selects only if no other option fits.
        given_elsewhere: function that returns where to give the setting that an unknown option
            names; None if it is no setting.
    """

    retired: Collection[str] = ()
    given_elsewhere: Callable[[str], str | None] | None = None
    _subcommands: argparse._SubParsersAction[Parser] | None = None

    def add_command(
        self, name: str, text: str, work: Callable[[argparse.Namespace], str | None] | None = None
    ) -> Parser:
        """Add a subcommand with a line of help; every subcommand takes `--debug`.

        `work` runs the command and returns the text to print; None for a command with subcommands.
        """
        # argparse allows one group of subcommands per parser; the first subcommand makes it.
        if self._subcommands is None:
            self._subcommands = self.add_subparsers(
                title="commands", metavar="COMMAND", required=True, parser_class=Parser
            )
        command = self._subcommands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + "."
        )
        option(command, "--debug", "detailed log, and tracebacks")
        if work is not None:
            command.set_defaults(work=work)
        return command

    # argparse prints its whole usage before an error, which hides the error.
    def error(self, message: str) -> NoReturn:
        """Print the mistake and the command that shows the help, and exit with code 2."""
        mark = "" if message.endswith("?") else ";"
        sys.stderr.write(f"error: {shown(message)}{mark} `{self.prog} --help` lists the options\n")
        sys.exit(2)

    def parse_known_args(  # type: ignore[override]  # no caller of ours gives only a namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse a command line, and refuse words that the command does not take."""
        words = sys.argv[1:] if args is None else list(args)
        # These checks come before argparse's, which would report a misspelled required option as
        # missing.
        own = self._own_words(words)
        if self._subcommands is None:
            self._refuse_split_paths(own)
        elif not {*words} - {"--debug"}:
            self.print_help(sys.stderr)
            sys.exit(2)
        arguments, unknown = super().parse_known_args(words, namespace)
        # argparse would report the error later, with the help of the main parser.
        if unknown and self._subcommands is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        self._warn_of_options_in_the_rest(arguments)
        return arguments, unknown

    def _warn_of_options_in_the_rest(self, arguments: Any) -> None:
        """Warn of this command's options among the words that it passes to an executable."""
        for action in self._actions:
            rest = getattr(arguments, action.dest, None) or []
            if action.nargs != argparse.REMAINDER or isinstance(rest, str):
                continue
            # This is only a warning, because the executable may have an option of the same name.
            for flag in [word for word in rest if word in self._option_string_actions]:
                sys.stderr.write(
                    f"[WARNING] {flag} comes after {action.option_strings[-1]}, so it is passed to "
                    f"the executable; to give it to `{self.prog}`, put it before "
                    f"{action.option_strings[-1]}\n"
                )

    def _own_words(self, words: Sequence[str]) -> Sequence[str]:
        """Return the words before a subcommand, or before the arguments of an executable.

        Unknown options among these words are refused.
        """
        for index, word in enumerate(words):
            name = word.partition("=")[0]
            if word == "--" or (self._subcommands is not None and not word.startswith("-")):
                return words[:index]
            # argparse reads any word with a space as a value.
            if not word.startswith("--") or " " in name:
                continue
            # An exact name wins over abbreviations, as in argparse.
            exact = self._option_string_actions.get(name)
            options = [exact] if exact else [match[0] for match in self._get_option_tuples(word)]
            if not options:
                self.error(f"unrecognized arguments: {name}{self._proposed_option(name)}")
            # All words after this option belong to the executable.
            if options[0].nargs == argparse.REMAINDER:
                return words[:index]
            if options[0].nargs == 0:
                self._refuse_value_of_switch(words[index:])
        return words

    def _refuse_value_of_switch(self, words: Sequence[str]) -> None:
        """Refuse a value of a switch, such as `--resume=True`, which other programs accept."""
        flag, equals, value = words[0].partition("=")
        value = value if equals else next(iter(words[1:]), "")
        if equals or value.lower() in ("true", "false"):
            no = value.lower() in ("false", "no", "off", "0")
            self.error(f"{flag} takes no value; {'leave it out' if no else f'give {flag} alone'}")

    def _refuse_split_paths(self, words: Sequence[str]) -> None:
        """Refuse a path with blanks that the shell has split into words."""
        for first in range(len(words)):
            # Each group of adjacent words is tried as one path.
            for n in range(2, _MAX_PATH_WORDS):
                parts = words[first : first + n]
                if len(parts) < n or parts[-1].startswith("-") or parts[0].startswith("-"):
                    break
                path = " ".join(parts)
                if not Path(parts[-1]).exists() and as_typed(path) is not None:
                    self.error(f"a path with a blank needs quotes: {shell_command(path)}")

    def _proposed_option(self, name: str) -> str:
        elsewhere = self.given_elsewhere and self.given_elsewhere(name)
        if elsewhere:
            return f"; {elsewhere}"
        # Words are compared without dashes, which would count as common letters.
        flags = {flag.strip("-"): flag for flag in self._option_string_actions}
        actions = self._option_string_actions
        present = [word for word, flag in flags.items() if actions[flag].dest not in self.retired]
        near = _nearest(name.strip("-"), present) or _nearest(name.strip("-"), flags)
        return f"; did you mean {flags[near]}?" if near else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown choice and propose a similar one, as argparse does from Python 3.14."""
        choices = action.choices
        near = None
        if self._subcommands is not None and action is self._subcommands and value in _REMOVED:
            self.error(f"the command {value!r} was removed: {_REMOVED[value]}")
        if self._subcommands is not None and value in _STAGES and value not in (choices or ()):
            self.error(f"{value!r} is a stage and no command: {_STAGES[value]}")
        if choices is not None and value not in choices:
            meant = _OUR_NAMES.get(str(value))
            near = meant if meant in choices else _nearest(str(value), choices)
        # Without a similar choice, argparse's own message lists the choices.
        if near is None:
            super()._check_value(action, value)
        elif self._subcommands is not None and action is self._subcommands:
            # The parser of the proposed command reports the error, so that the error names the
            # help of this command.
            self._subcommands.choices[near].error(f"no command {value!r}; did you mean {near!r}?")
        else:
            message = f"invalid choice: {value!r}; did you mean {near!r}?"
            raise argparse.ArgumentError(action, message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        options: list[Any] = super()._get_option_tuples(option_string)
        present = [option for option in options if option[0].dest not in self.retired]
        return present or options


def option(parser: argparse._ActionsContainer, spec: str, text: str, **more: Any) -> None:
    """Add the option `spec`, such as `-o --output FILE`; without a value's name it is a switch.

    The value's name sets its type, unless `more` has a type; the help shows the default, if `more`
    has one.
    """
    flags = [word for word in spec.split() if word.startswith("-")]
    # If `spec` ends with a flag, the option takes no value.
    metavar = spec.rpartition(" ")[2]
    if metavar in flags:
        more = {"action": "store_true"} | more
    else:
        more = {"metavar": metavar, "type": _TYPES.get(metavar, str)} | more
    # A default of 0 or None would say nothing in the help. An option that may be repeated has a
    # list as its default, which is empty.
    if more.get("default") and more.get("action") != "append":
        text += "; default: %(default)s" if text else "default: %(default)s"
    parser.add_argument(*flags, help=text, **more)


def _nearest(word: str, candidates: Iterable[Any]) -> str | None:
    return next(
        iter(get_close_matches(word, [str(candidate) for candidate in candidates], n=1)), None
    )


def aligned(rows: Sequence[Sequence[str]], *, first_number: int | None = None) -> list[str]:
    """Return rows as lines with aligned columns; columns from `first_number` on align right."""
    rows = [[brief(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    n_texts = len(widths) if first_number is None else first_number
    return [
        "  ".join(
            cell.ljust(width) if column < n_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
