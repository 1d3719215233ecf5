"""Checkpoint files: written atomically, and read without running code from them."""

import hashlib
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from pipeline import files
from pipeline.core.specs import BehaviorSpec, spec_to_mapping
from pipeline.errors import CheckpointError, SettingsError, TrainingError
from pipeline.settings import RunSettings, TrainerSettings, to_mapping
from pipeline.settings.reader import suggestion
from pipeline.trainer.checkpoints import archive

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Keys in a resume file whose values only the same number of processes can use.
_OF_EACH_PROCESS = ("experience", "environments", "replay", "ranks")

RESUME_FILE = "checkpoint.pt"
FORMAT = 2
WITHOUT_DIGEST = 1
"""Format of files without a digest, which earlier versions wrote and this version reads."""
_MAX_LISTED_NAMES = 5
"""Largest number of names in a message."""
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that Python, NumPy and torch raise when an object cannot load a state of another form."""


def save_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state` atomically, with a digest of its values; equal states give equal bytes.

    Raises:
        CheckpointError: The file cannot be written; an earlier file is unchanged.
        TrainingError: A tensor of the learner or of its experience is not finite; an earlier file
            is unchanged.
    """
    for place in _not_finite(state):
        raise TrainingError(
            f"behavior {state.get('behavior')}, step {state['learner'].get('step')}: {place} is "
            "not finite and is not saved; the last good checkpoint is kept. Look for very large "
            "observations or rewards, set normalize: true in network_settings, or lower "
            "learning_rate"
        )
    # The archive is written to memory first. With a path, torch would write the temporary file's
    # name into the archive, and equal states would give different bytes.
    buffer = io.BytesIO()
    # Pickle writes the second use of an object as a reference. Which objects are used more than
    # once differs between a new run and a resumed run, but both must write the same bytes. So equal
    # strings become one object, and `mapped` copies containers. Numbers are written by value.
    texts: dict[Any, Any] = {}
    values = mapped(dict(state), (str, bytes), lambda text: texts.setdefault(text, text))
    torch.save({"format": FORMAT, "digest": digest(values), **values}, buffer)
    content = buffer.getvalue()
    with written(path, f"the checkpoint of {len(content)} bytes"):
        files.write_whole(path, content)


def digest(value: Any) -> str:
    """Return the SHA-256 of a nested value that has tensors or arrays, as hexadecimal digits."""
    sha = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            item = item.detach().cpu().numpy()
        if isinstance(item, np.ndarray):
            # The digest includes dtype and shape, because different arrays may have the same bytes.
            sha.update(f"{item.dtype.str} {item.shape};".encode())
            # The array is flattened, because NumPy cannot view an array without axes as bytes.
            sha.update(np.ascontiguousarray(item).reshape(-1).view(np.uint8).data)
        elif isinstance(item, dict | list | tuple):
            # The digest includes type and length, so that it shows where nested containers end.
            sha.update(f"{type(item).__name__} {len(item)};".encode())
            for part in item.items() if isinstance(item, dict) else item:
                add(part)
        else:
            sha.update(f"{type(item).__name__} {item!r};".encode())

    add(value)
    return sha.hexdigest()


def _not_finite(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the key path of each tensor in the learner or its experience that is not finite."""
    for part in ("learner", "experience"):
        for place, value in archive.leaves(state.get(part), part):
            if isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
                yield place


@contextmanager
def written(path: Path, what: str) -> Iterator[None]:
    """Turn an `OSError` of the block into a `CheckpointError`; `what` names the file's content."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: {what} cannot be written ({error.strerror or error}); the last good one is "
            "kept. Free space or choose another --results-dir, then resume"
        ) from error


