"""Plays an environment for a while, and writes down which modules that took.

    python -m pipeline.simulators.bridges.trace OUTPUT '{"simulator": NAME, "options": {...}}'

`bridges.needs` runs this in a process of its own, where nothing else is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from pipeline.errors import PipelineError
from pipeline.simulators import registry

N_STEPS = 300
"""Enough for most episodes to end and begin anew, where modules may be imported late."""


def main(target: str, described: str) -> int:
    """Write `{module: file}` of what was imported to `target` as JSON; gives an exit code."""
    wanted = json.loads(described)
    before = set(sys.modules)
    try:
        _play(wanted["simulator"], {**wanted["options"], "n_agents": 2})
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    modules = {
        name: str(getattr(module, "__file__", None) or "")
        for name, module in sorted(sys.modules.items())
        if name not in before
    }
    Path(target).write_text(json.dumps(modules), encoding="utf-8")
    return 0


def _play(name: str, options: dict[str, object]) -> None:
    simulator = registry.make(name, seed=0, **options)  # type: ignore[arg-type]  # as JSON has them
    rng = np.random.default_rng(0)
    specs = simulator.behavior_specs
    steps = simulator.reset()
    for _ in range(N_STEPS):
        steps = simulator.step(
            {
                behavior: specs[behavior].action_spec.random_action(len(decisions), rng)
                for behavior, (decisions, _) in steps.items()
            }
        )
    simulator.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
