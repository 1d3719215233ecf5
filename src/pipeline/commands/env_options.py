"""Options of `pipeline env build`, `list` and `fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def build_options(parser: argparse.ArgumentParser) -> None:
    """Of `pipeline env build`."""
    text = "one that `pipeline env list` shows, gymnasium:ID or pettingzoo:ID"
    parser.add_argument("name", help=text)
    parser.add_argument("-o", "--output", required=True, type=Path, help="the executable to write")
    parser.add_argument("--copies", type=int, default=None, help="environments in one process")
    for flag, text in (
        ("--arg", "keyword argument of the environment; may be repeated"),
        ("--option", "option of the bridge, such as teams=index; may be repeated"),
    ):
        parser.add_argument(flag, action="append", default=[], metavar="KEY=VALUE", help=text)


def fetch_options(parser: argparse.ArgumentParser) -> None:
    """Of `pipeline env fetch`."""
    parser.add_argument("environment", metavar="NAME|URL", help="of a manifest, or of an archive")
    manifest_option(parser)
    parser.add_argument("--sha256", default=None, help="of the archive; without it, only said")
    parser.add_argument(
        "--platform",
        choices=("linux", "darwin", "windows"),
        default=None,
        help="the system that the executable is for; default: this one",
    )
    parser.add_argument("--executable", default=None, help="path in the archive; default: the only")
    parser.add_argument("--max-unpacked-gb", type=float, default=16.0, help="default: %(default)s")
    parser.add_argument("--max-ratio", type=float, default=100.0, help="default: %(default)s")


def manifest_option(parser: argparse.ArgumentParser) -> None:
    """`--manifest`, of `list` and `fetch`."""
    parser.add_argument(
        "--manifest",
        action="append",
        default=[],
        metavar="FILE|URL",
        help="a registry manifest in ML-Agents' format; may be given several times",
    )
