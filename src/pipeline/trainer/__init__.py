"""The loop that turns steps into updates, checkpoints and summaries."""
