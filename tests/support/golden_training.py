"""Trains the cases of `golden_cases` with this project: from messages of agents to weights.

It uses the interface that the trainer uses, so that messages pass storage, advantages,
minibatches, signals and optimizers on their way into the weights. After a change of these parts,
only this file must be adapted: `Training` drives a learner, `networks` names its networks, and
`recorded` records their random draws, which are needed to make golden files only.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from golden_cases import CASES, INTERRUPTED, N_MESSAGES, behavior, demonstration, experience
from torch import nn

from pipeline.algos import off_policy
from pipeline.algos.sac import SAC
from pipeline.algos.xqc import XQC
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.nets.actor_critic import Critic
from pipeline.nets.group_critic import GroupCritic
from pipeline.nets.q_networks import QNetwork
from pipeline.settings import load_run_settings
from pipeline.trainer.learner import Learner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.core.arrays import AnyArray

SAMPLED = 48
"""Most numbers of a tensor in a golden file."""


class Training:
    """A case's training with this project.

    Args:
        name: name of the case.
        folder: folder for the case's demonstration.
        n_blocks: number of rollouts; an update follows each.
        hidden_units: units in each hidden layer of every network.
        hyperparameters: values that replace hyperparameters of the case.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        n_blocks: int = 3,
        hidden_units: int = 8,
        **hyperparameters: Any,
    ) -> None:
        case = self.case = CASES[name]
        self.n_blocks = n_blocks
        self.experience = experience(name, n_blocks)
        self.demo = demonstration(name, folder)
        self.settings = case.settings(n_blocks, hidden_units, self.demo)
        self.settings["hyperparameters"] |= hyperparameters
        run_settings = load_run_settings(None, overrides={"behaviors": {"B": self.settings}})
        device = torch.device("cpu")
        self.learner = Learner(
            "B", behavior(case), run_settings.behaviors["B"], seed=1, device=device
        )
        self.memories: list[AnyArray] = []
        """[N, M] recurrent memories of the agents after each message."""

    def run(self) -> None:
        """Let the learner act on all messages, and update it after each block."""
        learner, columns = self.learner, self.experience
        for number in range(len(columns["obs"])):
            steps = [self._message(number)]
            message = learner.receive(steps)
            learner.complete_transitions(message)
            if number and number % N_MESSAGES == 0:  # before `decide`, so all memories are new
                assert learner.learn(), "an update was due"
                assert learner.trajectories.n_closed == 0
            decided = learner.decide(message)
            decision = decided.decision
            overrides = {
                key: columns[key][number]
                for key in ("continuous", "discrete", "log_prob")
                if key in decision.rows
            }
            if decision.memory is not None:
                self.memories.append(decision.memory)
            decided = decided._replace(
                decision=replace(decision, rows={**decision.rows, **overrides})
            )
            learner.begin_transitions(message, decided)

    def _message(self, number: int) -> tuple[DecisionSteps, TerminalSteps]:
        columns = {
            key: values[number]
            for key, values in self.experience.items()
            if len(values) == len(self.experience["obs"])
        }
        groups, ids = self.case.groups, np.arange(self.case.n_agents, dtype=np.int32)
        ended = columns["ends"] > 0
        # An ended agent's reward is in its terminal step, so its new episode begins with reward 0.
        reward = np.where(ended, 0.0, columns["reward"]).astype(np.float32)
        group_reward = np.where(ended, 0.0, columns["group_reward"]).astype(np.float32)
        branches = self.case.actions.discrete_branches
        masks = np.split(columns["mask"], np.cumsum(branches)[:-1], axis=1) if branches else None
        return (
            DecisionSteps([columns["obs"]], reward, ids, masks, groups, group_reward),
            TerminalSteps(
                [columns["last_obs"][ended]],
                columns["reward"][ended],
                columns["ends"][ended] == INTERRUPTED,
                ids[ended],
                groups[ended],
                columns["group_reward"][ended],
            ),
        )

    def weights(self) -> dict[str, list[AnyArray]]:
        """Return copies of the weights of each network, in ML-Agents' order."""
        n_signals = len(self.learner.algorithm.signals.names)
        return {
            name: [values.detach().numpy().copy() for values in _parameters(network, n_signals)]
            for name, network in networks(self.learner.algorithm).items()
        }

    def has_effect(self) -> dict[str, list[bool]]:
        """Return whether each tensor of a network affects the network's output.

        The biases of attention keys do not, because they cancel out. Their gradients are rounding
        errors, which Adam turns into steps of usual size.
        """
        algorithm, result = self.learner.algorithm, {}
        for name, network in networks(algorithm).items():
            parameters = network.named_parameters()
            idle = {
                id(tensor)
                for parameter_name, tensor in parameters
                if parameter_name.endswith("attention.key.bias")
            }
            tensors = _parameters(network, len(algorithm.signals.names))
            result[name] = [id(tensor) not in idle for tensor in tensors]
        return result


