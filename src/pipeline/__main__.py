"""The `pipeline` command; Ctrl+C ends it without a traceback, even during its imports."""

import signal
import sys
from pathlib import Path


def mlagents_learn() -> int:
    """Run `pipeline learn` as `mlagents-learn`, which `packages/mlagents` installs."""
    return main("learn")


def mlagents_push_to_hf() -> int:
    """Run `pipeline push` as `mlagents-push-to-hf`, ML-Agents' command."""
    return main("push")


def mlagents_load_from_hf() -> int:
    """Run `pipeline pull` as `mlagents-load-from-hf`, ML-Agents' command."""
    return main("pull")


def main(*words: str) -> int:
    """Run the command that the command line names, and return its exit code.

    Args:
        words: words to put before the command line's own words; if given, help shows the name of
            the program that was started.
    """
    # The handler is changed only if it is Python's own: background jobs of a shell ignore Ctrl+C,
    # and must continue to ignore it.
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        # With this handler, the system ends the process if Ctrl+C is pressed during the imports;
        # Python's own handler would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.cli import main as cli

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    name = Path(sys.argv[0]).name if words else None
    try:
        return cli.main([*words, *sys.argv[1:]], name=name)
    except KeyboardInterrupt:
        # Shells report 128 + SIGINT after Ctrl+C.
        return 130
    finally:
        if interrupts:
            # Ctrl+C ends the process without a traceback also while Python shuts down.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
