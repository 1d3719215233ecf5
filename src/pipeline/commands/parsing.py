"""Command lines: mistakes are told on one line, and retired options do not crowd abbreviations."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Collection


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one line, with exit code 2.

    Attributes:
        retired: destinations of options that an abbreviation means only when no other fits.
    """

    retired: Collection[str] = ()

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and where its help is."""
        sys.stderr.write(f"error: {message}; `{self.prog} --help` lists what is possible\n")
        sys.exit(2)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """What an abbreviation may mean; argparse has no public way to rank candidates."""
        found: list[Any] = super()._get_option_tuples(option_string)
        present = [one for one in found if one[0].dest not in self.retired]
        return present or found
