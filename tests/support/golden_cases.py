"""Short trainings; the golden files in tests/unit/algos/golden have their weights.

A case has settings in the form of ML-Agents' files, which this project and ML-Agents read, and
experience: the messages of a few agents, and the agents' actions. `golden_training` trains with
this project, and `benchmarks/agreement.py` with ML-Agents, the reference.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.demos.demo_file import writing_demo

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.core.arrays import AnyArray

N_OBS = 5
N_MESSAGES = 12
"""Messages between two updates."""
TERMINATED, INTERRUPTED = 1, 2
N_DEMO = 25
"""Pairs of the demonstration; the last pair closes its episode."""

CONTINUOUS, DISCRETE, HYBRID = ActionSpec(2, ()), ActionSpec(0, (3, 2)), ActionSpec(2, (3, 2))
# By agent: the messages of each block of N_MESSAGES at which its episode ends, and the kind of end.
# With a horizon of 6, all trajectories are closed at the end of a block.
WHOLE: tuple[dict[int, int], ...] = ({}, {6: 1, 12: 1}, {3: 1, 9: 1, 12: 1}, {6: 1})
MIXED: tuple[dict[int, int], ...] = ({}, {4: 1, 9: 2, 12: 1}, {6: 1, 12: 2}, {5: 1, 12: 1})
TOGETHER: tuple[dict[int, int], ...] = (*[{5: 1, 12: 1}] * 3, *[{8: 2, 12: 1}] * 2)
APART: tuple[dict[int, int], ...] = ({12: 1}, {4: 1, 12: 1}, {7: 2, 12: 1}, {12: 2}, {9: 1, 12: 2})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A short training."""

    trainer: str = ""
    actions: ActionSpec
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    network: dict[str, Any] = field(default_factory=dict)
    signals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of the reward signals other than the extrinsic signal."""
    cloning: dict[str, Any] | None = None
    ends: tuple[dict[int, int], ...] = MIXED
    forbidden: float = 0.2
    """Probability with which a mask forbids a choice that is not taken."""
    differs: str = ""
    """Reason of an intended difference from ML-Agents' weights; empty if they are equal."""

    @property
    def n_agents(self) -> int:
        return len(self.ends)

    @property
    def groups(self) -> AnyArray:
        """int32 [N] group of each agent, 0 for agents without a group."""
        n = self.n_agents
        return np.array([1, 1, 1, 2, 2] if self.trainer == "poca" else [0] * n, np.int32)

    def settings(self, n_blocks: int, hidden_units: int, demo: Path) -> dict[str, Any]:
        """Return the behavior's section of an ML-Agents configuration."""
        n_rows = N_MESSAGES * self.n_agents
        common = {"batch_size": 16, "buffer_size": n_rows - 1, "learning_rate": 3e-3}
        if self.trainer in ("sac", "xqc"):
            common |= {"buffer_size": 100_000, "steps_per_update": 16, "tau": 0.1}
            common |= {"reward_signal_steps_per_update": 24, "init_entcoef": 0.5}
        else:
            common |= {"num_epoch": 2, "beta": 0.05, "lambd": 0.8, "epsilon": 0.2}
        if self.trainer == "poca":
            common |= {"batch_size": n_rows}
        network = {"hidden_units": hidden_units, "num_layers": 2}
        signals: dict[str, dict[str, Any]] = {"extrinsic": {"gamma": 0.9, "strength": 0.7}}
        for name, signal_settings in self.signals.items():
            signals[name] = {"network_settings": network, "learning_rate": 3e-3, **signal_settings}
        if "gail" in signals:
            signals["gail"]["demo_path"] = str(demo)
        result: dict[str, Any] = {
            "trainer_type": self.trainer,
            "hyperparameters": {**common, **self.hyperparameters},
            "network_settings": {**network, **self.network},
            "reward_signals": signals,
            "time_horizon": 6,
            "max_steps": 2 * n_blocks * n_rows,
            "summary_freq": 10**9,
            "checkpoint_interval": 10**9,
        }
        if self.cloning is not None:
            result["behavioral_cloning"] = {"demo_path": str(demo), **self.cloning}
        return result


