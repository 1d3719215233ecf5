"""What the command lines share: a parser with subcommands, and tables for the terminal."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, with exit code 2.

    Attributes:
        retired: destinations of options that an abbreviation means only when no other fits.
    """

    retired: Collection[str] = ()
    _subcommands: argparse._SubParsersAction[Parser] | None = None

    def add_command(
        self, name: str, text: str, work: Callable[[argparse.Namespace], str | None] | None = None
    ) -> Parser:
        """Add a subcommand, which like all others takes `--debug`.

        Args:
            name: the word on the command line.
            text: one line of help, from which its description is made.
            work: runs it and returns what to print; None when it has subcommands itself.
        """
        # argparse allows one group of subcommands for each parser, made when the first is added.
        if self._subcommands is None:
            self._subcommands = self.add_subparsers(
                title="commands", metavar="COMMAND", required=True
            )
        command = self._subcommands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + "."
        )
        command.add_argument("--debug", action="store_true", help="detailed log, and tracebacks")
        if work is not None:
            command.set_defaults(work=work)
        return command

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and where its help is."""
        sys.stderr.write(f"error: {message}; `{self.prog} --help` lists what is possible\n")
        sys.exit(2)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Return what an abbreviation may mean; argparse has no public way to rank candidates."""
        options: list[Any] = super()._get_option_tuples(option_string)
        present = [one for one in options if one[0].dest not in self.retired]
        return present or options


def aligned(rows: Sequence[Sequence[str]], *, first_number: int | None = None) -> list[str]:
    """Return rows as lines with columns of equal width.

    Args:
        rows: the cells, all rows equally many.
        first_number: the column from which on cells stand at the right; None for no such column.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    n_texts = len(widths) if first_number is None else first_number
    return [
        "  ".join(
            cell.ljust(width) if column < n_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
