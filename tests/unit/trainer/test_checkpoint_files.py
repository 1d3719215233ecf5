"""Checkpoint files: equal states give equal bytes, and damaged files are refused in one line."""

import contextlib
import errno
import io
import os
import pickle
import random
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from stops_after import StopsAfter
from toys import Chase

import pipeline
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import CheckpointError, Interrupted, TrainingError
from pipeline.trainer.checkpoints.file import (
    digest,
    from_saved,
    load_checkpoint,
    save_checkpoint,
    to_saved,
)
from pipeline.trainer.checkpoints.restore import load_policy

STATE = {
    "weights": torch.arange(500.0),
    "stream": {"state": 2**127 + 3, "inc": 1},
    "text": "x",
    "nothing": None,
}


class Trap:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["array", "tensor"])
def test_digest_of_a_checkpoint_depends_on_keys_and_numbers_but_not_on_memory_layout(kind):
    numbers = [float(n) for n in range(5000)]
    other = [*numbers[:2500], 0.5, *numbers[2501:]]
    assert digest({"a": kind(numbers)}) != digest({"a": kind(other)})
    assert digest({"a": kind(numbers)}) == digest({"a": kind([[n, 0.0] for n in numbers])[:, 0]})
    assert digest({"a": kind(numbers)}) != digest({"b": kind(numbers)})


def test_bytes_of_a_checkpoint_do_not_depend_on_the_name_of_its_file(tmp_path):
    for name in ("a.pt", "longer.pt"):
        save_checkpoint(tmp_path / name, STATE | {"weights": STATE["weights"].clone()})
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "longer.pt").read_bytes()


def test_bytes_of_a_checkpoint_do_not_depend_on_whether_its_entries_share_objects(tmp_path):
    """Objects of a resumed run come from a file, so fewer of them are shared with the program."""

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
def test_failed_write_on_a_full_disk_keeps_the_old_checkpoint_and_leaves_no_other_file(
    tmp_path, monkeypatch, owner, name
):
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


def test_code_in_a_checkpoint_is_not_run_and_the_error_does_not_suggest_to_run_the_code(tmp_path):
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


def test_checkpoint_with_missing_or_changed_bytes_is_refused_or_loads_the_same_state(tmp_path):
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


BEHAVIOR = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
    "network_settings": {"hidden_units": 8, "num_layers": 1, "normalize": True},
    "max_steps": 500,
    "time_horizon": 8,
}
OTHERS = ("x", -1, 3.5, None, [], {}, b"x", torch.zeros(0), torch.zeros(2))


def train(folder, **options):
    toy = InProcessEnvironment(Chase(n_agents=4))
    return pipeline.train(toy, {"behaviors": {"Toy": BEHAVIOR}}, seed=1, run_dir=folder, **options)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the bytes of a resume file with experience and the environments' state."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        stop = "pipeline.trainer.api.stop_on_signal"
        patched.setattr(stop, lambda: contextlib.nullcontext(StopsAfter(60)))
        with pytest.raises(Interrupted):
            train(folder)
    return (folder / "Toy" / "checkpoint.pt").read_bytes()


@pytest.fixture
def state(stopped):
    return torch.load(io.BytesIO(stopped), weights_only=True)


@pytest.fixture
def path(tmp_path):
    """Return the path at which a run in the folder `tmp_path` looks for its checkpoint."""
    (tmp_path / "Toy").mkdir()
    return tmp_path / "Toy" / "checkpoint.pt"


def places(value, place=()):
    """Yield the keys that lead to each value of a nested value."""
    yield place
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*place, key))


def edited(value, place, new):
    """Return a copy of `value` with `new` at `place`; if `new` is Ellipsis, without that entry."""
    if not place:
        return new
    key, *rest = place
    entries = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if not rest and new is ...:
        del entries[key]
    else:
        entries[key] = edited(entries[key], rest, new)
    return entries if isinstance(value, dict) else type(value)(entries.values())


NOT_OURS = "this is not a checkpoint of this program"
THEIRS = {"Policy": {"w": torch.ones(1)}, "global_step": OrderedDict(a=torch.ones(1))}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "this checkpoint does not exist"),
        (Path.mkdir, "cannot be read"),
        (b"hello world\n", "this is not a checkpoint"),
        (b"PK\x03\x04" + b"0" * 99, "this is not a checkpoint"),
        (b"\x80.", "this is not a checkpoint"),
        *(({"format": number}, NOT_OURS) for number in (3, torch.zeros(0))),
        *((state, NOT_OURS) for state in ({"weights": 1}, [1, 2], torch.zeros(3))),
        (THEIRS, r"a checkpoint of ML-Agents.*docs/how-to/migrating\.md"),
    ],
)
def test_file_that_is_no_checkpoint_is_refused_with_a_message_of_one_line(content, said, path):
    if content is Path.mkdir:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: [^\n]*{said}[^\n]*$"):
        load_checkpoint(path)


