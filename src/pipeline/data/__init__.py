"""Storage of rollouts and replays, slots of agents, and groups of agents; without torch."""
