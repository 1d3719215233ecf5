"""Reward signals: what an algorithm is rewarded with, each with its own discount and strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pipeline.algos.curiosity import Curiosity
from pipeline.algos.gail import GAIL
from pipeline.algos.rnd import RND
from pipeline.data.demonstrations import demonstration_files
from pipeline.errors import DemonstrationError, SettingsError
from pipeline.settings.schema import GAILSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.protocol.specs import BehaviorSpec
    from pipeline.settings.schema import DemoPath, TrainerSettings
    from pipeline.settings.schema.reward_signals import RewardSignalSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """B steps of experience, as the environment gave them."""

    obs: list[Tensor]
    """[B, *shape] per observation, not normalised: a signal that normalises does so itself."""
    next_obs: list[Tensor]
    """[B, *shape] what each step led to; may be empty unless `RewardSignals.needs_next_obs`."""
    continuous: Tensor
    """[B, A] in the environment's range -1..1, whatever the algorithm drew."""
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
    needs_next_obs: bool
    """Whether it looks at what a step led to."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Its networks by the names that checkpoints use."""

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Take rows [B, *shape] of new experience into its normalisers, each row once."""

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
    needs_next_obs = False

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """None."""
        return {}

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Nothing to normalise."""

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


LEARNED: Mapping[str, Callable[..., RewardSignal]] = {
    "curiosity": Curiosity,
    "gail": GAIL,
    "rnd": RND,
}
"""The signals that learn, by their names in settings."""


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
        self.learning = any(not isinstance(one, Extrinsic) for one in self.by_name.values())
        """Whether any of them has something to learn."""
        self.needs_next_obs = any(one.needs_next_obs for one in self.by_name.values())
        """Whether any of them looks at what a step led to."""

    @property
    def names(self) -> list[str]:
        """Their names, in the order of columns."""
        return list(self.by_name)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """All their networks, by the names that checkpoints use."""
        return {key: one for signal in self.by_name.values() for key, one in signal.modules.items()}

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Take rows [B, *shape] of new experience into the signals' normalisers, each row once."""
        for one in self.by_name.values():
            one.observe(obs)

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


def mean_losses(losses: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means by tag of what `RewardSignals.update` gave in each of several minibatches."""
    if not losses:
        return {}
    tags = list(losses[0])
    means = torch.stack([torch.stack([one[tag] for tag in tags]) for one in losses]).mean(0)
    return dict(zip(tags, means.tolist(), strict=True))


def make(
    name: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    *,
    seed: int,
    device: torch.device,
) -> RewardSignal:
    """The signal called `name`, as `settings` ask for it."""
    one: Any = settings.reward_signals[name]
    if name == "extrinsic":
        return Extrinsic()
    try:
        return LEARNED[name](spec, one, seed=seed, device=device)
    except SettingsError as error:
        raise SettingsError(f"reward_signals.{name}: {error}") from error


def supported_signals(settings: TrainerSettings) -> dict[str, RewardSignalSettings]:
    """The behavior's reward signals; SettingsError when one of them cannot be trained with."""
    for name in settings.reward_signals:
        if name != "extrinsic" and name not in LEARNED:
            raise SettingsError(
                f"reward_signals.{name}: this reward signal cannot be trained with; use one of: "
                f"extrinsic, {', '.join(LEARNED)}"
            )
    gail = settings.reward_signals.get("gail")
    if isinstance(gail, GAILSettings):
        find_demonstrations("reward_signals.gail", gail.demo_path)
    return dict(settings.reward_signals)


def find_demonstrations(key: str, demo_path: DemoPath) -> None:
    """Make sure that the demonstrations under `<key>.demo_path` are there, before any work.

    Raises:
        SettingsError: They are not.
    """
    try:
        for path in demo_path.paths:
            demonstration_files(path)
    except DemonstrationError as error:
        raise SettingsError(f"{key}.demo_path: {error}") from error
