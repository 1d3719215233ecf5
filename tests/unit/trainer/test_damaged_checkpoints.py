"""A checkpoint that is damaged, or is none, is refused in one line, whoever reads it."""

from __future__ import annotations

import contextlib
import io
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from stops_after import StopsAfter
from toys import Chase

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import CheckpointError, Interrupted, TrainingError
from pipeline.settings import load_run_settings
from pipeline.stages.export import publish
from pipeline.trainer.checkpoints.file import load_checkpoint, save_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy

SETTINGS = {
    "behaviors": {
        "Toy": {
            "trainer_type": "ppo",
            "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
            "network_settings": {"hidden_units": 8, "num_layers": 1, "normalize": True},
            "max_steps": 500,
            "time_horizon": 8,
            "summary_freq": 100,
        }
    }
}
OTHERS = ("x", -1, 3.5, None, [], {}, b"x", torch.zeros(0), torch.zeros(2))


def train(folder, **options):
    settings = load_run_settings(None, overrides=SETTINGS)
    toy = InProcessEnvironment(Chase(n_agents=4))
    return pipeline.train(toy, settings, seed=1, run_dir=folder, **options)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The bytes of a resume file with experience and environments."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        stop = "pipeline.trainer.api.stop_on_signal"
        patched.setattr(stop, lambda: contextlib.nullcontext(StopsAfter(60)))
        with pytest.raises(Interrupted):
            train(folder)
    return (folder / "Toy" / "checkpoint.pt").read_bytes()


def places(value, place=()):
    """The place of every value in a nested one."""
    yield place
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*place, key))


def edited(value, place, new):
    """A copy with a new value in a place; without the entry if `new` is Ellipsis."""
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
        (None, "there is no checkpoint here"),
        (Path.mkdir, "cannot be read"),
        (b"hello world\n", "this is not a checkpoint"),
        (b"PK\x03\x04" + b"0" * 99, "this is not a checkpoint"),
        (b"\x80.", "this is not a checkpoint"),
        *(({"format": number}, NOT_OURS) for number in (3, torch.zeros(0))),
        *((state, NOT_OURS) for state in ({"weights": 1}, [1, 2], torch.zeros(3))),
        (THEIRS, r"a checkpoint of ML-Agents.*docs/how-to/migrating\.md"),
    ],
)
def test_what_is_no_checkpoint_is_refused(content, said, tmp_path):
    path = tmp_path / "checkpoint.pt"
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
        # torch warned of a layer without numbers, and went on
        *(
            (("spec", "discrete_branches"), sizes, "branch")
            for sizes in ((0,), (3, -1), (1 << 40,))
        ),
    ],
)
def test_a_checkpoint_without_a_whole_policy_is_refused(place, new, said, stopped, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(stopped)
    save_checkpoint(path, edited(load_checkpoint(path), place, new))
    with pytest.raises(CheckpointError, match=rf"^[^\n]*whole policy[^\n]*{said}[^\n]*$"):
        load_policy(path)


@pytest.mark.slow
def test_any_value_that_is_changed_is_noticed(stopped, tmp_path):
    state = torch.load(io.BytesIO(stopped), weights_only=True)
    path = tmp_path / "checkpoint.pt"
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


def test_a_changed_file_is_neither_resumed_nor_begun_with_nor_exported(stopped, tmp_path):
    path = tmp_path / "Toy" / "checkpoint.pt"
    path.parent.mkdir()
    state = torch.load(io.BytesIO(stopped), weights_only=True)
    torch.save(edited(state, ("learner", "step"), "x"), path)
    content = path.read_bytes()
    refused = re.escape(f"{path}: its values are not those that were saved")
    with pytest.raises(CheckpointError, match=refused):
        train(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=refused):
        train(tmp_path / "new", init_from={"Toy": path})
    with pytest.raises(CheckpointError, match=refused):
        publish(path, tmp_path / "onnx")
    assert path.read_bytes() == content
    assert not (tmp_path / "onnx").exists()


def test_a_file_of_the_format_without_digest_is_resumed(stopped, tmp_path):
    state = torch.load(io.BytesIO(stopped), weights_only=True)
    del state["digest"]
    path = tmp_path / "Toy" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="not those that were saved"):
        train(tmp_path, resume=True)
    torch.save(state | {"format": 1}, path)
    assert train(tmp_path, resume=True).behaviors["Toy"].steps >= 500


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["policy.actor.heads.mu.weight", "critic.heads.bias"])
def test_weights_that_are_not_finite_are_neither_read_nor_written(place, value, stopped, tmp_path):
    network, _, name = place.partition(".")
    state = torch.load(io.BytesIO(stopped), weights_only=True)
    keys = ("learner", "algorithm", network, name)
    weights = state["learner"]["algorithm"][network][name].clone()
    weights.view(-1)[0] = value
    state = edited(state, keys, weights) | {"format": 1}
    del state["digest"]
    path = tmp_path / "Toy" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save(state, path)
    refused = rf"^{re.escape(str(path))}: learner\.algorithm\.{re.escape(place)} has numbers that"
    with pytest.raises(CheckpointError, match=refused):
        train(tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=refused):
        train(tmp_path / "new", init_from={"Toy": path})
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
def test_an_entry_that_names_files_wrongly_is_refused(entry, stopped, tmp_path):
    state = torch.load(io.BytesIO(stopped), weights_only=True)
    del state["digest"]
    path = tmp_path / "checkpoint.pt"
    torch.save(state | {"format": 1} | entry, path)
    refused = rf"program: {next(iter(entry))}\S* is not what a checkpoint has there$"
    with pytest.raises(CheckpointError, match=refused):
        load_checkpoint(path)
