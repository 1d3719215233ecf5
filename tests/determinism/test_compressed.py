"""Images that come as PNG are the same images: a run learns the same from them, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from test_resume import assert_equal_states, leaves

from pipeline.trainer.api import train
from pipeline.trainer.checkpoints.file import load_checkpoint

SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 256, "num_epoch": 2},
    "network_settings": {"hidden_units": 16, "num_layers": 1},
    "max_steps": 1500,
    "time_horizon": 5,
    "summary_freq": 1000,
}


@pytest.mark.usefixtures("private_cache")
def test_run_with_compressed_images_equals_the_run_with_numbers(packed, tmp_path):
    environment = packed("grid_world", tmp_path / "grid_world")
    weights = []
    for args in ([], ["--compress"]):
        result = train(
            environment,
            {"behaviors": {"GridWorld": SETTINGS}},
            seed=3,
            run_dir=tmp_path / "-".join(["run", *args]),
            env_args=args,
            log_folder=tmp_path / "logs",
        )
        behavior = result.behaviors["GridWorld"]
        assert behavior.n_updates >= 5
        weights.append(dict(leaves(load_checkpoint(behavior.checkpoint)["learner"]["algorithm"])))
        assert "Ignored" not in (tmp_path / "logs" / "Player-0.log").read_text()
    assert len([value for value in weights[0].values() if isinstance(value, np.ndarray)]) > 10
    assert_equal_states(*weights)
