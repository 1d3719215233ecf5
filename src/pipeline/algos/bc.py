"""Behavioral cloning: supervised learning of a policy from demonstrations.

It pretrains a policy before training, or adds gradient steps after each update of the trainer.
Continuous actions are compared in the environment's range: the policy's mean action, scaled to
-1..1, with the recorded action. (ML-Agents compares the raw sample, which is three times as large,
with the recorded action: docs/explanation/bc.md.)

Source: Pomerleau 1991, "Efficient training of artificial neural networks for autonomous
navigation", Neural Computation 3 (1).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
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
# Largest number of rows that `measure` evaluates at once.
CHUNK = 4096


class BehavioralCloning:
    """Trains a policy to imitate rows of demonstrations, by supervised learning.

    Args:
        policy: the policy that learns.
        rows: steps to imitate, with the lengths of their episodes if the policy has memory.
        batch_size: rows of a minibatch.
        samples_per_update: rows used by one update, 0 for all.
        steps: agent steps until the learning rate has fallen to 0; 0 to keep it constant.
        seed: the run's seed, for the order of minibatches.
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
            # Demonstrations have no memory of a policy, so each sequence begins with a memory of
            # zeros.
            sequences = forgetful_sequences(lengths, sequence_length, policy.memory_size, device)
        self.rows = Rows(obs=tensors(rows.obs, device), fields=fields, sequences=sequences)
        """Steps to imitate, with observations that are not normalised."""
        # A unit is a row, or with memory a sequence.
        self.n_units = len(rows) if sequences is None else len(sequences.lengths)
        # Number of units in a minibatch with about `batch_size` rows, or with all rows if there are
        # fewer rows.
        self.batch_size = max(min(batch_size, len(rows)) // sequence_length, 1)
        self.num_epoch = num_epoch
        self.probabilities: AnyArray | None = None
        """Probability of drawing each unit (a row, or with memory a sequence).

        None if the demonstrations have no weights; a pass then draws each unit at most once.
        """
        if rows.weights is not None:
            weights = rows.weights.astype(np.float64)
            if sequences is not None:
                # A sequence has the weight of its first row.
                lengths = sequences.lengths.numpy()
                weights = weights[np.cumsum(lengths) - lengths]
            self.probabilities = weights / weights.sum()
        # `samples_per_update` counts rows, and 0 means all; with memory a unit is a whole sequence.
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
        """Return behavioral cloning with the settings `behavioral_cloning`; None without them.

        Raises:
            DemonstrationError: The demonstrations cannot be used.
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
        """Number of gradient steps of an update."""
        return self.num_epoch * self._n_batches

    def update(self, *, step: int = 0) -> float:
        """Make one update; return its mean loss, or 0 once the learning rate has fallen to 0."""
        return completed(self.update_in_parts(step=step))

    def update_in_parts(self, *, step: int = 0) -> Generator[int, None, float]:
        """Make one update in parts; before each gradient step, yield how many steps remain."""
        rate = self.learning_rate
        if self.steps > 0:
            rate = scheduled("linear", rate, LEARNING_RATE_FLOOR, step=step, max_steps=self.steps)
        # When the learning rate has fallen to its floor, behavioral cloning has ended.
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
        """Return the minibatches of one pass, in a new order and with normalised observations."""
        n = self._n_batches * self.batch_size
        if self.probabilities is None:
            order = self.stream.permutation(self.n_units)[:n]
        else:
            # Units are drawn with replacement, so that their frequencies agree with the weights.
            order = self.stream.choice(self.n_units, n, p=self.probabilities)
        sizes = [self.batch_size] * self._n_batches
        return map(self._normalized, self.rows.in_order(order, sizes))

    def _learn(self, batch: Rows) -> Tensor:
        loss = self.loss(batch)
        for parameter in self.optimizer.trained:
            # The gradients of the policy's parameters are views of the trainer's flat gradient. If
            # they were kept, `backward` would add to the flat gradient.
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.policy.after_step()
        return loss.detach()

    def loss(self, batch: Rows) -> Tensor:
        """Return the imitation loss of rows with normalised observations.

        It is the mean squared error of continuous actions in -1..1, plus the branches' mean
        cross-entropy.
        """
        heads, losses = self.policy.actor.heads, []
        hidden = self.policy.actor(batch.obs, batch.sequences)
        mean = heads.mean_action(hidden)
        if mean is not None:
            # The mean is over rows and components, so that the loss does not grow with the number
            # of components.
            losses.append((mean - batch.continuous).square().mean())
        # The masks are None, because demonstrations do not say which choices were allowed.
        log_probs = [
            branch.gather(1, batch.discrete[:, i : i + 1])
            for i, branch in enumerate(heads.branch_log_probs(hidden, None))
        ]
        if log_probs:
            losses.append(-torch.cat(log_probs, dim=1).mean())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def measure(self) -> float:
        """Return the imitation loss of all rows without learning, in chunks to limit memory use."""
        rows, n = self._normalized(self.rows), len(self.rows)
        # Sequences are evaluated at once, because `Rows.split` would lose their memories.
        if rows.sequences is not None or n <= CHUNK:
            return float(self.loss(rows))
        # Each chunk's loss is weighted by the chunk's number of rows, because the last chunk may be
        # shorter.
        return sum(float(self.loss(chunk)) * len(chunk) / n for chunk in rows.split(CHUNK))

    def observe(self) -> None:
        """Update the policy's normalisers with the demonstrations' observations."""
        if self.policy.normalizers:
            self.policy.normalizers.update(self.rows.obs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of Adam and of the random stream."""
        return {"optimizer": self.optimizer.state_dict(), "stream": self.stream.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.stream.bit_generator.state = state["stream"]


def hold_out(
    rows: ExpertRows, fraction: float, rng: np.random.Generator, *, sequence_length: int = 0
) -> tuple[ExpertRows, ExpertRows]:
    """Return training rows and validation rows; a random `fraction` of the rows is for validation.

    For policies with memory, whole sequences of `sequence_length` rows are drawn for validation.
    """
    # Whole sequences are drawn, because the memory of a row comes from the rows before it; without
    # memory each row is a sequence of its own.
    lengths = _lengths(rows) if sequence_length else np.ones(len(rows), dtype=np.int64)
    sequences = cut(lengths, sequence_length or 1)
    order = rng.permutation(len(sequences))
    n_check = int(len(sequences) * fraction)

    def take(chosen: AnyArray) -> ExpertRows:
        chosen_lengths = sequences.lengths[chosen]
        index = rows_of(sequences.starts[chosen], chosen_lengths)
        return ExpertRows(
            obs=[values[index] for values in rows.obs],
            continuous=rows.continuous[index],
            discrete=rows.discrete[index],
            lengths=chosen_lengths if sequence_length else None,
            weights=None if rows.weights is None else rows.weights[index],
        )

    return take(order[n_check:]), take(order[:n_check])


def _lengths(rows: ExpertRows) -> AnyArray:
    if rows.lengths is None:
        raise ValueError("demonstrations have no episode lengths, which a policy with memory needs")
    return rows.lengths