WEIGHTS = ("learner", "algorithm", "policy", "actor.heads.mu.weight")


@pytest.mark.parametrize(
    ("place", "new", "said"),
    [
        *(((part,), ..., part) for part in ("behavior", "spec", "settings", "learner")),
        (WEIGHTS, torch.zeros(7, 8), "size mismatch"),
        # torch only warns of a layer without weights, so the program has to check the sizes.
        *(
            (("spec", "discrete_branches"), sizes, "branch")
            for sizes in ((0,), (3, -1), (1 << 40,))
        ),
    ],
)
def test_checkpoint_without_a_complete_policy_is_refused(place, new, said, stopped, path):
    path.write_bytes(stopped)
    save_checkpoint(path, edited(load_checkpoint(path), place, new))
    with pytest.raises(CheckpointError, match=rf"^[^\n]*complete policy[^\n]*{said}[^\n]*$"):
        load_policy(path)


@pytest.mark.slow
def test_changed_value_anywhere_in_a_checkpoint_is_refused(state, path):
    n_places = 0
    for number, place in enumerate(list(places(state))[1:]):
        old = state
        for key in place:
            old = old[key]
        spoilt = [OTHERS[number % len(OTHERS)], ...]
        if isinstance(old, torch.Tensor):
            spoilt += [
                old[None],
                (old + 1 if old.dtype != torch.bool else ~old) if old.numel() else 1,
            ]
        elif isinstance(old, bool | int | float):
            spoilt += [old + 1]
        for new in spoilt:
            if type(new) is type(old) and not isinstance(old, torch.Tensor) and new == old:
                continue
            torch.save(edited(state, place, new), path)
            with pytest.raises(CheckpointError, match=rf"^{re.escape(str(path))}: [^\n]+$"):
                load_checkpoint(path)
        n_places += 1
    assert n_places > 200


def test_changed_checkpoint_is_refused_by_resume_init_from_and_export(state, path, tmp_path):
    torch.save(edited(state, ("learner", "step"), "x"), path)
    content = path.read_bytes()
    refused = re.escape(f"{path}: its values do not match its digest")
    for use in (
        lambda: train(tmp_path, resume=True),
        lambda: train(tmp_path / "new", init_from={"Toy": path}),
        lambda: publish(path, tmp_path / "onnx"),
    ):
        with pytest.raises(CheckpointError, match=refused):
            use()
    assert path.read_bytes() == content
    assert not (tmp_path / "onnx").exists()


def test_run_resumes_from_a_checkpoint_of_format_1_which_has_no_digest(state, path, tmp_path):
    del state["digest"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="do not match its digest"):
        train(tmp_path, resume=True)
    torch.save(state | {"format": 1}, path)
    assert train(tmp_path, resume=True).behaviors["Toy"].steps >= 500


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["policy.actor.heads.mu.weight", "critic.heads.bias"])
def test_non_finite_weights_are_neither_read_nor_written(place, value, state, path, tmp_path):
    network, _, name = place.partition(".")
    keys = ("learner", "algorithm", network, name)
    weights = state["learner"]["algorithm"][network][name].clone()
    weights.view(-1)[0] = value
    state = edited(state, keys, weights) | {"format": 1}
    del state["digest"]
    torch.save(state, path)
    refused = rf"^{re.escape(str(path))}: learner\.algorithm\.{re.escape(place)} has values that"
    for folder, options in (
        (tmp_path, {"resume": True}),
        (tmp_path / "new", {"init_from": {"Toy": path}}),
    ):
        with pytest.raises(CheckpointError, match=refused):
            train(folder, **options)
    content = path.read_bytes()
    with pytest.raises(TrainingError, match=r"^behavior Toy, step \d+: [^\n]*is not finite"):
        save_checkpoint(path, state)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "entry",
    [
        {"replay": True},
        {"replay": [1]},
        {"replay": [["replay-1.npz"]]},
        {"replay": [["replay-1.npz", 3, 1]]},
        {"replay_digest": 3},
        {"replay_rows": []},
        {"ranks": [{"learner": True}]},
        {"ranks": [{"learner": {"algorithm": 1}}]},
    ],
    ids=str,
)
def test_checkpoint_entry_of_a_wrong_type_is_refused(entry, state, path):
    del state["digest"]
    torch.save(state | {"format": 1} | entry, path)
    refused = rf"program: {next(iter(entry))}\S* is not of the type that a checkpoint has there$"
    with pytest.raises(CheckpointError, match=refused):
        load_checkpoint(path)


def test_arrays_from_a_saved_state_are_writable_copies():
    saved = to_saved({"rows": [np.arange(3.0)]})
    taken = from_saved(saved)
    taken["rows"][0][:] = 9.0
    assert saved["rows"][0].tolist() == [0.0, 1.0, 2.0]