def load_checkpoint(path: Path, *, device: str = "cpu") -> dict[str, Any]:
    """Read a checkpoint that `save_checkpoint` wrote, with tensors on `device`.

    CheckpointError if the file is missing, damaged or changed, or has another format.
    """
    state = _plain_values(path, device)
    written_as = state.pop("format", None) if isinstance(state, dict) else None
    if not isinstance(written_as, int) or written_as not in (WITHOUT_DIGEST, FORMAT):
        # ML-Agents' checkpoints have this key; the message says how such a run can be used.
        if isinstance(state, dict) and "global_step" in state:
            raise CheckpointError(
                f"{path}: this is a checkpoint of ML-Agents, which has other networks; finish the "
                "run with ML-Agents, or evaluate its .onnx file (docs/how-to/migrating.md)"
            )
        raise CheckpointError(
            f"{path}: this is not a checkpoint of this program (format {FORMAT} is expected)"
        )
    expected = str(state.pop("digest", ""))
    # The digest is also compared in a file of the old format, because a changed file could claim to
    # have this format.
    if (written_as == FORMAT or expected) and expected != digest(state):
        raise CheckpointError(
            f"{path}: its values do not match its digest: the file was changed or damaged; use an "
            "older checkpoint"
        )
    # The digest is checked first, so that the error for a damaged file does not say that another
    # program wrote the file.
    if (refusal := archive.refusal_of_entries(state)) is not None:
        raise CheckpointError(f"{path}: this is not a checkpoint of this program: {refusal}")
    for place in _not_finite(state):
        raise CheckpointError(
            f"{path}: {place} has values that are not finite; use an older checkpoint"
        )
    return dict(state)


def _plain_values(path: Path, device: str) -> Any:
    """Return the plain values and tensors in a checkpoint file, or raise CheckpointError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: this checkpoint does not exist") from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: this checkpoint cannot be read ({error.strerror or error})"
        ) from error
    # The bytes are checked before torch reads them, because even with `weights_only` torch
    # allocates as much memory as a hostile file asks for.
    if (refusal := archive.refusal_of_bytes(content)) is not None:
        raise CheckpointError(f"{path}: {files.foreign(content, own=b'PK') or refusal}")
    try:
        state: Any = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:
        # torch raises many types for a foreign file, and its message suggests to unpickle the file
        # without checks, so the message is not shown.
        raise CheckpointError(
            f"{path}: this is not a checkpoint of this program: it has more than weights and "
            f"plain values ({type(error).__name__})"
        ) from error
    if (refusal := archive.refusal_of_values(state, len(content))) is not None:
        raise CheckpointError(f"{path}: this is not a checkpoint of this program: {refusal}")
    return state


def mapped(value: Any, kind: type[T] | tuple[type[T], ...], change: Callable[[T], Any]) -> Any:
    """Return `value` with `change` applied to each key and item of type `kind`, at any depth."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {
            mapped(key, kind, change): mapped(item, kind, change) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, kind, change) for item in value)
    return value


def to_saved(value: Any) -> Any:
    """Return `value` with tensors in place of NumPy arrays, at any depth."""
    # torch.load with `weights_only` refuses NumPy arrays, but reads tensors.
    return mapped(value, np.ndarray, lambda item: torch.from_numpy(np.ascontiguousarray(item)))


def from_saved(value: Any) -> Any:
    """Return `value` with new, writable NumPy arrays in place of tensors, at any depth."""
    return mapped(value, torch.Tensor, lambda item: item.cpu().numpy().copy())


def reason_of(error: Exception) -> str:
    """Return the first two lines of an error's message, joined to one line."""
    # The message is cut, because torch writes one line for each weight that does not fit.
    return " ".join(" ".join(str(error).splitlines()[:2]).split())


def description(name: str, spec: BehaviorSpec, settings: RunSettings) -> dict[str, Any]:
    """Return a behavior's name, settings and observation and action spec, as plain values."""
    # Only this behavior is kept, with all values filled in, so no default_settings are needed.
    only = replace(settings, behaviors={name: settings.for_behavior(name)}, default_settings=None)
    parts = {key: value for key, value in only.plugins().items() if key.endswith(".py")}
    return {
        "behavior": name,
        "settings": to_mapping(only)["behaviors"][name],
        "spec": spec_to_mapping(spec),
        **({"files": parts} if parts else {}),
    }


def warn_of_other_files(path: Path, state: Mapping[str, Any], settings: TrainerSettings) -> None:
    """Warn if files of the user that define parts of the behavior have changed since training."""
    saved, now = state.get("files", {}), settings.plugins()
    if others := [name for name, digest in saved.items() if now.get(name) != digest]:
        text = "%s: the policy was trained with another version of %s; it may act differently now."
        _log.warning(text, path, ", ".join(others))


def n_learners_of(state: Mapping[str, Any]) -> int:
    """Return the number of processes whose states a resume file holds."""
    return 1 + len(state.get("ranks", ()))


