"""Minari datasets that are recorded here, without a network."""

from __future__ import annotations

import warnings

import numpy as np
from gymnasium import spaces


def stacked(space, values):
    """Return consecutive values of a space in Minari's form: a tree of arrays."""
    if isinstance(space, spaces.Dict):
        return {k: stacked(part, [value[k] for value in values]) for k, part in space.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(stacked(part, [value[index] for value in values]) for index, part in parts)
    return np.stack([np.asarray(value, dtype=space.dtype) for value in values])


def collect(name, env, *, acted=None, draw=None, seeds=range(3)):
    """Create a dataset with an episode for each seed.

    `acted` is the dataset's action space; `draw` returns the action of a step, given its number.
    """
    import minari

    seen, acted = env.observation_space, acted or env.action_space
    acted.seed(1)
    buffers = []
    for seed in seeds:
        obs, actions, rewards, flags = [env.reset(seed=seed)[0]], [], [], (False, False)
        while not any(flags):
            actions.append(draw(len(actions)) if draw else acted.sample())
            after, reward, *flags, _ = env.step(actions[-1])
            obs.append(after)
            rewards.append(float(reward))
        last = np.arange(len(rewards)) == len(rewards) - 1
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                id=len(buffers),
                observations=stacked(seen, obs),
                actions=stacked(acted, actions),
                rewards=rewards,
                terminations=last & flags[0],
                truncations=last & flags[1],
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the author is unknown
        return minari.create_dataset_from_buffers(
            name,
            buffers,
            env=env if env.spec is not None else None,
            observation_space=seen,
            action_space=acted,
            jpeg_encoding=False,
        )
