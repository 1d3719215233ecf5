"""Behavioral cloning: make the policy do what a demonstration does.

As a stage of its own it pretrains a policy; as an auxiliary loss it runs after each update of the
trainer. Continuous actions are compared in the environment's range: the policy's mean, scaled as
the environment sees it, with the recorded action. (ML-Agents compares the raw sample, which is
three times as large, with the recorded action: docs/explanation/bc.md.)

Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous
navigation", Neural Computation 3 (1).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import seeding
from pipeline.algos.policy import Policy
from pipeline.algos.rows import Rows, forgetful_sequences, tensors
from pipeline.algos.schedules import LEARNING_RATE_FLOOR, completed, scheduled
from pipeline.core.arrays import AnyArray
from pipeline.data.columns import cut, rows_of
from pipeline.demos.demonstrations import ExpertRows, load_expert_rows
from pipeline.nets.fast.adam import FusedAdam
from pipeline.settings.trainer.schema import TrainerSettings

DEFAULT_EPOCHS = 3
# Rows that are measured at once.
CHUNK = 4096


def imitation_loss(
    *,
    mean: Tensor | None,
    continuous: Tensor,
    branch_log_probs: Sequence[Tensor],
    discrete: Tensor,
) -> Tensor:
    """Squared error of continuous actions plus mean cross-entropy of the branches.

    Args:
        mean: [B, A] the policy's mean action in the environment's range, or None without
            continuous actions.
        continuous: [B, A] recorded, in -1..1.
        branch_log_probs: [B, L] of each branch.
        discrete: int64 [B, branches] recorded.
    """
    losses = []
    if mean is not None:
        losses.append((mean - continuous).square().mean())
    if branch_log_probs:
        log_probs = [
            branch.gather(1, discrete[:, i : i + 1]) for i, branch in enumerate(branch_log_probs)
        ]
        losses.append(-torch.cat(log_probs, dim=1).mean())
    return torch.stack(losses).sum()


class BehavioralCloning:
    """Supervised updates of a policy from expert rows.

    Args:
        policy: the policy that learns.
        rows: what to imitate; their episodes too when the policy has memory.
        batch_size: rows of a minibatch.
        num_epoch: passes over the samples of one update.
        samples_per_update: rows used by one update, 0 for all.
        learning_rate: of Adam at the start.
        steps: policy steps until the rate has fallen to nothing, 0 to keep it constant.
        seed: of the run, for the order of minibatches.
    """

    def __init__(
        self,
        policy: Policy,
        rows: ExpertRows,
        *,
        batch_size: int,
        num_epoch: int,
        learning_rate: float,
        seed: int,
        samples_per_update: int = 0,
        steps: int = 0,
    ) -> None:
        self.policy = policy
        device = next(policy.parameters()).device
        continuous, discrete = tensors([rows.continuous, rows.discrete], device)
        fields = {"continuous": continuous, "discrete": discrete.long()}
        sequences, sequence_length = None, 1
        if policy.settings.memory is not None:
            sequence_length = policy.settings.memory.sequence_length
            lengths = _lengths(rows)
            # Demonstrations do not hold what a policy would have remembered.
            sequences = forgetful_sequences(lengths, sequence_length, policy.memory_size, device)
        self.rows = Rows(obs=tensors(rows.obs, device), fields=fields, sequences=sequences)
        """What to imitate; observations are not normalised."""
        # from here on a unit is a row, or with memory a sequence
        self.n_units = len(rows) if sequences is None else len(sequences.lengths)
        # Few demonstrations still fill one minibatch.
        self.batch_size = max(min(batch_size, len(rows)) // sequence_length, 1)
        self.num_epoch = num_epoch
        self.probabilities: AnyArray | None = None
        """[units] probabilities, where demonstrations have weights; None to draw each unit once."""
        if rows.weights is not None:
            self.probabilities = self._by_unit(rows.weights.astype(np.float64))
        units = samples_per_update // sequence_length
        self.units_per_update = max(units, 1) if samples_per_update else self.n_units
        self._n_batches = max(min(self.n_units, self.units_per_update) // self.batch_size, 1)
        self.learning_rate = learning_rate
        self.steps = steps
        self.stream = seeding.stream(seed, "cloning")
        self.optimizer = FusedAdam(policy.parameters(), learning_rate=learning_rate)

    @staticmethod
    def from_settings(
        policy: Policy, settings: TrainerSettings, *, seed: int
    ) -> BehavioralCloning | None:
        """The auxiliary loss that `behavioral_cloning` asks for, or None.

        Raises:
            DemonstrationError: Its demonstrations cannot be used.
        """
        cloning = settings.behavioral_cloning
        if cloning is None:
            return None
        rows = load_expert_rows(cloning.demo_path.sources, policy.spec)
        return BehavioralCloning(
            policy,
            rows,
            batch_size=cloning.batch_size or settings.hyperparameters.batch_size,
            num_epoch=cloning.num_epoch or DEFAULT_EPOCHS,
            samples_per_update=cloning.samples_per_update,
            learning_rate=settings.hyperparameters.learning_rate * cloning.strength,
            steps=cloning.steps,
            seed=seed,
        )

    @property
    def n_parts(self) -> int:
        """Gradient steps of an update."""
        return self.num_epoch * self._n_batches

    def update(self, *, step: int = 0) -> float:
        """Make one update; return the mean loss, or 0 when the schedule has ended."""
        return completed(self.update_in_parts(step=step))

    def update_in_parts(self, *, step: int = 0) -> Generator[int, None, float]:
        """Learn as `update` does, but pause before each gradient step; see `Algorithm`."""
        rate = self.learning_rate
        if self.steps > 0:
            rate = scheduled("linear", rate, LEARNING_RATE_FLOOR, step=step, max_steps=self.steps)
        # The schedule never gets below its floor, so this means that it has ended.
        if rate <= LEARNING_RATE_FLOOR:
            return 0.0
        self.optimizer.learning_rate = rate
        losses: list[Tensor] = []
        for _ in range(self.num_epoch):
            for batch in self.minibatches():
                yield self.n_parts - len(losses)
                losses.append(self._learn(batch))
        return float(torch.stack(losses).mean())

    @torch.no_grad()
    def _normalized(self, rows: Rows) -> Rows:
        return replace(rows, obs=self.policy.normalizers(rows.obs))

    def minibatches(self) -> Iterator[Rows]:
        """Rows of one epoch in a new order, with normalised observations."""
        n = self._n_batches * self.batch_size
        if self.probabilities is None:
            order = self.stream.permutation(self.n_units)[:n]
        else:
            # With replacement, so that a weight says how often a step is drawn.
            order = self.stream.choice(self.n_units, n, p=self.probabilities)
        yield from map(
            self._normalized, self.rows.in_order(order, [self.batch_size] * self._n_batches)
        )

    def _by_unit(self, weights: AnyArray) -> AnyArray:
        """Probability of each row, or of each sequence by the weight that its first row has."""
        if self.rows.sequences is not None:
            lengths = self.rows.sequences.lengths.cpu().numpy()
            weights = weights[np.cumsum(lengths) - lengths]
        shares: AnyArray = weights / weights.sum()
        return shares

    def _learn(self, batch: Rows) -> Tensor:
        loss = self.loss(batch)
        for parameter in self.optimizer.trained:
            # The policy's parameters have flat gradients of the trainer's optimizer; cloning
            # must not write into those.
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.policy.after_step()
        return loss.detach()

    def loss(self, batch: Rows) -> Tensor:
        """Imitation loss on rows whose observations are normalised."""
        heads = self.policy.actor.heads
        hidden = self.policy.actor(batch.obs, batch.sequences)
        return imitation_loss(
            mean=heads.mean_action(hidden),
            continuous=batch.continuous,
            branch_log_probs=heads.branch_log_probs(hidden, None),
            discrete=batch.discrete,
        )

    @torch.no_grad()
    def measure(self) -> float:
        """Imitation loss on all rows, without learning; in chunks that keep features small."""
        rows, n = self._normalized(self.rows), len(self.rows)
        if rows.sequences is not None or n <= CHUNK:
            return float(self.loss(rows))
        return sum(float(self.loss(chunk)) * len(chunk) / n for chunk in rows.split(CHUNK))

    def observe(self) -> None:
        """Take the demonstrations' observations into the policy's normalisers."""
        if self.policy.normalizers:
            self.policy.normalizers.update(self.rows.obs)

    def state_dict(self) -> dict[str, Any]:
        """Everything that continues this loss."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "stream": self.stream.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.bit_generator.state = state["stream"]