def states_by_rank(
    states: Mapping[str, Mapping[str, Any]], size: int
) -> list[dict[str, dict[str, Any]]]:
    """Return each process's saved state of every behavior, for the ranks 0 to `size` - 1.

    `states` are the contents of the run's resume files, by behavior. If another number of
    processes wrote the files, no process gets experience or environments from them.
    """
    # Another number of processes cannot use the experience, so only shared entries are kept.
    if any(n_learners_of(state) != size for state in states.values()):
        shared = {
            name: {key: value for key, value in state.items() if key not in _OF_EACH_PROCESS}
            for name, state in states.items()
        }
        return [shared] * size
    return [{name: _of_rank(saved, rank) for name, saved in states.items()} for rank in range(size)]


def _of_rank(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return the state from which process `rank` continues; its networks are those of rank 0."""
    first = {key: value for key, value in state.items() if key != "ranks"}
    if rank == 0:
        return first
    part = state["ranks"][rank - 1]
    # `part` lacks the networks and Adam's state, which are equal in all processes.
    algorithm = {**first["learner"]["algorithm"], **part["learner"]["algorithm"]}
    learner = {**first["learner"], **part["learner"], "algorithm": algorithm}
    # The replay's files belong to the first process; `part` has the replay rows of this process.
    return {**first, "replay": None, **part, "learner": learner}


def file_of(folder: Path | None, init_path: str | None) -> Path | None:
    """Return the checkpoint file that an `init_path` refers to; None for random weights.

    `folder` is the behavior's folder in the run of `initialize_from`, if there is such a run. There
    an `init_path` without a folder is looked up; without `init_path`, its newest file is taken.
    """
    if init_path is None:
        return None if folder is None else folder / RESUME_FILE
    # A bare file name is looked up in the run, as in ML-Agents; anything else is a path.
    if folder is not None and Path(init_path).name == init_path:
        return folder / init_path
    path = Path(init_path)
    return path / RESUME_FILE if path.is_dir() else path


def refuse_missing(file: Path | None, key: str, settings: RunSettings) -> None:
    """Raise SettingsError, which names the setting `key`, if `file` is not an existing `.pt`."""
    if file is None or (file.suffix == ".pt" and file.is_file()):
        return
    place = settings.place_of(key)
    prefix = f"{place}: " if place else ""
    raise SettingsError(
        f"{prefix}Could not initialize from {file}. It does not exist or is not a `.pt` file"
        f"{files.similar(file) or ';'} {key} chooses another file."
    )


def weights_of(name: str, weights: Mapping[str, Path], settings: RunSettings) -> Path | None:
    """Return the checkpoint with a behavior's initial weights, or None if they are drawn at random.

    SettingsError if `initialize_from` is for all behaviors, and that run lacks this behavior.
    """
    options, default = settings.checkpoint_settings, settings.default_settings
    if name in weights or name in settings.behaviors or options.resume:
        return weights.get(name)
    init_path = None if default is None else default.init_path
    # An `init_path` with a folder names one file for all behaviors that are not listed.
    if options.initialize_from is None or (init_path and Path(init_path).name != init_path):
        return file_of(None, init_path)
    raise SettingsError(
        f"Could not initialize {name} from the run {options.initialize_from!r}, which has weights "
        f"of {', '.join(weights) or 'no behavior'}; list {name} under behaviors with an init_path "
        "of another run, or leave initialize_from out"
    )


def warn_of_unused(
    paths: Mapping[str, Path], behaviors: Mapping[str, object], settings: RunSettings
) -> None:
    """Warn of initial weights, and of settings, of behaviors that the environment does not have."""
    shown_names = ", ".join(behaviors)
    unused = sorted(paths.keys() - behaviors.keys())
    if unused:
        _log.warning(
            "There are initial weights for %s, but the environment has %s; only behaviors of the "
            "same name use them.",
            ", ".join(unused),
            shown_names,
        )
    unseen = sorted(settings.behaviors.keys() - behaviors.keys())
    # Without default_settings a behavior under another name was refused, so no warning is needed.
    if unseen and settings.default_settings is not None:
        unlisted = [name for name in behaviors if name not in settings.behaviors]
        more = (
            f" and {len(unseen) - _MAX_LISTED_NAMES} more"
            if len(unseen) > _MAX_LISTED_NAMES
            else ""
        )
        # `suggestion` returns "." if no name is similar.
        hints = [hint for name in unseen if (hint := suggestion(name, unlisted)) != "."]
        _log.warning(
            "The configuration lists %s%s under behaviors, but the environment has shown %s so "
            "far; behaviors that are not listed use default_settings%s",
            ", ".join(unseen[:_MAX_LISTED_NAMES]),
            more,
            shown_names,
            hints[0] if hints else ".",
        )
