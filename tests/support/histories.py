"""Random messages of two workers to a learner, and the learner's actions and updates."""

import numpy as np
import torch
from steps import decision_steps, take_turn, terminal_steps

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec

SPEC = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec(1, (2, 3)))
PLAIN = {"hidden_units": 8, "num_layers": 1, "normalize": True}
MEMORY = PLAIN | {"memory": {"sequence_length": 3, "memory_size": 4}}
REPLAY = {"buffer_size": 200, "buffer_init_steps": 20, "save_replay_buffer": True}
ON_POLICY = {"buffer_size": 32, "num_epoch": 1}
NUMBERS = {
    name: {"batch_size": 8, **numbers}
    for name, numbers in (("ppo", ON_POLICY), ("poca", ON_POLICY), ("sac", REPLAY))
}
N_AGENTS = 4


def messages(n, *, seed, grouped):
    """Return `n` messages of two workers: agents of two groups, with random ends of episodes."""
    rng = np.random.default_rng(seed)
    groups = np.array([1, 1, 2, 2] if grouped else [0] * N_AGENTS, np.int32)

    def part(kind, ids, **extra):
        obs = [rng.normal(size=(len(ids), 3)).astype(np.float32)]
        reward, shared = rng.normal(size=(2, len(ids))).astype(np.float32)
        shared = np.where(groups[ids] > 0, np.float32(0.5), np.float32(0.0)) * (shared > 0)
        values = {"reward": reward, "group_id": groups[ids], "group_reward": shared}
        if kind is decision_steps:
            extra["masks"] = [rng.random((len(ids), size)) < 0.3 for size in (2, 3)]
            for mask in extra["masks"]:
                mask[:, 0] = False
        return kind(obs, ids, **values, **extra)

    def worker(begins):
        ended = np.flatnonzero(rng.random(N_AGENTS) < (0.0 if begins else 0.2)).astype(np.int32)
        deciding = rng.permutation(N_AGENTS).astype(np.int32)
        stopped = rng.random(len(ended)) < 0.5
        return part(decision_steps, deciding), part(terminal_steps, ended, interrupted=stopped)

    return [[worker(time == 0) for _ in range(2)] for time in range(n)]


def learner_of(make_learner, trainer, network=PLAIN, **changes):
    """Return a learner for `SPEC`, made by the fixture of the trainer's tests."""
    numbers = {"hyperparameters": NUMBERS[trainer], "time_horizon": 5, "max_steps": 100_000}
    return make_learner(SPEC, trainer_type=trainer, network_settings=network, **numbers, **changes)


def play(learner, history, teams=("",)):
    """Return the learner's actions, steps and updates for messages, as plain values."""
    done = []
    for steps in history:
        for team in teams:
            decided = take_turn(learner, steps, team=team)
            done += [
                (action.continuous.tolist(), action.discrete.tolist()) for action in decided.actions
            ]
        while learner.learn():
            pass
        done.append((learner.step, learner.n_updates))
    return done


def plain(value):
    """Return a state as plain values, with lists in place of arrays and tensors."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
