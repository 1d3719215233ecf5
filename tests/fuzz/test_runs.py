"""Changed files of runs: checkpoints, state to resume from, replays, lists of checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import tempfile
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from fuzzing.frame import fuzz
from hypothesis import strategies as st
from toys import Both

import pipeline
from pipeline.dag.stages.export import publish
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import Interrupted
from pipeline.settings import load_run_settings
from pipeline.tracking.curve_csv import CsvSink
from pipeline.trainer.checkpoints.file import digest

from .mutations import mutated

if TYPE_CHECKING:
    from collections.abc import Iterator

_SMALL: dict[str, Any] = {
    "network_settings": {"hidden_units": 4, "num_layers": 1, "normalize": True},
    "time_horizon": 4,
    "max_steps": 80,
    "summary_freq": 20,
    "checkpoint_interval": 20,
}
_ON_POLICY = {"batch_size": 8, "buffer_size": 16, "num_epoch": 1}
_OFF_POLICY = {"batch_size": 4, "buffer_size": 64, "buffer_init_steps": 8}
_KINDS: tuple[dict[str, Any], ...] = (
    {"trainer_type": "ppo", "hyperparameters": _ON_POLICY},
    {"trainer_type": "poca", "hyperparameters": _ON_POLICY},
    {"trainer_type": "sac", "hyperparameters": _OFF_POLICY | {"save_replay_buffer": True}},
    {
        "trainer_type": "ppo",
        "hyperparameters": _ON_POLICY,
        "network_settings": {
            **_SMALL["network_settings"],
            "memory": {"memory_size": 4, "sequence_length": 2},
        },
        "reward_signals": {"extrinsic": {}, "curiosity": {"network_settings": {"hidden_units": 4}}},
    },
)


class _StopsAt(Both):
    """A game that sends SIGINT to this process in its 15th step."""

    _left = 15

    def step(self, actions: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(actions)


def _settings(kind: int) -> Any:
    return load_run_settings(None, overrides={"behaviors": {"Toy": _SMALL | _KINDS[kind]}})


@cache
def _run(kind: int) -> dict[str, bytes]:
    """Return the files of an interrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            env = InProcessEnvironment(_StopsAt(n_agents=2))
            curve = CsvSink(Path(folder) / "progress.csv")
            options = {"export": True, "sinks": [curve]}
            pipeline.train(env, _settings(kind), seed=1, run_dir=folder, **options)
        except Interrupted:
            files = [path for path in Path(folder).rglob("*") if path.is_file()]
            return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(files)}
    raise AssertionError("the run was not interrupted")


def _endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


with warnings.catch_warnings():  # torch warns once per process, so a repeated test would differ
    warnings.simplefilter("ignore")
    _ODD_TENSORS = (
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        torch.zeros(1).expand(10**9),
        torch.zeros(1).expand(10**12),
        torch.zeros(0, 1 << 62),
        torch.zeros(1, requires_grad=True),
    )
    for _odd in _ODD_TENSORS:
        _buffer = io.BytesIO()
        torch.save(_odd, _buffer)
        _buffer.seek(0)
        torch.load(_buffer, weights_only=True)
"""Tensors that torch can write and read, but that our checkpoints never contain."""

_VALUES = st.one_of(
    st.sampled_from((None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, 1e308, float("nan"))),
    st.sampled_from((float("inf"), "", "Toy", "../up", "a\0", (), [], {}, [1], {"a": 1}, b"x")),
    st.sampled_from((torch.zeros(0), torch.zeros(2), torch.ones(()), torch.zeros(1, 1, 1))),
)


def _spoil_tensor(draw: Any, value: torch.Tensor) -> Any:
    if any(
        value is odd for odd in _ODD_TENSORS
    ):  # an earlier change; such tensors support few operations
        return draw(_VALUES)
    kind = draw(st.integers(0, 5))
    if kind == 0 and value.is_floating_point() and value.numel():
        out = value.clone()
        out.view(-1)[0] = draw(st.sampled_from((float("nan"), float("inf"), 3e38, -1.0)))
        return out
    if kind == 1:
        return value[:0] if value.ndim else value[None]
    if kind == 2:
        return value.to(draw(st.sampled_from((torch.float64, torch.int64, torch.bool))))
    if kind == 3:
        return torch.cat((value, value)) if value.ndim else value.repeat(2)
    if kind == 4:
        return draw(st.sampled_from(_ODD_TENSORS))
    return draw(_VALUES)


