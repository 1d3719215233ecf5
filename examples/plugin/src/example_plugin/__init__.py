"""A trainer, a reward signal, an encoder, a simulator and a sink for rl-pipeline."""
