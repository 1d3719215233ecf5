"""Reward signals: the rewards of an algorithm, each with its own discount and strength."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from pipeline import plugins
from pipeline.algos.rows import Rows, named_tensors, tensors
from pipeline.core.arrays import FloatArray
from pipeline.core.specs import BehaviorSpec
from pipeline.data.rollout import Rollout
from pipeline.demos.demonstrations import demonstration_files
from pipeline.errors import DemonstrationError, SettingsError, TrainingError
from pipeline.nets.distributions import to_environment
from pipeline.nets.fast.adam import FlatAdam
from pipeline.settings.trainer.schema import (
    REWARD_SIGNALS,
    DemoPath,
    GAILSettings,
    RewardSignalSettings,
    TrainerSettings,
)

_log = logging.getLogger(__name__)

# Number of rows that signals reward at once; it is small, so that features of images need little
# memory.
_CHUNK = 4096


class RewardSignal(ABC):
    """One source of rewards, with the networks or counts that it learns.

    A signal is created by `Signal(spec, settings, seed=..., device=...)`, with the signal's
    settings and the run's seed. A signal of a plug-in does not have to be a subclass.

    A signal reads rows with `obs`, `next_obs` (if it needs them), and the fields `continuous`,
    `discrete`, `reward` [B] and `done` (bool [B], whether the task ended with the step; False where
    the episode was cut short). Observations are raw: a signal has its own normalisers. Continuous
    actions are in the environment's range -1..1, for every algorithm.
    """

    settings_class: ClassVar[type[RewardSignalSettings]] = RewardSignalSettings
    """Class of the settings of a signal that `class: module:Class` names."""
    ignores_done: bool = False
    """Whether a signal's value includes rewards after the end of an episode."""
    needs_next_obs: bool = False
    """Whether the signal reads the observation after a step."""
    optimizer: FlatAdam | None = None
    """Optimizer of the signal's networks; None if the signal does not learn."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Networks of the signal, by the names that checkpoints use."""
        return {}

    def observe(self, obs: Sequence[Tensor]) -> None:  # noqa: B027  # overriding is optional
        """Update normalisers or counts with observations [B, *shape] of new rows, each row once.

        A row is observed when its trajectory has closed, before `rewards` reads it.
        """

    @abstractmethod
    def rewards(self, rows: Rows) -> Tensor:
        """Return the rewards [B] of rows, not multiplied by `strength`, without gradient."""

    def update(self, rows: Rows) -> dict[str, Tensor]:  # noqa: ARG002  # signals that learn use it
        """Make one gradient step on a minibatch; return scalar tensors by TensorBoard tag."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return networks, optimizer and random streams, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore the state that `state_dict` returned."""


class Extrinsic(RewardSignal):
    """The environment's own reward."""

    def rewards(self, rows: Rows) -> Tensor:
        """Return the environment's rewards [B]."""
        return rows.reward