_MEMORY = {"memory": {"sequence_length": 3, "memory_size": 8}}
_CLONING = {"strength": 0.5, "batch_size": 8, "num_epoch": 2}
_AT_ONCE = {"buffer_init_steps": 0}
_OURS = "the reference has no such trainer"
_SCHEDULES = ("learning_rate_schedule", "beta_schedule", "epsilon_schedule")
_CASES = {
    "ppo, continuous": Case(actions=CONTINUOUS),
    "ppo, discrete": Case(actions=DISCRETE),
    "ppo, hybrid": Case(actions=HYBRID),
    "ppo, constant schedules": Case(
        actions=HYBRID, hyperparameters=dict.fromkeys(_SCHEDULES, "constant")
    ),
    "ppo, shared critic": Case(actions=CONTINUOUS, hyperparameters={"shared_critic": True}),
    "ppo, shared critic, memory": Case(
        actions=CONTINUOUS, network=_MEMORY, hyperparameters={"shared_critic": True}, ends=WHOLE
    ),
    "ppo, normalised": Case(
        actions=HYBRID,
        network={"normalize": True},
        hyperparameters={"max_grad_norm": 0.3},
        signals={"rnd": {"network_settings": {"normalize": True, "hidden_units": 8}}},
        differs="it values each trajectory with the statistics of when it came",
    ),
    "ppo, memory": Case(actions=HYBRID, network=_MEMORY, ends=WHOLE),
    "ppo, memory, short sequences": Case(
        actions=CONTINUOUS,
        network=_MEMORY,
        differs="rows that fill sequences up count in the mean of advantages",
    ),
    "ppo, values clipped": Case(
        actions=CONTINUOUS,
        hyperparameters={
            "clip_value": True,
            "epsilon": 0.05,
            "epsilon_schedule": "constant",
            "num_epoch": 4,
        },
        signals={"rnd": {"gamma": 0.8}},
    ),
    "ppo, curiosity and rnd": Case(
        actions=DISCRETE,
        signals={"curiosity": {"gamma": 0.8, "strength": 0.4}, "rnd": {"strength": 0.3}},
    ),
    "ppo, gail": Case(actions=CONTINUOUS, signals={"gail": {"strength": 0.5}}),
    "ppo, gail with actions": Case(
        actions=HYBRID,
        signals={"gail": {"use_actions": True, "use_vail": True}},
        differs="actions have no part in its gradient penalty",
    ),
    "ppo, curiosity, hybrid": Case(
        actions=HYBRID,
        signals={"curiosity": {"gamma": 0.8}},
        differs="its curiosity sees continuous actions as drawn, not as the environment gets them",
    ),
    "ppo, cloning, hybrid": Case(
        actions=HYBRID,
        cloning={**_CLONING, "steps": 120},
        differs="it compares actions in -3..3 with the expert's in -1..1",
    ),
    "ppo, cloning, discrete": Case(
        actions=DISCRETE, cloning={**_CLONING, "samples_per_update": 16}
    ),
    "ppo, cloning, continuous": Case(
        actions=CONTINUOUS, network={"deterministic": True}, cloning=_CLONING
    ),
    "ppo, cloning, memory": Case(actions=DISCRETE, network=_MEMORY, ends=WHOLE, cloning=_CLONING),
    "sac, continuous": Case(actions=CONTINUOUS, ends=WHOLE),
    "sac, discrete": Case(actions=DISCRETE, ends=WHOLE, forbidden=0.0),
    "sac, memory": Case(actions=CONTINUOUS, network=_MEMORY, ends=WHOLE),
    "sac, normalised": Case(actions=CONTINUOUS, network={"normalize": True}, ends=WHOLE),
    "sac, curiosity and gail": Case(
        actions=CONTINUOUS,
        ends=WHOLE,
        signals={"curiosity": {"gamma": 0.8, "strength": 0.4}, "gail": {"strength": 0.5}},
    ),
    "sac, cloning": Case(actions=DISCRETE, ends=WHOLE, forbidden=0.0, cloning=_CLONING),
    "sac, hybrid": Case(
        actions=HYBRID,
        network=_MEMORY,
        differs="its value has continuous actions' entropy with the other sign and its policy's "
        "loss their value twice; short sequences are padded, an episode cut short leads nowhere; "
        "forbidden choices count in the entropy that it aims at",
    ),
    "xqc, continuous": Case(
        actions=CONTINUOUS, hyperparameters=_AT_ONCE, network={"normalize": True}, differs=_OURS
    ),
    "xqc, hybrid": Case(
        actions=HYBRID,
        hyperparameters={**_AT_ONCE, "n_steps": 3, "policy_delay": 2},
        signals={"rnd": {"gamma": 0.9, "strength": 0.4}},
        differs=_OURS,
    ),
    "xqc, cloning": Case(
        actions=DISCRETE, hyperparameters=_AT_ONCE, cloning=_CLONING, differs=_OURS
    ),
    "xqc, crossq": Case(
        actions=CONTINUOUS,
        hyperparameters={**_AT_ONCE, "critic": "crossq", "reward_normalization": False},
        differs=_OURS,
    ),
    "poca, continuous": Case(actions=CONTINUOUS, ends=TOGETHER),
    "poca, discrete": Case(actions=DISCRETE, ends=TOGETHER),
    "poca, hybrid": Case(actions=HYBRID, ends=TOGETHER),
    "poca, rnd": Case(actions=CONTINUOUS, ends=TOGETHER, signals={"rnd": {"gamma": 0.8}}),
    "poca, members end apart": Case(
        actions=CONTINUOUS,
        ends=APART,
        differs="its values of what follows an agent's end count the agent itself",
    ),
    "poca, memory": Case(
        actions=DISCRETE,
        network=_MEMORY,
        ends=APART,
        differs="its critic remembers what it saw itself, not what its agents remember",
    ),
}
CASES = {name: replace(case, trainer=name.partition(",")[0]) for name, case in _CASES.items()}
"""All cases by name; a name begins with the trainer."""


