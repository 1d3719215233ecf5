"""Reward signals: what an algorithm is rewarded with, each with its own discount and strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pipeline.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import TrainerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """B steps of experience, as the environment gave them."""

    obs: list[Tensor]
    """[B, *shape] per observation, not normalised: a signal that normalises does so itself."""
    next_obs: list[Tensor]
    """[B, *shape] what each step led to."""
    continuous: Tensor
    """[B, A] as the algorithm drew them."""
    discrete: Tensor
    """int64 [B, branches]."""
    reward: Tensor
    """[B] of the environment."""
    done: Tensor
    """bool [B] whether the task ended with the step; not where it was cut short."""

    def __len__(self) -> int:
        return len(self.reward)


class RewardSignal(Protocol):
    """One source of rewards, with what it learns for itself."""

    ignores_done: bool
    """Whether values look beyond the end of an episode."""

    def rewards(self, transitions: Transitions) -> Tensor:
        """[B] rewards before `strength`, without gradient."""

    def update(self, transitions: Transitions) -> dict[str, Tensor]:
        """One gradient step on a minibatch; losses by TensorBoard tag, scalars left as tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Networks, optimizer and random streams, as tensors and plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""


class Extrinsic:
    """The environment's own reward."""

    ignores_done = False

    def rewards(self, transitions: Transitions) -> Tensor:
        """[B] the environment's."""
        return transitions.reward

    def update(self, transitions: Transitions) -> dict[str, Tensor]:  # noqa: ARG002  # nothing learns
        """Nothing to learn."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""


class RewardSignals:
    """All reward signals of a behavior, in the order of its settings.

    Args:
        spec: what the behavior observes and does.
        settings: its trainer settings.
        seed: of the run; each signal has streams of its own.
        device: where networks live.

    Raises:
        SettingsError: A signal cannot be used.
        DemonstrationError: Its demonstrations cannot be used.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        chosen = supported_signals(settings)
        self.by_name: dict[str, RewardSignal] = {
            name: make(name, spec, settings, seed=seed, device=device) for name in chosen
        }
        self.gamma = torch.tensor([one.gamma for one in chosen.values()], device=device)
        self.strength = torch.tensor([one.strength for one in chosen.values()], device=device)
        self.ignores_done = torch.tensor(
            [one.ignores_done for one in self.by_name.values()], device=device
        )

    @property
    def names(self) -> list[str]:
        """Their names, in the order of columns."""
        return list(self.by_name)

    @property
    def learning(self) -> bool:
        """Whether any of them has something to learn."""
        return any(not isinstance(one, Extrinsic) for one in self.by_name.values())

    def rewards(self, transitions: Transitions) -> Tensor:
        """[B, S] rewards of each signal, times its strength."""
        columns = [one.rewards(transitions) for one in self.by_name.values()]
        return torch.stack(columns, dim=1) * self.strength

    def update(self, transitions: Transitions) -> dict[str, Tensor]:
        """One gradient step of each on a minibatch; losses by tag, as tensors."""
        losses: dict[str, Tensor] = {}
        for one in self.by_name.values():
            losses.update(one.update(transitions))
        return losses

    def state_dict(self) -> dict[str, Any]:
        """What each of them keeps."""
        return {name: one.state_dict() for name, one in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        for name, one in self.by_name.items():
            one.load_state_dict(state[name])


def make(
    name: str,
    spec: BehaviorSpec,  # noqa: ARG001  # the environment's own reward needs nothing
    settings: TrainerSettings,  # noqa: ARG001
    *,
    seed: int,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
) -> RewardSignal:
    """The signal called `name`, as `settings` ask for it."""
    if name == "extrinsic":
        return Extrinsic()
    raise SettingsError(
        f"reward_signals.{name}: this reward signal cannot be trained with yet; "
        "remove it, or keep only: extrinsic"
    )


def supported_signals(settings: TrainerSettings) -> dict[str, Any]:
    """The behavior's reward signals; SettingsError when one of them cannot be trained with."""
    unsupported = sorted(set(settings.reward_signals) - {"extrinsic"})
    if unsupported:
        raise SettingsError(
            f"reward_signals.{unsupported[0]}: this reward signal cannot be trained with yet; "
            "remove it, or keep only: extrinsic"
        )
    return dict(settings.reward_signals)
