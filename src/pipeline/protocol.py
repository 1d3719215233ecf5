"""The old name of `core`, `wire` and `demos`."""

raise ImportError(
    "pipeline.protocol is now three packages: pipeline.core (specs, steps), pipeline.wire (messages, "
    "side channels) and pipeline.demos (.demo files)"
)