class RewardSignals:
    """All reward signals of a behavior, in the order of its settings.

    Raises:
        SettingsError: A signal cannot be used.
        DemonstrationError: A signal's demonstrations cannot be used.
    """

    def __init__(
        self, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
    ) -> None:
        chosen = supported_signals(settings)
        self.by_name: dict[str, RewardSignal] = {
            name: make(name, spec, settings, seed=seed, device=device) for name in chosen
        }
        signals = self.by_name.values()
        self.gamma = torch.tensor([each.gamma for each in chosen.values()], device=device)
        self.strength = torch.tensor([each.strength for each in chosen.values()], device=device)
        self.ignores_done = torch.tensor([each.ignores_done for each in signals], device=device)
        self.learning = any(not isinstance(signal, Extrinsic) for signal in signals)
        """Whether there are signals other than the environment's reward."""
        self.needs_next_obs = any(signal.needs_next_obs for signal in signals)
        """Whether any signal reads the observation after each step."""

    @property
    def names(self) -> list[str]:
        """Names of the signals, in the order of the columns [S] of rewards."""
        return list(self.by_name)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Networks of all signals, by the names that checkpoints use."""
        return dict(chain.from_iterable(each.modules.items() for each in self.by_name.values()))

    def observe(self, obs: Sequence[Tensor]) -> None:
        """Let all signals observe the observations [B, *shape] of new rows, each row once."""
        for signal in self.by_name.values():
            signal.observe(obs)

    def rewards(self, rows: Rows) -> Tensor:
        """Return rewards [B, S]: each signal's rewards times its strength.

        Raises:
            SettingsError: A signal's rewards do not have the shape [B].
        """
        columns = [signal.rewards(rows) for signal in self.by_name.values()]
        for name, column in zip(self.by_name, columns, strict=True):
            if column.shape != rows.reward.shape:
                raise SettingsError(
                    f"reward_signals.{name}: its rewards have shape {list(column.shape)}, but must "
                    f"have {list(rows.reward.shape)}, one for each row"
                )
        return torch.stack(columns, dim=1) * self.strength

    def update(self, rows: Rows) -> dict[str, Tensor]:
        """Make one gradient step of each signal on a minibatch; return loss tensors by tag."""
        losses: dict[str, Tensor] = {}
        for signal in self.by_name.values():
            losses.update(signal.update(rows))
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each signal, by name."""
        return {name: signal.state_dict() for name, signal in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        for name, signal in self.by_name.items():
            signal.load_state_dict(state[name])


def mean_losses(losses: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the mean of each loss over several results of `RewardSignals.update`, by tag."""
    if not losses or not losses[0]:  # not all kinds of signals have losses
        return {}
    # All means are in one tensor, so that one transfer from the device is enough.
    tags = list(losses[0])
    table = [torch.stack([batch_losses[tag] for tag in tags]) for batch_losses in losses]
    means = torch.stack(table).mean(0)
    return dict(zip(tags, means.tolist(), strict=True))


def make(
    name: str, spec: BehaviorSpec, settings: TrainerSettings, *, seed: int, device: torch.device
) -> RewardSignal:
    """Return the signal called `name`, made from its section of `settings`.

    Raises:
        SettingsError: The signal cannot be made with these settings.
    """
    signal_settings: Any = settings.reward_signals[name]
    kind = signal_of(name, signal_settings)
    if kind is Extrinsic:
        return Extrinsic()
    if signal_settings.network_settings.memory is not None:
        # A signal gets single steps without the steps before them, so it cannot use a memory.
        _log.warning(
            "reward_signals.%s.network_settings.memory: a reward signal has no memory; "
            "the section is ignored, remove it",
            name,
        )
        network = replace(signal_settings.network_settings, memory=None)
        signal_settings = replace(signal_settings, network_settings=network)
    own = signal_settings.own_class
    try:
        with plugins.user_code(own) if own else nullcontext():
            return kind(spec, signal_settings, seed=seed, device=device)
    except SettingsError as error:
        # The signal's own message does not name the key of its settings, so the key is added here.
        raise SettingsError(f"reward_signals.{name}: {error}") from error


def signal_of(name: str, settings: RewardSignalSettings) -> Callable[..., RewardSignal]:
    """Return the class of the signal with these settings; this imports the class's module.

    Raises:
        SettingsError: The signal does not exist, or its class cannot be imported.
    """
    own = settings.own_class
    if name not in REWARD_SIGNALS and not own:
        raise SettingsError(
            f"reward_signals.{name}: this reward signal is not supported; use one of: "
            f"{', '.join(REWARD_SIGNALS)}{REWARD_SIGNALS.more}"
        )
    try:
        signal_class: Callable[..., RewardSignal] = plugins.class_for(own, settings.made_by)
    except SettingsError as error:
        raise SettingsError(f"reward_signals.{name}: {error}") from error
    return signal_class


def supported_signals(settings: TrainerSettings) -> dict[str, RewardSignalSettings]:
    """Return the behavior's reward signals; SettingsError if a signal is not supported."""
    # The signals are checked before any network is made or any environment is started.
    for name, signal_settings in settings.reward_signals.items():
        signal_of(name, signal_settings)
    gail = settings.reward_signals.get("gail")
    if isinstance(gail, GAILSettings):
        find_demonstrations("reward_signals.gail", gail.demo_path)
    return dict(settings.reward_signals)


def find_demonstrations(key: str, demo_path: DemoPath) -> None:
    """Check that the demonstrations which the setting `<key>.demo_path` names exist.

    Raises:
        SettingsError: A demonstration does not exist.
    """
    try:
        for path in demo_path.paths:
            demonstration_files(path)
    except DemonstrationError as error:
        raise SettingsError(f"{key}.demo_path: {error}") from error


def steps_of(rollout: Rollout, *, device: torch.device, with_next_obs: bool) -> Rows:
    """Return all steps of a rollout in the form that `RewardSignal` describes.

    The rollout's continuous actions are Gaussian samples. `next_obs` is empty unless
    `with_next_obs`.
    """
    fields = named_tensors(rollout.fields, ("continuous", "discrete", "reward"), device)
    # Rollouts store actions as they were drawn, but demonstrations, with which GAIL compares them,
    # store actions in the environment's range.
    fields["continuous"] = to_environment(fields["continuous"])
    ends = torch.from_numpy(rollout.starts + rollout.lengths - 1).to(device)
    fields["done"] = torch.zeros(rollout.n_rows, dtype=torch.bool, device=device)
    fields["done"][ends] = torch.from_numpy(rollout.terminated).to(device)
    obs, next_obs = tensors(rollout.obs, device), []
    if with_next_obs:
        # The observation after a row is in the next row, except at the end of a trajectory.
        next_obs = [values.roll(-1, 0) for values in obs]
        for values, after in zip(next_obs, tensors(rollout.next_obs, device), strict=True):
            values[ends] = after
    return Rows(obs=obs, next_obs=next_obs, fields=fields)


class IntrinsicRewards:
    """Computes the rewards of rollouts by signals that learn, and trains these signals."""

    def __init__(self, signals: RewardSignals, *, device: torch.device) -> None:
        self.signals = signals
        self.device = device
        self._losses: list[dict[str, Tensor]] = []
        self._open: dict[int, list[float]] = {}
        """Sums of each signal's rewards over an agent's unfinished episode, by the agent's slot."""
        self._sums: list[list[float]] = []

    @torch.no_grad()
    def begin(self, rollout: Rollout) -> tuple[FloatArray, Rows]:
        """Return the rewards times strength [R, S] of a new rollout, and the rollout's steps.

        Minibatches of the steps are the input of `learn`.
        """
        steps = steps_of(rollout, device=self.device, with_next_obs=self.signals.needs_next_obs)
        self._losses.clear()
        parts = [self.signals.rewards(part) for part in steps.split(_CHUNK)]
        rewards: FloatArray = torch.cat(parts).cpu().numpy()
        self._count(rollout, rewards)
        return rewards, steps

    def learn(self, steps: Rows) -> None:
        """Make one gradient step of each signal on a minibatch of the rollout's steps."""
        self._losses.append(self.signals.update(steps))

    def end(self, *, step: int) -> dict[str, float]:
        """Return mean losses, and each signal's mean sum of rewards per episode, by tag.

        Raises:
            TrainingError: A loss is not finite.
        """
        stats = mean_losses(self._losses)
        for tag, value in stats.items():
            if not np.isfinite(value):
                raise TrainingError(
                    f"step {step}: {tag} is not finite ({value}); lower the reward signal's "
                    "learning_rate, or set normalize in its network_settings"
                )
        sums, self._sums = self._sums, []
        if sums:
            means = np.mean(sums, axis=0).tolist()
            for name, mean in zip(self.signals.names, means, strict=True):
                # The trainer itself reports the environment's rewards when episodes end.
                if name != "extrinsic":
                    stats[f"Policy/{name.capitalize()} Reward"] = mean
        return stats

    def _count(self, rollout: Rollout, rewards: FloatArray) -> None:
        # Sums are float64, because an episode may add many small rewards to a large sum.
        totals = np.add.reduceat(rewards, rollout.starts, axis=0, dtype=np.float64).tolist()
        places = zip(rollout.slots.tolist(), rollout.begins.tolist(), rollout.ended.tolist())  # noqa: B905  # all have K items, or all none
        for total, (slot, begins, ended) in zip(totals, places):  # noqa: B905
            # A trajectory may be only a part of an episode, so the episode's sum so far is kept by
            # the agent's slot.
            before = None if begins else self._open.pop(slot, None)
            if before is not None:
                total = [a + b for a, b in zip(before, total, strict=True)]  # noqa: PLW2901
            if ended:
                self._sums.append(total)
                self._open.pop(slot, None)
            else:
                self._open[slot] = total

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of unfinished episodes."""
        return {"slots": list(self._open), "sums": list(self._open.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._open = dict(zip(state["slots"], state["sums"], strict=True))
