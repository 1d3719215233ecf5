"""`pipeline sign`: sign a folder with a policy, by OpenSSF Model Signing and the user's key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import SettingsError, one_line
from pipeline.files import write_whole

if TYPE_CHECKING:
    import argparse

    from pipeline.commands.parser import Parser

SIGNATURE = "model.sig"


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline sign`."""
    parser.add_argument("folder", type=Path, help="that `pipeline card` wrote, or any other")
    parser.add_argument(
        "--key", required=True, type=Path, metavar="FILE", help="private key, elliptic, as PEM"
    )
    parser.add_argument(
        "--new-key", action="store_true", help="make it now, and the public one as FILE.pub"
    )


def run(arguments: argparse.Namespace) -> str:
    """Write the signature of every file into the folder."""
    folder, key = arguments.folder, arguments.key
    signature = folder / SIGNATURE
    refuse(folder, key, inside=arguments.new_key)
    if arguments.new_key:
        _make(key)
    from model_signing import signing

    try:
        config = signing.Config()  # type: ignore[no-untyped-call]  # it has no types there
        config.use_elliptic_key_signer(private_key=key)
        config.set_hashing_config(hashing()).sign(folder, signature)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{key}: is no private key of an elliptic curve: {one_line(error)}"
        ) from error
    note = f"{key}.pub is for those who verify; keep {key}. " if arguments.new_key else ""
    return f"Wrote {signature}. {note}Verify: pipeline verify {folder} --key PUBLIC_KEY"


def refuse(folder: Path, key: Path, *, inside: bool = False) -> None:
    """Refuse a missing folder or key, an existing new key, and a key inside the folder."""
    if not folder.is_dir():
        raise SettingsError(f"{folder}: there is no such folder; `pipeline card` writes one")
    if inside and (key.exists() or Path(f"{key}.pub").exists()):
        raise SettingsError(f"{key}: is there already; leave out --new-key to use it")
    if not inside and not key.is_file():
        raise SettingsError(f"{key}: there is no such key; `pipeline sign --new-key` makes one")
    if key.resolve().is_relative_to(folder.resolve()):
        raise SettingsError(f"{key}: lies in {folder}, where it would be published; move it out")


def hashing() -> Any:
    """Return the hashing configuration: every file but the signature itself."""
    from model_signing import hashing

    config = hashing.Config()  # type: ignore[no-untyped-call]  # it has no types there
    # `ignore_git_paths` is on by default, and a file in `.git` would then go unsigned.
    return config.set_ignored_paths(paths=[SIGNATURE], ignore_git_paths=False)


def _make(key: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    text = private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    # Made with these rights from the start: between a write and a chmod others could read the
    # key. O_EXCL refuses one that appeared meanwhile.
    with os.fdopen(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(text)
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_whole(f"{key}.pub", public)
