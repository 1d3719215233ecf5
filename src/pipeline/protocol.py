"""The old name of what is now in `core`, `wire` and `demos`; its import raises an error."""

raise ImportError(
    "pipeline.protocol is now pipeline.core (specs, steps), pipeline.wire (messages, channels) and "
    "pipeline.demos (.demo files)"
)
