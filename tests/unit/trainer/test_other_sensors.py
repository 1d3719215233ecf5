"""Observations that have changed places since a checkpoint was written."""

from __future__ import annotations

import numpy as np
import pytest
from toys import Chase

import pipeline
from pipeline.errors import CheckpointError
from pipeline.protocol.specs import ObservationSpec


class Renamed(Chase):
    """The same numbers, cut into two sensors of these names."""

    def __init__(self, *names, n_agents=4):
        super().__init__(n_agents=n_agents)
        ((self.behavior, spec),) = super().behavior_specs.items()
        self.width = spec.observation_specs[0].shape[0]
        self.cut = spec._replace(
            observation_specs=[ObservationSpec.vector(self.width, name) for name in names]
        )

    @property
    def behavior_specs(self):
        return {self.behavior: self.cut} if hasattr(self, "cut") else super().behavior_specs

    def doubled(self, steps):
        for part in steps[self.behavior]:
            part.obs[:] = [part.obs[0], np.zeros_like(part.obs[0])]
        return steps

    def reset(self):
        return self.doubled(super().reset())

    def step(self, actions):
        return self.doubled(super().step(actions))


def train(env, settings, folder, **more):
    return pipeline.train(env, settings, seed=1, run_dir=folder, **more)


def test_run_is_not_resumed_with_sensors_that_have_changed_places(quick, tmp_path, in_process):
    train(in_process(Renamed("ball", "paddle")), quick(max_steps=200), tmp_path)
    for first in ("paddle", "apddle"):  # the second as Unity sorts them after a misspelling
        with pytest.raises(CheckpointError, match=rf"\['ball', 'paddle'\].*\['{first}', 'ball'\]"):
            train(in_process(Renamed(first, "ball")), quick(), tmp_path, resume=True)


def test_other_names_are_told_where_a_run_is_resumed_or_begun(quick, tmp_path, in_process, caplog):
    train(in_process(Renamed("ball", "paddle")), quick(max_steps=200), tmp_path)
    other = {"init_from": {"Toy": tmp_path / "Toy/checkpoint.pt"}}
    train(in_process(Renamed("paddle", "ball")), quick(max_steps=200), tmp_path / "new", **other)
    train(in_process(Renamed("ball", "padle")), quick(), tmp_path, resume=True)
    lines = [
        record.getMessage() for record in caplog.records if "observations" in record.getMessage()
    ]
    assert len(lines) == 2
    assert "has ['paddle', 'ball']" in lines[0]
    assert "has ['ball', 'padle']" in lines[1]
    caplog.clear()
    train(in_process(Renamed("ball", "padle")), quick(max_steps=700), tmp_path, resume=True)
    assert not [record for record in caplog.records if "observations" in record.getMessage()]
