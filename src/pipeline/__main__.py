"""The `pipeline` command, which a signal ends without a traceback also while it is imported."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command and give its exit code."""
    # a shell's background jobs ignore Ctrl+C, and go on to do so
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline import cli

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return cli.main()
    except KeyboardInterrupt:
        return 130
    finally:
        if interrupts:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
