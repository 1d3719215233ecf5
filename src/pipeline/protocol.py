"""The old name of `core`, `wire` and `demos`."""

raise ImportError(
    "pipeline.protocol is now pipeline.core (specs, steps), pipeline.wire (messages, channels) and "
    "pipeline.demos (.demo files)"
)
