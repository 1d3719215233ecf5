"""The public `pipeline.train`: the trainer's, also for environments of Gymnasium and PettingZoo.

These are bridged here, above the trainer: the stages of the DAG train in executables only, so a
change of the bridges must not make them train again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from pipeline import seeding, trainer
from pipeline.algos.process_group import launched
from pipeline.envs.in_process import InProcessEnvironment

if TYPE_CHECKING:
    from pipeline.trainer import TrainResult


@wraps(trainer.train)
def train(env: Any, settings: Any, *, seed: int, **options: Any) -> TrainResult:
    """Train every behavior of an environment."""
    several = isinstance(env, Sequence) and not isinstance(env, str)
    envs = env if several else [env]
    first = seeding.derive(seed, "environment") + launched()[0] * len(envs)
    envs = [_bridged(one, first + worker) for worker, one in enumerate(envs)]
    return trainer.train(envs if several else envs[0], settings, seed=seed, **options)


def _bridged(env: Any, seed: int) -> Any:
    """Return an environment of Gymnasium or PettingZoo as one of this project, others as given."""
    gymnasium, pettingzoo = map(sys.modules.get, ("gymnasium", "pettingzoo"))
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator

        return InProcessEnvironment(GymnasiumSimulator(id=env, seed=seed))
    if pettingzoo is not None and isinstance(env, pettingzoo.AECEnv | pettingzoo.ParallelEnv):
        from pipeline.simulators.bridges.pettingzoo_bridge import PettingZooSimulator

        return InProcessEnvironment(PettingZooSimulator(id=env, seed=seed))
    return env
