"""People who resume runs, edit the files of runs, and let agents come and go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from steps import decision_steps, take_turn, terminal_steps

from pipeline.data.slots import STALE_AFTER_MESSAGES
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings
from pipeline.trainer.learner import Learner

SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))
MEMORY = {"memory": {"sequence_length": 4, "memory_size": 4}}


def learner_of(trainer, network=None):
    settings = {
        "trainer_type": trainer,
        "hyperparameters": {"batch_size": 32, "buffer_size": 10_000},
        "network_settings": {"hidden_units": 4, "num_layers": 1} | (network or {}),
    }
    run = load_run_settings(None, overrides={"behaviors": {"B": settings}})
    return Learner("B", SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def message_of(agents):
    obs = [np.zeros((len(agents), 1))]
    return decision_steps(obs, agents, group_id=1), terminal_steps([np.zeros((0, 1))], [])


@pytest.mark.parametrize("network", [None, MEMORY], ids=["no_memory", "memory"])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
@pytest.mark.parametrize(
    ("n_messages", "n_left"),
    [(STALE_AFTER_MESSAGES - 100, 140), (STALE_AFTER_MESSAGES + 100, 41)],
)
def test_agents_that_are_silent_for_less_than_the_stated_time_stay(
    trainer, network, n_messages, n_left
):
    learner = learner_of(trainer, network)
    take_turn(learner, [message_of(range(100))])
    for _ in range(n_messages):
        take_turn(learner, [message_of([0])])
    for _ in range(2):  # new agents, so that the learner looks for vanished agents
        take_turn(learner, [message_of([0, *range(100, 140)])])
    assert learner.slots.n_taken == n_left
