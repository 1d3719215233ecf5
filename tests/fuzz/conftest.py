"""Leaves out the fuzz tests on systems without Linux's /proc, from which they read the memory."""

from pathlib import Path

collect_ignore_glob = [] if Path("/proc/self/clear_refs").exists() else ["test_*.py"]
