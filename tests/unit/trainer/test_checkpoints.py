import errno
import io
import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.trainer.checkpoints.file import digest, load_checkpoint, save_checkpoint
from pipeline.trainer.checkpoints.manager import numbered

STATE = {
    "weights": torch.arange(500.0),
    "stream": {"state": 2**127 + 3, "inc": 1},
    "text": "x",
    "nothing": None,
}


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["array", "tensor"])
def test_digest_tells_states_apart_by_every_number_and_by_nothing_else(kind):
    numbers = [float(n) for n in range(5000)]
    other = [*numbers[:2500], 0.5, *numbers[2501:]]
    assert digest({"a": kind(numbers)}) != digest({"a": kind(other)})
    assert digest({"a": kind(numbers)}) == digest({"a": kind([[n, 0.0] for n in numbers])[:, 0]})
    assert digest({"a": kind(numbers)}) != digest({"b": kind(numbers)})


def test_equal_states_give_equal_bytes_whatever_the_file_is_called(tmp_path):
    for name in ("a.pt", "longer.pt"):
        save_checkpoint(tmp_path / name, STATE | {"weights": STATE["weights"].clone()})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "longer.pt").read_bytes()


def test_equal_states_give_equal_bytes_whichever_objects_they_share(tmp_path):
    """A resumed run's objects come from a file, so they are not the objects of its program."""

    def text(letters):
        return "".join(letters)

    key, rows, shape = text("rows"), [1, text("ab")], (2, text("ab"))
    shared = {"a": {key: rows, "shape": shape}, "b": OrderedDict({key: rows, "shape": shape})}
    shared["raw"] = [b"12", bytes(bytearray(b"12"))]
    apart = {
        text("a"): {text("rows"): [1, text("ab")], text("shape"): (2, text("ab"))},
        text("b"): {text("rows"): [1, text("ab")], text("shape"): (2, text("ab"))},
        text("raw"): [b"12"] * 2,
    }
    save_checkpoint(tmp_path / "shared.pt", shared)
    save_checkpoint(tmp_path / "apart.pt", apart)
    assert (tmp_path / "shared.pt").read_bytes() == (tmp_path / "apart.pt").read_bytes()
    reloaded = load_checkpoint(tmp_path / "apart.pt")
    assert reloaded == apart
    save_checkpoint(tmp_path / "again.pt", reloaded)
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "apart.pt").read_bytes()


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"), [(os, "fsync"), (Path, "write_bytes"), (Path, "replace")]
)
def test_full_disk_leaves_the_last_checkpoint_and_nothing_else(tmp_path, monkeypatch, owner, name):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full_disk)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(path, STATE)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "No space left on device" in message
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_code_in_a_file_is_not_run_and_nobody_is_told_to_run_it(tmp_path):
    mark, path = tmp_path / "mark", tmp_path / "c.pt"
    contents = [pickle.dumps({"format": 1, "x": Trap(mark)})]
    for as_zip in (True, False):
        buffer = io.BytesIO()
        torch.save({"format": 1, "x": Trap(mark)}, buffer, _use_new_zipfile_serialization=as_zip)
        contents.append(buffer.getvalue())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert "weights_only" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not mark.exists()


def test_damage_is_found_or_harmless(tmp_path):
    path = tmp_path / "c.pt"
    save_checkpoint(path, STATE)
    content, rng = path.read_bytes(), random.Random(0)  # noqa: S311  # which bits to flip
    n_refused = 0
    for turn in range(300):
        damaged = bytearray(content)
        if turn % 3 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            state = load_checkpoint(path)
        except CheckpointError:
            n_refused += 1
        else:
            assert torch.equal(state["weights"], STATE["weights"])
            assert state["stream"] == STATE["stream"]
    assert n_refused > 200


def test_oldest_checkpoints_go_so_that_as_many_as_wanted_remain(tmp_path):
    for step in (900, 1000, 200):
        (tmp_path / f"B-{step}.pt").touch()
    for other in ("B-x.pt", "Bee-1.pt", "checkpoint.pt", "B-100.onnx"):
        (tmp_path / other).touch()
    path, surplus = numbered(tmp_path, "B", 2, 1100)
    assert path == tmp_path / "B-1100.pt"
    assert [old.name for old in surplus] == ["B-200.pt", "B-900.pt"]


@pytest.mark.parametrize(
    ("keep", "gone"), [(5, []), (3, []), (0, []), (-1, []), (2, [1]), (1, [1, 2])]
)
def test_checkpoint_written_again_counts_once(tmp_path, keep, gone):
    for step in (1, 2, 3):
        (tmp_path / f"B-{step}.pt").touch()
    _, surplus = numbered(tmp_path, "B", keep, 3)
    assert surplus == [tmp_path / f"B-{step}.pt" for step in gone]
