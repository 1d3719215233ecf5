"""What the frame measures, it reads from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

collect_ignore_glob = [] if Path("/proc/self/clear_refs").exists() else ["test_*.py"]
