"""People who hand over files and messages that were made to do harm, or are of other programs."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import resource
import time
import zipfile

import pytest
import torch
from stops_after import StopsAfter
from toys import Chase

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import CheckpointError, Interrupted
from pipeline.settings import load_run_settings
from pipeline.trainer.checkpoints.file import digest, load_checkpoint
from pipeline.trainer.checkpoints.restore import load_policy, resumes_exactly

SETTINGS = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 64, "num_epoch": 1},
    "network_settings": {"hidden_units": 4, "num_layers": 1},
    "max_steps": 400,
    "time_horizon": 8,
}
RUN = load_run_settings(None, overrides={"behaviors": {"Toy": SETTINGS}})
MOST_BYTES, MOST_S = 200 << 20, 5.0


def itself():
    items = []
    items.append(items)
    return items


def shared(n):
    """A list that has 2^n numbers, in n lists of the file."""
    items = [1, 1]
    for _ in range(n):
        items = [items, items]
    return items


def nested(n):
    items = ()
    for _ in range(n):
        items = (items,)
    return items


def quantized():
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def views():
    numbers = torch.zeros(200_000)
    return [numbers[i:] for i in range(1000)]


HOSTILE = {
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse_rows": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.ones(10**6, device="meta"),
    "quantized": quantized,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "holds_itself": itself,
    "shared": lambda: shared(60),
    "deep": lambda: nested(400),
    "expanded": lambda: torch.zeros(1).expand(10**9),
    "expanded_far": lambda: torch.zeros(1).expand(10**12),
    "views": views,
    "dtype": lambda: torch.float32,
    "size": lambda: torch.Size([2]),
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(3),
    "complex_number": lambda: 1j,
    "huge_number": lambda: 1 << 4000,
}


def refused(path, read):
    """Read a file, which must be refused in one line within the limits."""
    limit, began = MOST_BYTES + 10 * path.stat().st_size, time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"^[^\n]{1,600}$") as caught:
        read()
    assert time.monotonic() - began < MOST_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < limit >> 10
    return str(caught.value)


@pytest.mark.parametrize("is_digested", [True, False])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of kinds that it calls unfinished
def test_checkpoint_with_tensors_and_values_that_ours_do_not_have(kind, is_digested, tmp_path):
    path = tmp_path / "checkpoint.pt"
    state = {"format": 1, "behavior": "Toy", "learner": {"step": 1, "algorithm": HOSTILE[kind]()}}
    if is_digested:
        state |= {"format": 2, "digest": "0" * 64}
    torch.save(state, path)
    message = refused(path, lambda: load_checkpoint(path))
    assert message.startswith(f"{path}: this is not a checkpoint of this program")


def calls(function, argument):
    """A pickle that calls a function that torch's reader allows."""

    class Call:
        def __reduce__(self):
            return function, argument

    return pickle.dumps({"format": 1, "x": Call()}, protocol=2)


@pytest.mark.parametrize(
    "content",
    [
        calls(bytearray, (10**10,)),
        calls(torch.Tensor, (10**10,)),
        b"\x80\x02" + b"K\x01" * 600_000 + b".",
        b"\x80\x02}q\x00X\xff\xff\xff\x7fa.",
        b"\x80\x02]r\xff\xff\xff\x7f.",
    ],
    ids=["bytearray", "tensor", "numbers", "length", "memo"],
)
def test_checkpoint_whose_pickle_asks_for_memory(content, tmp_path):
    path, source = tmp_path / "checkpoint.pt", io.BytesIO()
    torch.save({"format": 1, "x": torch.ones(2)}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            is_pickle = entry.filename.endswith("data.pkl")
            new.writestr(entry.filename, content if is_pickle else old.read(entry))
    refused(path, lambda: load_checkpoint(path))


def test_checkpoint_whose_archive_is_compressed(tmp_path):
    """1 MB that would become 1 GB."""
    path = tmp_path / "checkpoint.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"format": 1}, protocol=2))
        archive.writestr("archive/data/0", bytes(1 << 28))
    refused(path, lambda: load_checkpoint(path))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The values of a resume file."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patched:
        stop = "pipeline.trainer.api.stop_on_signal"
        patched.setattr(stop, lambda: contextlib.nullcontext(StopsAfter(40)))
        with pytest.raises(Interrupted):
            train(folder)
    return load_checkpoint(folder / "Toy" / "checkpoint.pt")


def train(folder, **options):
    toy = InProcessEnvironment(Chase(n_agents=4))
    return pipeline.train(toy, RUN, seed=1, run_dir=folder, **options)


def changed(state, place, value):
    key, *rest = place
    return {**state, key: changed(state[key], rest, value) if rest else value}


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [None], {"x": "x"}, torch.ones(2)])
@pytest.mark.parametrize(
    "place",
    [
        *("run", "run.steps", "run.lessons", "run.next_checkpoint", "run.added", "best"),
        *("learner", "learner.step", "learner.algorithm", "learner.recorded"),
        *("learner.statistics", "experience.slots", "experience.closed"),
    ],
)
def test_checkpoint_with_plain_values_of_other_types(place, value, stopped, tmp_path):
    """It is refused in one line, or what is missing is done without."""
    state = changed(stopped, place.split("."), value)
    path = tmp_path / "Toy" / "checkpoint.pt"
    path.parent.mkdir()
    torch.save({"format": 2, "digest": digest(state), **state}, path)
    for read in (
        lambda: load_policy(path),
        lambda: resumes_exactly(tmp_path, RUN),
        lambda: train(tmp_path, resume=True),
    ):
        try:
            read()
        except CheckpointError as error:
            assert re.fullmatch(r"[^\n]{1,600}", str(error))  # noqa: PT017  # or no error


def test_policy_whose_settings_ask_for_a_large_network(stopped, tmp_path):
    path = tmp_path / "checkpoint.pt"
    settings = {"network_settings": {"hidden_units": 30_000, "num_layers": 1}}
    state = {**stopped, "settings": stopped["settings"] | settings}
    torch.save({"format": 2, "digest": digest(state), **state}, path)
    assert "size mismatch" in refused(path, lambda: load_policy(path))
