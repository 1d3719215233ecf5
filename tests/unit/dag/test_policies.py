import pytest
import torch

from pipeline.dag import policies
from pipeline.errors import CheckpointError
from pipeline.trainer.checkpoints.file import save_checkpoint


def test_split_restores_the_checkpoint_files_that_join_wrote_into_one_file(tmp_path):
    """The order of the behaviors has no effect on the file."""
    checkpoints, history = {}, [{"stage": "train"}, {"stage": "export"}]
    for name in ("B", "My Behavior", "A"):
        checkpoints[name] = tmp_path / f"{name}-1.pt"
        save_checkpoint(checkpoints[name], {"behavior": name, "weights": torch.ones(3)})
    one, two = tmp_path / "one.pt", tmp_path / "two.pt"
    policies.join(checkpoints, one, history=history)
    policies.join(dict(reversed(checkpoints.items())), two, history=history)
    assert one.read_bytes() == two.read_bytes()
    paths = policies.split(one, tmp_path / "again")
    assert paths == {name: tmp_path / "again" / f"{name}.pt" for name in checkpoints}
    for name, path in paths.items():
        assert path.read_bytes() == checkpoints[name].read_bytes()
    assert policies.history(one) == history


@pytest.mark.parametrize("name", ["../evil", "/evil", "", "a/b", "a" * 300])
def test_split_refuses_a_behavior_name_that_cannot_be_a_file_name(name, tmp_path):
    save_checkpoint(tmp_path / "policy.pt", {"behaviors": {"A": {}, name: {}}})
    with pytest.raises(CheckpointError, match=r"policy\.pt: behavior '.*cannot be a folder's name"):
        policies.split(tmp_path / "policy.pt", tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["policy.pt"]