def hold_out(
    rows: ExpertRows, fraction: float, rng: np.random.Generator, *, sequence_length: int = 0
) -> tuple[ExpertRows, ExpertRows]:
    """Split into rows to learn from and rows to check on, the latter `fraction` of all.

    With a `sequence_length` whole sequences are held out, for policies with memory.
    """
    if not sequence_length:
        order = rng.permutation(len(rows))
        n_check = int(len(rows) * fraction)
        return _select_rows(rows, order[n_check:]), _select_rows(rows, order[:n_check])
    sequences = cut(_lengths(rows), sequence_length)
    order = rng.permutation(len(sequences))
    n_check = int(len(sequences) * fraction)

    def take(chosen: AnyArray) -> ExpertRows:
        lengths = sequences.lengths[chosen]
        return _select_rows(rows, rows_of(sequences.starts[chosen], lengths), lengths)

    return take(order[n_check:]), take(order[:n_check])


def _select_rows(rows: ExpertRows, index: AnyArray, lengths: AnyArray | None = None) -> ExpertRows:
    return ExpertRows(
        obs=[values[index] for values in rows.obs],
        continuous=rows.continuous[index],
        discrete=rows.discrete[index],
        lengths=lengths,
        weights=None if rows.weights is None else rows.weights[index],
    )


def _lengths(rows: ExpertRows) -> AnyArray:
    if rows.lengths is None:
        raise ValueError("these rows do not say which episode they are of")
    return rows.lengths
