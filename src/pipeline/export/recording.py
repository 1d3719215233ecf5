"""What a trained policy does on observations, for comparison with its exported file."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ExportError

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algos.policy import Policy
    from pipeline.arrays import AnyArray, FloatArray

CONTINUOUS, DISCRETE = "deterministic_continuous_actions", "deterministic_discrete_actions"
RECURRENT_IN, RECURRENT_OUT = "recurrent_in", "recurrent_out"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """N rows of what the trained policy saw, and what it does deterministically."""

    feeds: dict[str, AnyArray]
    """[N, ...] by the names of the model's inputs. With memory the rows are successive steps of one
    agent, which remembers nothing at the first."""
    expected: dict[str, AnyArray]
    """[N, ...] by the names of the model's deterministic outputs."""
    rounding: dict[str, float]
    """How far float32 is from float64 at most, in the continuous outputs and in the logits."""


def record(
    policy: Policy, obs: Sequence[FloatArray], action_masks: FloatArray | None = None
) -> Recording:
    """Return what the policy does, deterministically, on given observations.

    Args:
        policy: on the CPU.
        obs: [N, *shape] per observation, N at least 1; with memory of successive steps.
        action_masks: [N, sum of branch sizes], 1 = allowed; None allows everything.

    Raises:
        ExportError: The observations or the masks are of another behavior.
    """
    import torch

    from pipeline.algos.rows import tensors

    n_rows, actions = _n_rows(policy, obs), policy.spec.action_spec
    feeds = {f"obs_{i}": np.asarray(values, dtype=np.float32) for i, values in enumerate(obs)}
    inputs, allowed = tensors(list(feeds.values()), torch.device("cpu")), None
    if actions.discrete_size:
        size = sum(actions.discrete_branches)
        masks = np.ones((n_rows, size)) if action_masks is None else action_masks
        if masks.shape != (n_rows, size):
            raise ExportError(
                f"export: recorded action_masks are {list(masks.shape)}, wanted [{n_rows}, "
                f"{size}]; record them with this behavior"
            )
        feeds["action_masks"] = masks.astype(np.float32)
        allowed = torch.from_numpy(masks > 0)
    outputs = _outputs(policy, inputs, allowed)
    # In float64, to measure the error of rounding alone. A copy: `double` changes the module.
    exact = _outputs(deepcopy(policy).double(), [tensor.double() for tensor in inputs], allowed)
    rounding = {
        name: float(np.abs(values - exact[name]).max())
        for name, values in outputs.items()
        # A choice is not rounded; the logits tell how near another choice was.
        if name != DISCRETE
    }
    expected = {
        name: outputs[name] for name in (CONTINUOUS, RECURRENT_OUT, DISCRETE) if name in outputs
    }
    if policy.memory_size:
        before = np.zeros_like(expected[RECURRENT_OUT][:1])
        feeds[RECURRENT_IN] = np.concatenate((before, expected[RECURRENT_OUT][:-1]))
    return Recording(feeds=feeds, expected=expected, rounding=rounding)


def _outputs(
    policy: Policy, inputs: Sequence[Tensor], allowed: Tensor | None
) -> dict[str, AnyArray]:
    """Return what the policy computes, logits too, by the names of the graph's tensors."""
    import torch

    outputs, heads = {}, policy.actor.heads
    with torch.no_grad():
        obs = policy.normalizers(inputs)
        if policy.memory_size:
            hidden, outputs[RECURRENT_OUT] = _carried(policy, obs)
        else:
            hidden = policy.actor(obs)
        sample = heads.choose(hidden, allowed, None)
        if policy.spec.action_spec.continuous_size:
            outputs[CONTINUOUS] = sample.in_range
        if policy.spec.action_spec.discrete_size:
            outputs[DISCRETE] = sample.discrete
        outputs |= {logits_of(index): branch(hidden) for index, branch in enumerate(heads.branches)}
    return {name: values.numpy() for name, values in outputs.items()}


def logits_of(branch: int) -> str:
    """Return the name of the graph's tensor with the logits of a discrete branch."""
    return f"branch.{branch}.out"


def _carried(policy: Policy, obs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return hidden vectors [N, H] of one agent's N steps, and its memory after each [N, 1, M]."""
    import torch

    memory = obs[0].new_zeros(1, policy.memory_size)
    outputs, memories = [], []
    for row in range(len(obs[0])):
        hidden, memory = policy.actor.step([values[row : row + 1] for values in obs], memory)
        outputs.append(hidden)
        memories.append(memory)
    return torch.cat(outputs), torch.stack(memories)


def _n_rows(policy: Policy, obs: Sequence[FloatArray]) -> int:
    expected = [spec.shape for spec in policy.spec.observation_specs]
    n_rows = {len(values) for values in obs}
    if [values.shape[1:] for values in obs] != expected or len(n_rows) != 1 or 0 in n_rows:
        raise ExportError(
            f"export: recorded observations have shapes {[list(array.shape) for array in obs]}, "
            f"wanted [rows, …] of {[list(shape) for shape in expected]} with the same rows, at "
            "least one; record them with this behavior"
        )
    return n_rows.pop()