def experience(name: str, n_blocks: int) -> dict[str, AnyArray]:
    """Return observations, actions, rewards and ends of N agents in M messages, [M, N, ...] each.

    Drawn from a generator whose numbers NumPy never changes; log probabilities are near the values
    of an untrained policy.
    """
    case = CASES[name]
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    n_messages, N = n_blocks * N_MESSAGES + 1, case.n_agents
    actions = case.actions

    def normal(*size: int) -> AnyArray:
        return draw.standard_normal((n_messages, N, *size)).astype(np.float32)

    continuous = normal(actions.continuous_size)
    mask = draw.random_sample((n_messages, N, sum(actions.discrete_branches))) < case.forbidden
    choices, log_probs, first = [], [-0.5 * continuous**2 - 0.92], 0
    for size in actions.discrete_branches:
        chosen = draw.randint(size, size=(n_messages, N))
        np.put_along_axis(mask[..., first : first + size], chosen[..., None], values=False, axis=2)
        allowed = size - mask[..., first : first + size].sum(-1, keepdims=True)
        choices.append(chosen)
        log_probs.append(-np.log(allowed))
        first += size
    log_probs = np.concatenate(log_probs, axis=-1)
    ends = np.zeros((n_messages, N), np.int64)
    for agent, agent_ends in enumerate(case.ends):
        for message, ending in agent_ends.items():
            ends[message::N_MESSAGES, agent] = ending
    return {
        "obs": normal(N_OBS),
        "last_obs": normal(N_OBS),
        "continuous": np.tanh(continuous) if case.trainer == "sac" else continuous,
        "discrete": np.stack(choices, axis=-1)
        if choices
        else np.zeros((n_messages, N, 0), np.int64),
        "log_prob": (log_probs + 0.15 * normal(log_probs.shape[-1])).astype(np.float32),
        "mask": mask,
        "reward": normal(),
        "group_reward": normal()[:, case.groups] * (case.groups > 0),
        "ends": ends,
        "groups": case.groups,
    }


def demonstration(name: str, folder: Path) -> Path:
    """Write the demonstration that a case imitates: an episode of random steps."""
    case = CASES[name]
    draw = np.random.RandomState(zlib.crc32(name.encode()) + 1)
    spec = behavior(case)
    sizes = case.actions.discrete_branches
    choices = [draw.randint(size, size=N_DEMO) for size in sizes]
    path = folder / "expert.demo"
    with writing_demo(path, "B?team=0", spec) as writer:
        writer.append(
            obs=[draw.standard_normal((N_DEMO, N_OBS)).astype(np.float32) + 0.5],
            actions=ActionTuple(
                draw.uniform(-1, 1, (N_DEMO, case.actions.continuous_size)).astype(np.float32),
                np.stack(choices, axis=1).astype(np.int32)
                if sizes
                else np.zeros((N_DEMO, 0), np.int32),
            ),
            reward=np.zeros(N_DEMO, np.float32),
            done=np.arange(N_DEMO) == N_DEMO - 1,
            interrupted=np.zeros(N_DEMO, np.bool_),
        )
    return path


def behavior(case: Case) -> BehaviorSpec:
    return BehaviorSpec([ObservationSpec.vector(N_OBS)], case.actions)


def golden_file(name: str) -> str:
    """Return the name of the file with a case's weights."""
    return f"{name.replace(',', '').replace(' ', '_')}.npz"
