"""Storage of rollouts and replays, groups of agents, and demonstrations; without torch."""
