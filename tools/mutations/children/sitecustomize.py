"""Imported by every Python process that a test starts while mutations are tried."""

import os
import sys

if os.environ.get("PIPELINE_MUTATIONS"):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120  # quicker to import
    import inside

    inside.be_child()
