"""A rollout as reward signals see it: steps with what each led to, and whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algos.policy import tensors
from pipeline.algos.signals import RewardSignals, Transitions, mean_losses
from pipeline.errors import TrainingError
from pipeline.nets.distributions import to_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.arrays import FloatArray
    from pipeline.data.rollout import Rollout

# Rows that are rewarded at once: few, because what follows each is copied.
_CHUNK = 4096


class Experience:
    """R rows of a rollout on the device, without a copy of what follows each.

    Args:
        rollout: closed trajectories; actions are Gaussian samples where continuous.
        device: where the signals' networks live.
        with_next_obs: whether `take` gives what each step led to.
    """

    def __init__(self, rollout: Rollout, *, device: torch.device, with_next_obs: bool) -> None:
        f = rollout.fields
        n_obs = len(rollout.next_obs)
        self.n_rows = rollout.n_rows
        self.obs = tensors([f[f"obs_{i}"] for i in range(n_obs)], device)
        self.continuous, self.discrete, self.reward = tensors(
            [f["continuous"], f["discrete"], f["reward"]], device
        )
        ends = torch.from_numpy(rollout.starts + rollout.lengths - 1).to(device)
        self.done = torch.zeros(self.n_rows, dtype=torch.bool, device=device)
        self.done[ends] = torch.from_numpy(rollout.terminated).to(device)
        self.after: list[Tensor] = []
        self.end_of = torch.full((self.n_rows if with_next_obs else 0,), -1, device=device)
        """int64 [R] number of the trajectory that a row ends, else -1."""
        if with_next_obs:
            self.after = tensors(rollout.next_obs, device)
            self.end_of[ends] = torch.arange(len(ends), device=device)

    def take(self, rows: Tensor) -> Transitions:
        """The steps in int64 [B] rows."""
        return Transitions(
            obs=[values[rows] for values in self.obs],
            next_obs=self._following(rows),
            continuous=to_environment(self.continuous[rows]),
            discrete=self.discrete[rows],
            reward=self.reward[rows],
            done=self.done[rows],
        )

    def _following(self, rows: Tensor) -> list[Tensor]:
        """What each of the rows led to: the next row, or what closed its trajectory."""
        if not self.after:
            return []
        trajectory = self.end_of[rows]
        at_end = (trajectory >= 0).nonzero().squeeze(1)
        following = (rows + 1).clamp_max(self.n_rows - 1)
        result = [values[following] for values in self.obs]
        for values, after in zip(result, self.after, strict=True):
            values[at_end] = after[trajectory[at_end]]
        return result


class LearnedRewards:
    """Rewards of a rollout from signals that learn, and what they learn from its minibatches.

    Args:
        signals: of the behavior.
        device: where their networks live.
    """

    def __init__(self, signals: RewardSignals, *, device: torch.device) -> None:
        self.signals = signals
        self.device = device
        self._experience: Experience | None = None
        self._losses: list[dict[str, Tensor]] = []
        self._open: dict[int, list[float]] = {}
        """By slot, what each signal has given in the episode that goes on there."""
        self._sums: list[list[float]] = []

    @torch.no_grad()
    def begin(self, rollout: Rollout) -> FloatArray:
        """[R, S] rewards times strength of a new rollout, which `learn` then refers to."""
        self._experience = experience = Experience(
            rollout, device=self.device, with_next_obs=self.signals.needs_next_obs
        )
        self._losses.clear()
        rows = torch.arange(experience.n_rows, device=self.device)
        parts = [self.signals.rewards(experience.take(part)) for part in torch.split(rows, _CHUNK)]
        rewards: FloatArray = torch.cat(parts).cpu().numpy()
        self._count(rollout, rewards)
        return rewards

    def learn(self, rows: Tensor) -> None:
        """One step of each signal on int64 [B] rows of the rollout."""
        if self._experience is None:
            raise ValueError("there is no rollout to learn from: begin with one")
        self._losses.append(self.signals.update(self._experience.take(rows)))

    def end(self, *, step: int) -> dict[str, float]:
        """Mean losses, and mean episode sums of rewards, by tag; the rollout is let go.

        Raises:
            TrainingError: A loss is not finite.
        """
        self._experience = None
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
                if name != "extrinsic":  # that one is counted as episodes end
                    stats[f"Policy/{name.capitalize()} Reward"] = mean
        return stats

    def _count(self, rollout: Rollout, rewards: FloatArray) -> None:
        """Add up each episode's rewards over its trajectories."""
        totals = np.add.reduceat(rewards, rollout.starts, axis=0, dtype=np.float64).tolist()
        places = zip(rollout.slots.tolist(), rollout.begins.tolist(), rollout.ended.tolist())  # noqa: B905  # all [K], or all empty
        for total, (slot, begins, ended) in zip(totals, places):  # noqa: B905
            before = None if begins else self._open.pop(slot, None)
            so_far = (
                total if before is None else [a + b for a, b in zip(before, total, strict=True)]
            )
            if ended:
                self._sums.append(so_far)
                self._open.pop(slot, None)
            else:
                self._open[slot] = so_far

    def state_dict(self) -> dict[str, Any]:
        """The sums of episodes that go on."""
        return {"slots": list(self._open), "sums": list(self._open.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._open = dict(zip(state["slots"], state["sums"], strict=True))
