"""What the frame measures, it reads from Linux's /proc."""

from __future__ import annotations

from pathlib import Path

collect_ignore = [
    "test_demo.py",  # 12.20
    "test_environment.py",  # 12.20
    "test_onnx.py",  # 12.21
    "test_runs.py",  # 12.23
]
collect_ignore_glob = [] if Path("/proc/self/clear_refs").exists() else ["test_*.py"]
