"""The `pipeline` command, which a signal ends without a traceback also while it is imported."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def mlagents_learn() -> int:
    """Run `pipeline learn` under a name of ML-Agents, which `packages/mlagents` installs."""
    return main("learn")


def mlagents_push_to_hf() -> int:
    """Run `pipeline push` under ML-Agents' name."""
    return main("push")


def mlagents_load_from_hf() -> int:
    """Run `pipeline pull` under ML-Agents' name."""
    return main("pull")


def main(*words: str) -> int:
    """Run the command and give its exit code.

    Args:
        words: put before the command line's words; if given, help shows the name of this program.
    """
    # the background jobs of a shell ignore Ctrl+C, and keep ignoring it
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline import cli

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    name = Path(sys.argv[0]).name if words else None
    try:
        return cli.main([*words, *sys.argv[1:]], name=name)
    except KeyboardInterrupt:
        return 130
    finally:
        if interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