def _spoil(draw: Any, value: Any) -> Any:
    """Return a nested value with one part changed, removed or added."""
    if isinstance(value, torch.Tensor):
        return _spoil_tensor(draw, value)
    if not isinstance(value, dict | list | tuple) or not value or draw(st.integers(0, 14)) == 0:
        return draw(_VALUES | st.builds(_endless))
    pairs = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    key = draw(st.sampled_from(sorted(pairs, key=str)))
    if draw(st.integers(0, 9)) == 0:
        del pairs[key]
    else:
        pairs[key] = _spoil(draw, pairs[key])
    return pairs if isinstance(value, dict) else type(value)(pairs.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _is_stored(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage holds all its elements, so that it has a digest."""
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


def _spoiled_checkpoint(draw: Any, data: bytes) -> bytes:
    state = torch.load(io.BytesIO(data), weights_only=True)
    for _ in range(draw(st.integers(0, 2))):
        state = _spoil(draw, state)
    if isinstance(state, dict) and draw(st.integers(0, 3)):  # with the changed state's own digest
        values = {key: item for key, item in state.items() if key not in ("format", "digest")}
        with contextlib.suppress(Exception):
            if all(map(_is_stored, _tensors(values))):
                state["digest"] = digest(values)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _spoiled_parts(draw: Any, data: bytes) -> bytes:
    """Return an archive with one changed part and correct checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = draw(st.sampled_from(old.namelist()))
        for name in old.namelist():
            content = old.read(name)
            if name == chosen:
                content = draw(mutated(st.just(content), most=3))
            new.writestr(name, content)
    return out.getvalue()


def _spoiled_arrays(draw: Any, data: bytes) -> bytes:
    arrays = dict(np.load(io.BytesIO(data)))
    name = draw(st.sampled_from(sorted(arrays)))
    values = arrays[name]
    kind = draw(st.integers(0, 4))
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = values[: len(values) // 2] if values.ndim else values[None]
    elif kind == 2:
        arrays[name] = values.astype(draw(st.sampled_from(("f8", "i4", "U4", "?"))))
    elif kind == 3:
        arrays[name] = np.full_like(values, draw(st.sampled_from((-1, 0, 1 << 30))), dtype="i8")
    else:
        with np.errstate(invalid="ignore"):  # 0 times infinity is invalid
            arrays[name] = values * draw(st.sampled_from((np.nan, np.inf, -1.0)))
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


@st.composite
def _runs(draw: Any) -> tuple[int, dict[str, bytes]]:
    """Return the kind of a run, and one changed file of it."""
    kind = draw(st.integers(0, len(_KINDS) - 1))
    files = dict(_run(kind))
    suffix = draw(st.sampled_from((*(".pt",) * 5, ".npz", ".json", ".csv")))
    chosen = draw(
        st.sampled_from([n for n in files if n.endswith(suffix)] or ["Toy/checkpoint.pt"])
    )
    data = files[chosen]
    change = draw(st.integers(0, 5))
    if change <= 3 and chosen.endswith(".pt"):
        data = _spoiled_checkpoint(draw, data)
    elif change <= 3 and chosen.endswith(".npz"):
        data = _spoiled_arrays(draw, data)
    elif change == 4 and chosen.endswith((".pt", ".npz")):
        data = _spoiled_parts(draw, data)
    else:
        data = draw(mutated(st.just(data)))
    return kind, {chosen: data}


def _size(example: tuple[int, dict[str, bytes]]) -> int:
    return sum(map(len, (_run(example[0]) | example[1]).values()))


def _written(example: tuple[int, dict[str, bytes]], folder: Path) -> Path:
    for name, data in (_run(example[0]) | example[1]).items():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "run"


def _train(kind: int, run_dir: Path, **options: Any) -> None:
    with np.errstate(all="ignore"):
        env = InProcessEnvironment(Both(n_agents=2))
        options |= {"export": True, "sinks": [CsvSink(run_dir / "progress.csv")]}
        pipeline.train(env, _settings(kind), seed=1, run_dir=run_dir, **options)


@fuzz(_runs(), examples=25, size=_size)
def test_runs_with_changed_files_are_resumed_or_refused(
    example: tuple[int, dict[str, bytes]], folder: Path
) -> None:
    _train(example[0], _written(example, folder), resume=True)


@fuzz(_runs(), examples=15, size=_size)
def test_changed_checkpoints_initialize_a_run_or_are_refused(
    example: tuple[int, dict[str, bytes]], folder: Path
) -> None:
    checkpoint = _written(example, folder) / "Toy/checkpoint.pt"
    _train(example[0], folder / "new", init_from={"Toy": checkpoint})


@fuzz(_runs(), examples=30, size=_size)
def test_changed_checkpoints_are_exported_or_refused(
    example: tuple[int, dict[str, bytes]], folder: Path
) -> None:
    checkpoint = _written(example, folder) / "Toy/checkpoint.pt"
    shutil.copy(checkpoint, folder / "a.pt")
    (folder / "out").mkdir()
    try:
        publish(folder / "a.pt", folder / "out")
    except BaseException:
        assert not list((folder / "out").iterdir())
        raise
