"""Hunters that close in from two sides, and a runner that looks where it gets away farthest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import tag as game

if TYPE_CHECKING:
    from pipeline.arrays import AnyArray
    from pipeline.protocol.steps import DecisionSteps

_N_DIRECTIONS = 16
_ANGLES = np.arange(_N_DIRECTIONS) * (2 * np.pi / _N_DIRECTIONS)
_DIRECTIONS = np.stack((np.cos(_ANGLES), np.sin(_ANGLES)), axis=1)
_LOOK_AHEAD = 4
_CORNER_FEAR, _DETOUR = 0.35, 0.5


def hunter(steps: DecisionSteps) -> ActionTuple:
    """The nearer of the two goes straight for the runner, the other between it and the middle."""
    own, mate, runner = np.split(steps.obs[0][:, :6], 3, axis=1)
    nearer = _length(runner) <= _length(runner - mate)
    cut_off = runner - _DETOUR * (own + runner)
    goal = np.where((nearer | (_length(runner) < 2 * game.REACH))[:, None], runner, cut_off)
    return ActionTuple(continuous=_towards(goal))


def runner(steps: DecisionSteps) -> ActionTuple:
    """Of sixteen directions, take the one that ends farthest from the hunters and from corners."""
    obs = steps.obs[0]
    own, near, far = np.split(obs[:, :6], 3, axis=1)
    step = _LOOK_AHEAD * game.RUNNER_SPEED * _DIRECTIONS
    place = np.clip(own[:, None] + step, -1.0, 1.0)
    moved = place - own[:, None]
    to_near, to_far = _length(near[:, None] - moved), _length(far[:, None] - moved)
    safety = np.minimum(to_near, to_far) + 0.3 * np.maximum(to_near, to_far)
    corner = np.abs(place).min(axis=2) + 0.5 * np.abs(place).max(axis=2)
    best = (safety - _CORNER_FEAR * corner).argmax(axis=1)
    return ActionTuple(continuous=_DIRECTIONS[best])


def _length(vector: AnyArray) -> AnyArray:
    return np.asarray(np.sqrt((vector * vector).sum(axis=-1)))


def _towards(goal: AnyArray) -> AnyArray:
    """Unit vectors [N, 2] towards `goal`."""
    return goal / np.maximum(_length(goal), 1e-6)[:, None]
