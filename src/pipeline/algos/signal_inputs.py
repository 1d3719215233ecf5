"""What networks of reward signals have in common."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pipeline.protocol.specs import ActionSpec
    from pipeline.settings.schema import NetworkSettings

_log = logging.getLogger(__name__)


def without_memory(name: str, settings: NetworkSettings) -> NetworkSettings:
    """The signal's network settings; a recurrent layer is left out, with a warning.

    Its rows are single steps in any order: there is nothing to remember from one to the next.
    """
    if settings.memory is None:
        return settings
    _log.warning(
        "reward_signals.%s.network_settings.memory: a reward signal has no memory; "
        "the section is ignored, remove it",
        name,
    )
    return replace(settings, memory=None)


def actions_as_numbers(spec: ActionSpec, continuous: Tensor, discrete: Tensor) -> Tensor:
    """[B, A + sum of branch sizes] continuous actions, then each branch one-hot.

    Args:
        spec: of the actions.
        continuous: [B, A].
        discrete: int64 [B, branches].
    """
    parts = [continuous] if spec.continuous_size else []
    parts += [
        nn.functional.one_hot(discrete[:, i], size).to(torch.float32)
        for i, size in enumerate(spec.discrete_branches)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def n_action_numbers(spec: ActionSpec) -> int:
    """Width of `actions_as_numbers`."""
    return spec.continuous_size + sum(spec.discrete_branches)
