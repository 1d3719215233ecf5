"""Conversion of an environment's observations for a policy, and of the policy's actions back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, BoolArray, FloatArray, IntArray
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.errors import ExportError, PipelineError
from pipeline.export.contract import OLDEST_VERSION
from pipeline.export.layout import ModelDescription
from pipeline.simulators.bridges.batches import Codec


class EnvironmentForm:
    """Observations and actions in the spaces of a Gymnasium or PettingZoo environment.

    Args:
        text: both spaces, as `space_text.to_text` wrote them into the policy's file.
        where: name of the policy in messages.

    Raises:
        ExportError: `to_text` did not write this text.
    """

    def __init__(self, text: str, where: str) -> None:
        from pipeline.simulators.bridges.batches import Codec
        from pipeline.simulators.bridges.space_text import from_text

        try:
            known = from_text(text)
            self._obs_space, self._action_space = known["observation"], known["action"]
            options = {"visual": known["visual"], "scale": known["scale"]}
            self._codec: Codec = Codec(self._obs_space, self._action_space, where=where, **options)
        except (ValueError, KeyError, TypeError, PipelineError) as error:
            raise ExportError(f"{where}: its description of spaces is broken: {error}") from error
        self._where = where

    def rows(
        self, observation: Any, action_mask: Any
    ) -> tuple[list[FloatArray], list[BoolArray] | None, bool]:
        """Return observations and masks of N agents, and whether `observation` had an axis N.

        Args:
            observation: the observation of one environment, or of N vectorized environments.
            action_mask: 1 where allowed, as `action_space.sample` takes it, for each environment;
                None for the observation's own mask.

        Raises:
            PipelineError: The observation or the mask does not fit its space.
        """
        is_batch = self._is_batch(observation)
        rows = range(len(_first_part(observation))) if is_batch else (None,)
        observations = [_of_row(observation, row) for row in rows]
        arrays = self._codec.observations.empty(len(rows))
        for row, one in enumerate(observations):
            self._codec.observations.put(arrays, row, one)
        info = {} if action_mask is None else {"action_mask": action_mask}
        masks = [
            self._codec.mask(one, {key: _of_row(mask, row) for key, mask in info.items()})
            for one, row in zip(observations, rows, strict=True)
        ]
        actions = self._codec.actions
        if not actions.spec.discrete_size or all(mask is None for mask in masks):
            return arrays, None, is_batch
        forbidden = np.stack([actions.forbidden(mask) for mask in masks])
        return arrays, actions.masks(forbidden), is_batch

    def native(self, actions: ActionTuple, is_batch: bool) -> Any:
        """Return actions in the environment's action space, with an axis N if `is_batch`."""
        native = self._codec.actions.native(actions)
        if not is_batch:
            return native[0]
        from gymnasium.vector import utils

        together: Any = utils.create_empty_array(self._action_space, len(native))
        return utils.concatenate(self._action_space, native, together)

    def _is_batch(self, observation: Any) -> bool:
        """Return whether the observation's first axis is the axis of vectorized environments."""
        leaf = self._codec.observations.leaves[0]
        value, space = observation, self._obs_space
        try:
            for key in leaf.path:
                value, space = value[key], space[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ExportError(
                f"{self._where}: the observation has no part '{leaf.spec.name}'; give what the "
                f"environment gives, of the space {self._obs_space}"
            ) from error
        shape, wanted = np.shape(value), tuple(space.shape or ())
        if shape != wanted and shape[1:] != wanted:
            raise ExportError(
                f"{self._where}: the observation '{leaf.spec.name}' has the shape {list(shape)}; "
                f"give {list(wanted)}, or [N, ...] of N environments, of the space {space}"
            )
        return bool(shape != wanted)


def _first_part(tree: Any) -> Any:
    while isinstance(tree, Mapping | tuple):
        tree = next(iter(tree.values() if isinstance(tree, Mapping) else tree))
    return tree


def _of_row(tree: Any, row: int | None) -> Any:
    """Return environment number `row`'s part of a tree of arrays [N, ...]; all if `row` is None."""
    if row is None:
        return tree
    if isinstance(tree, Mapping):
        return {key: _of_row(part, row) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_of_row(part, row) for part in tree)
    return tree[row]


def network_rows(observation: Any, layout: ModelDescription, where: str) -> list[FloatArray]:
    """Return float32 [N, *shape] for each input of a policy whose file does not have the spaces.

    Args:
        observation: floats [N, *shape] or [*shape], or a list of these in the order of the file's
            inputs; images are channels first, from 0 to 1.
        layout: declarations of the policy.
        where: name of the policy in messages.

    Raises:
        ExportError: The observation has another form.
    """
    given = observation if isinstance(observation, list | tuple) else [observation]
    arrays: list[AnyArray] = list(map(np.asarray, given))
    # A file of package 1.x has other inputs: one input for all vector observations.
    is_old = layout.version == OLDEST_VERSION
    shapes = [info.shape[1:] for name, info in layout.inputs.items() if name.startswith("obs_")]
    if not is_old and [array.shape for array in arrays] == shapes:
        arrays = [array[None] for array in arrays]
    is_right = all(array.dtype.kind == "f" and array.ndim > 1 for array in arrays)
    is_right &= is_old or [array.shape[1:] for array in arrays] == shapes
    if not is_right or len(set(map(len, arrays))) != 1:
        wanted = "arrays in the environment's order" if is_old else ", ".join(map(_form, shapes))
        got = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays)
        raise ExportError(
            f"{where}: the observation is {got}, and the file does not know the environment's "
            "spaces (it is from Unity, another exporter or an earlier release); give the network's "
            f"inputs: {wanted}"
        )
    return [array.astype(np.float32) for array in arrays]


def _form(shape: Sequence[Any]) -> str:
    """Return a text for messages with the dtype and shape of a network's input."""
    image = ", an image channels first from 0 to 1" if len(shape) == 3 else ""
    return f"float32 [{', '.join(['N', *map(str, shape)])}]{image}"


def network_masks(
    mask: Sequence[AnyArray] | None, n_agents: int, branches: Sequence[int], where: str
) -> list[BoolArray] | None:
    """Return masks bool [N, branch size] by branch, True = forbidden, after a check of the sizes.

    Raises:
        ExportError: The masks have another form.
    """
    if mask is None:
        return None
    parts = [np.asarray(part) for part in mask]
    sizes = [(n_agents, size) for size in branches]
    if [part.shape for part in parts] != sizes or any(part.dtype != bool for part in parts):
        raise ExportError(
            f"{where}: the action mask does not fit; give bool [N, size] for each branch of the "
            f"sizes {list(branches)}, True where forbidden"
        )
    return parts


def decision_steps(
    obs: list[FloatArray], masks: list[BoolArray] | None, agent_id: IntArray | None
) -> DecisionSteps:
    """Return decision steps of N agents without rewards and groups."""
    n_agents = len(obs[0])
    zeros = np.zeros(n_agents, dtype=np.float32)
    agents = np.arange(n_agents, dtype=np.int32) if agent_id is None else np.atleast_1d(agent_id)
    return DecisionSteps(obs, zeros, agents, masks, np.zeros(n_agents, dtype=np.int32), zeros)
