"""Conversion of an environment's observations for a policy, and of the policy's actions back."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.core.arrays import AnyArray, IntArray
from pipeline.core.specs import ActionTuple
from pipeline.core.steps import DecisionSteps
from pipeline.errors import ExportError
from pipeline.export.contract import OLDEST_VERSION
from pipeline.export.layout import ModelDescription

_IMAGE = ", an image channels first from 0 to 1"


class EnvironmentForm:
    """Converts between the spaces of a Gymnasium or PettingZoo environment and a policy's arrays.

    Both spaces are in `text`, as `space_text.to_text` wrote them into the policy's file; `where` is
    the name of the policy in messages.

    Raises:
        ExportError: `to_text` did not write this text.
    """

    def __init__(self, text: str, where: str) -> None:
        from pipeline.simulators.bridges.batches import Batch, Codec
        from pipeline.simulators.bridges.space_text import from_text

        self._where, self._batch = where, Batch
        try:
            known = from_text(text)
            self._obs_space, self._action_space = known["observation"], known["action"]
            options = {"visual": known["visual"], "scale": known["scale"]}
            self._codec = Codec(self._obs_space, self._action_space, where=where, **options)
        except Exception as error:
            raise ExportError(
                f"{where}: its description of spaces is broken: {error}; export the policy again"
            ) from error

    def steps(
        self, observation: Any, action_mask: Any, agent_id: IntArray | None = None
    ) -> tuple[DecisionSteps, bool]:
        """Return N agents that ask for a decision, and whether `observation` had an axis N.

        `observation` comes from one environment, or from N vectorized environments. In
        `action_mask`, as in the argument of `action_space.sample`, 1 is allowed; None means the
        observation's own mask. Without `agent_id` the agents are 0 to N - 1.

        Raises:
            PipelineError: The observation or the mask does not fit its space.
        """
        n = self._n_environments(observation)
        batch = self._batch(self._codec, n or 1)
        for row, agent in enumerate(range(n or 1) if agent_id is None else np.atleast_1d(agent_id)):
            seen = observation if n is None else _of_row(observation, row)
            mask = action_mask if n is None or action_mask is None else _of_row(action_mask, row)
            info = {} if mask is None else {"action_mask": mask}
            batch.decide(seen, info, (0.0, int(agent), 0, 0.0))
        return batch.decisions(), n is not None

    def native(self, actions: ActionTuple, is_batch: bool) -> Any:
        """Return actions in the environment's action space, with an axis N if `is_batch`."""
        native = self._codec.actions.native(actions)
        if not is_batch:
            return native[0]
        from gymnasium.vector import utils

        together: Any = utils.create_empty_array(self._action_space, len(native))
        return utils.concatenate(self._action_space, native, together)

    def _n_environments(self, observation: Any) -> int | None:
        """Return the length of the axis of vectorized environments; None without this axis."""
        leaf = self._codec.observations.leaves[0]
        value, space = observation, self._obs_space
        try:
            for key in leaf.path:
                value, space = value[key], space[key]
        except (KeyError, IndexError, TypeError) as error:
            raise ExportError(
                f"{self._where}: the observation has no part '{leaf.spec.name}'; give an "
                f"observation of the space {self._obs_space}"
            ) from error
        shape, wanted = np.shape(value), tuple(space.shape or ())
        if shape != wanted and shape[1:] != wanted:
            raise ExportError(
                f"{self._where}: the observation '{leaf.spec.name}' has the shape {list(shape)}; "
                f"give the shape {list(wanted)}, or [N, ...] with the observations of N "
                f"environments; the space is {space}"
            )
        return None if shape == wanted else shape[0]


def _of_row(tree: Any, row: int) -> Any:
    """Return environment number `row`'s part of a tree of arrays [N, ...]."""
    if isinstance(tree, Mapping):
        return {key: _of_row(part, row) for key, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_of_row(part, row) for part in tree)
    return tree[row]


def network_steps(
    observation: Any,
    mask: Sequence[AnyArray] | None,
    layout: ModelDescription,
    where: str,
    agent_id: IntArray | None = None,
) -> DecisionSteps:
    """Return decisions of N agents for a policy whose file does not have the spaces.

    Args:
        observation: floats [N, *shape] or [*shape], or a list of these in the order of the file's
            inputs; images are channels first, from 0 to 1.
        mask: bool [N, branch size] by branch, True = forbidden.
        layout: declarations of the policy.
        where: name of the policy in messages.
        agent_id: int [N]; None for 0 to N - 1.

    Raises:
        ExportError: The observation or the mask has another form.
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
        forms = (
            f"float32 [{', '.join(['N', *map(str, shape)])}]{_IMAGE if len(shape) == 3 else ''}"
            for shape in shapes
        )
        wanted = "arrays in the environment's order" if is_old else ", ".join(forms)
        got = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays)
        raise ExportError(
            f"{where}: the observation is {got}, and the file does not have the environment's "
            "spaces (it is from Unity, another exporter or an earlier release); give the network's "
            f"inputs: {wanted}"
        )
    n, branches = len(arrays[0]), list(layout.discrete_branches)
    masks = None if mask is None else list(map(np.asarray, mask))
    wanted_masks = [(n, size, np.dtype(bool)) for size in branches]
    if masks is not None and [(*part.shape, part.dtype) for part in masks] != wanted_masks:
        raise ExportError(
            f"{where}: the action mask does not fit; give bool [N, size] for each branch of the "
            f"sizes {branches}, True where forbidden"
        )
    zeros = np.zeros(n, dtype=np.float32)
    agents = np.arange(n, dtype=np.int32) if agent_id is None else np.atleast_1d(agent_id)
    obs = [array.astype(np.float32) for array in arrays]
    return DecisionSteps(obs, zeros, agents, masks, np.zeros(n, dtype=np.int32), zeros)
