"""What a simulator's agents observe and do, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.protocol.simulator import Simulator


def description(simulator: Simulator) -> str:
    """One paragraph per behavior; begins an episode to count its agents."""
    steps = simulator.reset()
    paragraphs = []
    for name, spec in simulator.behavior_specs.items():
        asking = len(steps[name][0]) if name in steps else 0
        lines = [f"{name}: {asking} agents ask for a decision first"]
        for obs in spec.observation_specs:
            kind = "image (channels, height, width)" if len(obs.shape) == 3 else "vector"
            shape = obs.shape if len(obs.shape) > 1 else obs.shape[0]
            lines.append(f"  observes  {obs.name}: {kind} {shape}")
        if spec.action_spec.continuous_size:
            lines.append(f"  acts      {spec.action_spec.continuous_size} continuous actions")
        if spec.action_spec.discrete_branches:
            lines.append(f"  acts      branches of {spec.action_spec.discrete_branches} choices")
        paragraphs.append("\n".join(lines) + "\n")
    return "\n".join(paragraphs)
