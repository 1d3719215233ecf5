"""`pipeline verify`: is a folder what the owner of a key has signed?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands.sign import SIGNATURE, hashing, refuse
from pipeline.errors import FetchError, SettingsError, one_line

if TYPE_CHECKING:
    import argparse

    from pipeline.commands.parser import Parser


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline verify`."""
    parser.add_argument("folder", type=Path, help="with the files and their signature")
    parser.add_argument(
        "--key", required=True, type=Path, metavar="FILE", help="public key of who signed, as PEM"
    )


def run(arguments: argparse.Namespace) -> str:
    """Compare every file with the signature; raise FetchError if one differs."""
    folder, key = arguments.folder, arguments.key
    signature = folder / SIGNATURE
    refuse(folder, key)
    if not signature.is_file():
        raise SettingsError(f"{signature}: there is none; `pipeline sign` writes it")
    from model_signing import verifying

    try:
        config = verifying.Config()  # type: ignore[no-untyped-call]  # it has no types there
        config.use_elliptic_key_verifier(public_key=key)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{key}: is no public key of an elliptic curve: {one_line(error)}"
        ) from error
    try:
        config.set_hashing_config(hashing()).verify(folder, signature)
    except Exception as error:  # of many kinds, all of them bad news
        text = f"{folder}: is not what {key} has signed: {one_line(error)}"
        raise FetchError(f"{text}; do not use it, get it anew") from error
    return f"{folder}: every file is as {key} has signed it."