def networks(algorithm: Any) -> dict[str, nn.Module]:
    """Return the networks of an algorithm and its reward signals, by name."""
    result: dict[str, nn.Module] = {"policy": algorithm.policy.actor}
    if isinstance(algorithm, XQC):
        result |= {"actor": algorithm.actor, "critics": algorithm.critics}
        if algorithm.target is not None:
            result["target"] = algorithm.target
        result["temperature"] = nn.ParameterList([algorithm.log_alpha])
    elif isinstance(algorithm, SAC):
        result |= {"value": algorithm.value, "target": algorithm.target}
        result |= {"q1": algorithm.q_networks.first, "q2": algorithm.q_networks.second}
        result["temperature"] = nn.ParameterList([algorithm.log_alpha])
    else:
        result["critic"] = algorithm.critic
    for name, signal in algorithm.signals.by_name.items():
        if name == "rnd":
            result |= {"rnd predictor": signal.predictor, "rnd target": signal.target}
        elif name != "extrinsic":
            result[name] = signal.network
    return result


def _parameters(network: nn.Module, n_signals: int) -> Iterator[torch.Tensor]:
    """Yield the weights; a critic's heads signal by signal, as ML-Agents has a layer for each."""
    heads = network.heads if isinstance(network, Critic | GroupCritic | QNetwork) else None
    for parameter in network.parameters():
        if heads is None or (parameter is not heads.weight and parameter is not heads.bias):
            yield parameter
        elif parameter is heads.weight:
            for weight, bias in zip(
                heads.weight.chunk(n_signals), heads.bias.chunk(n_signals), strict=True
            ):
                yield weight
                yield bias


@contextmanager
def recorded(training: Training) -> Iterator[dict[str, list[AnyArray]]]:
    """Record the random draws of updates, in order.

    Yields lists of `shuffles` (new orders of rows or sequences), `integers` (rows of a replay,
    counted from its oldest row, and of a demonstration), `normal` and `uniform` numbers.
    """
    draws: dict[str, list[AnyArray]] = {
        name: [] for name in ("shuffles", "integers", "normal", "uniform")
    }
    algorithm = training.learner.algorithm

    class Stream:
        def __init__(self, stream: np.random.Generator) -> None:
            self.stream = stream

        def permutation(self, size: int) -> AnyArray:
            draws["shuffles"].append(self.stream.permutation(size))
            return draws["shuffles"][-1]

        def integers(self, low: int, high: int, n: int) -> AnyArray:
            drawn = self.stream.integers(low, high, n)
            replay = algorithm.replay
            draws["integers"].append(drawn if replay.remembers else len(replay) - 1 - drawn)
            return drawn

    def recording(name: str, draw: Any) -> Any:
        def drawn(*args: Any, **options: Any) -> torch.Tensor:
            result = draw(*args, **options)
            draws[name].append(result.numpy().copy())
            return result

        return drawn

    original = off_policy.squashed_action

    def squashed(*, mu: torch.Tensor, log_sigma: torch.Tensor, noise: torch.Tensor) -> Any:
        draws["normal"].append(noise.numpy().copy())
        return original(mu=mu, log_sigma=log_sigma, noise=noise)

    if isinstance(algorithm, off_policy.OffPolicy):
        algorithm.sampler.stream = Stream(algorithm.minibatch_stream)
    elif training.case.trainer == "ppo":
        algorithm.minibatch_stream = Stream(algorithm.minibatch_stream)
    if algorithm.bc is not None:
        algorithm.bc.stream = Stream(algorithm.bc.stream)
    with (
        patch.object(torch, "randint", recording("integers", torch.randint)),
        patch.object(torch, "rand", recording("uniform", torch.rand)),
        patch.object(off_policy, "squashed_action", squashed),
    ):
        yield draws


def sampled(weights: dict[str, list[AnyArray]]) -> dict[str, AnyArray]:
    """Return at most SAMPLED evenly spaced numbers of each tensor, in one array per network."""
    return {
        name: np.concatenate([array.ravel()[:: -(-array.size // SAMPLED)] for array in arrays])
        for name, arrays in weights.items()
    }
