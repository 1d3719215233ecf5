"""What SAC's losses are made of: pure functions of values and probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def value_targets(
    *, rewards: Tensor, done: Tensor, next_value: Tensor, gamma: Tensor, ignores_done: Tensor
) -> Tensor:
    """What an action was worth: its reward, and what the next situation is worth.

    Args:
        rewards: [B, S] of each reward signal.
        done: bool [B] whether the task ended with the step.
        next_value: [B, S] of the next observation.
        gamma: [S] discount per step.
        ignores_done: bool [S] whether the signal looks beyond the end.

    Returns:
        [B, S].
    """
    ends = done.unsqueeze(1) & ~ignores_done
    return rewards + gamma * next_value.masked_fill(ends, 0.0)


def squared_errors(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Half the mean squared error of each of K networks.

    Args:
        found: [K, B, S] values.
        wanted: [K, B, S] targets.

    Returns:
        [K], and its derivative [K, B, S] by `found`.
    """
    error = found - wanted
    scale = 1.0 / error[0].numel()
    return error.square().sum((1, 2)) * (0.5 * scale), error * scale


def taken_value(values: Tensor, discrete: Tensor, branches: Sequence[int]) -> Tensor:
    """Values of what was done, the mean over branches.

    Args:
        values: [B, S, outputs]: one output, or one for each choice of each branch.
        discrete: int64 [B, branches] choices.
        branches: sizes of the branches.

    Returns:
        [B, S].
    """
    if not branches:
        return values.squeeze(-1)
    first = np.cumsum(branches) - np.asarray(branches)
    columns = discrete + torch.from_numpy(first).to(discrete.device)
    shape = (*values.shape[:2], len(branches))
    return values.gather(2, columns.unsqueeze(1).expand(shape)).mean(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fresh:
    """What the policy being trained would do now at B observations."""

    continuous: Tensor
    """[B, A] drawn."""
    log_prob: Tensor
    """[B, C] log density of that action (where there are any), then of each branch the sum of
    p log p."""
    cost: Tensor
    """[B] what its predictability costs: the temperatures times `log_prob`, branches by mean."""
    probability: Tensor | None
    """[B, sum of branch sizes]; None without branches."""
    n_branches: int

    def expected(self, values: Tensor) -> Tensor:
        """Values [..., B, S, outputs] to [..., B, S]: expected over choices, mean over branches."""
        if self.probability is None:
            return values.squeeze(-1)
        return (values * self.probability.unsqueeze(1)).sum(-1) / self.n_branches
