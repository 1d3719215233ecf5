from __future__ import annotations

import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.stages.shared import policies
from pipeline.trainer.checkpoints.file import save_checkpoint


def test_policies_of_several_behaviors_come_apart_as_they_were(tmp_path):
    checkpoints = {}
    for name in ("B", "My Behavior"):
        checkpoints[name] = tmp_path / f"{name}.pt"
        save_checkpoint(checkpoints[name], {"behavior": name, "weights": torch.ones(3)})
    policies.join(checkpoints, tmp_path / "policy.pt", history=[{"stage": "train"}])
    paths = policies.split(tmp_path / "policy.pt", tmp_path / "again")
    assert paths == {name: tmp_path / "again" / f"{name}.pt" for name in checkpoints}
    for name, path in paths.items():
        assert path.read_bytes() == checkpoints[name].read_bytes()
    assert policies.history(tmp_path / "policy.pt") == [{"stage": "train"}]


@pytest.mark.parametrize("name", ["../evil", "/evil", "", "a/b", "a" * 300])
def test_a_name_that_leads_elsewhere_is_refused(name, tmp_path):
    save_checkpoint(tmp_path / "policy.pt", {"behaviors": {"A": {}, name: {}}})
    with pytest.raises(CheckpointError, match=r"policy\.pt: behavior '.*cannot name a folder"):
        policies.split(tmp_path / "policy.pt", tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.pt"]
