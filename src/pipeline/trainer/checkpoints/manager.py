"""What a run keeps: checkpoints, the best of them, their ONNX files, and the list of them all.

In `<run>/<Behavior>/` stand `checkpoint.pt`, which continues the run, and with
`save_replay_buffer: true` the files of the replay that it names; the newest `keep_checkpoints` as
`<Behavior>-<step>.pt`; and the best so far as `best.pt`. With an exporter each has its ONNX beside
it, the newest also as `<run>/<Behavior>.onnx`, and `run_logs/training_status.json` lists them.
"""

from __future__ import annotations

import glob
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.settings.schema import RunSettings
from pipeline.trainer.checkpoints.file import (
    RESUME_FILE,
    description,
    load_checkpoint,
    not_written,
    save_checkpoint,
    to_saved,
)
from pipeline.trainer.checkpoints.replay_files import (
    delete_older_replays,
    save_new_rows,
    save_replay,
)
from pipeline.trainer.checkpoints.status import StatusFile
from pipeline.trainer.learner import Learner

Exporter = Callable[..., Any]

_log = logging.getLogger(__name__)

BEST_FILE = "best.pt"
# Below this many episodes a mean reward says too little to call a policy the best.
EPISODES_FOR_BEST = 20


class CheckpointManager:
    """Writes what a run must not lose.

    `exporter(checkpoint, folder, label=...)` writes the ONNX of a checkpoint; without it there is
    no list of checkpoints either. `on_checkpoint` is called with behavior, file and step of each
    numbered checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        settings: RunSettings,
        *,
        exporter: Exporter | None = None,
        on_checkpoint: Callable[[str, Path, int], None] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.exporter = exporter
        self._on_checkpoint = on_checkpoint
        self.status = StatusFile(run_dir)
        self.best: dict[str, dict[str, Any]] = {}
        self._unsaved_best: dict[str, dict[str, Any]] = {}
        self._numbered: dict[str, int] = {}
        """Step of the newest numbered checkpoint of each behavior that this run has written."""
        self._stale: set[str] = set()
        """Behaviors whose newest resume file is newer than the state that the run resumed from."""
        self.saved_at = time.monotonic()
        self.saved_steps: dict[str, int] = {}
        """Step at which the run's files continue each behavior."""
        self.is_last = False
        """Whether the next snapshot is the last of the run, and saves the whole replay."""
        self.save_s = 0.0
        """Seconds that the last refresh took."""

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return what the run's resume files hold, by behavior; all of one moment if possible.

        Raises:
            CheckpointError: One of them cannot be read.
        """
        saved: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.run_dir.glob(f"*/{RESUME_FILE}")):
            versions = [load_checkpoint(file) for file in (path, _previous(path)) if file.exists()]
            if "behavior" in versions[0]:
                saved[versions[0]["behavior"]] = versions
        newest = {name: versions[0] for name, versions in saved.items()}
        for moment in [state.get("run") for versions in saved.values() for state in versions]:
            fitting = {
                name: [state for state in versions if state.get("run") == moment]
                for name, versions in saved.items()
            }
            # A kill may fall between two behaviors' files: then all have the older moment.
            if all(fitting.values()):
                chosen = {name: of_moment[0] for name, of_moment in fitting.items()}
                self._stale = {name for name in saved if chosen[name] is not newest[name]}
                return chosen
        return newest

    def consider(self, learner: Learner) -> None:
        """Remember the policy if the mean reward of recent episodes is the best so far.

        In self-play rewards depend on who the opponent was, so the rating is compared instead.
        """
        recent = learner.statistics.recent
        if len(recent) < EPISODES_FOR_BEST:
            return
        reward = sum(recent) / len(recent)
        best = self.best.get(learner.name)
        rated = {} if learner.past is None else {"elo": learner.past.rating}
        score = rated.get("elo", reward)
        if best is not None and score <= best.get("elo", best["reward"]):
            return
        self.best[learner.name] = {"reward": reward, "step": learner.step, **rated}
        self._unsaved_best[learner.name] = {
            **description(learner.name, learner.spec, self.settings),
            "learner": learner.weights_dict(),
            "best": self.best[learner.name],
        }

    def note_lessons(self, lessons: Mapping[str, int]) -> None:
        """Enter new lessons, and forget the best policies: their rewards are of earlier lessons."""
        self._save_best()  # whether an earlier resume point has written it is a matter of time
        self.best.clear()
        self.list_lessons(lessons)

    def list_lessons(self, lessons: Mapping[str, int]) -> None:
        """Enter the number of each environment parameter's lesson."""
        if self.exporter is not None and lessons:
            self.status.set_lessons(lessons)

    def restore(self, name: str, state: Mapping[str, Any], *, exact: bool) -> None:
        """Restore what a resume file says of a behavior's other files.

        Where the run continues exactly, numbered checkpoints that were written later are deleted.
        The run writes them again, except a checkpoint that was written because the run stopped.
        """
        self.saved_steps[name] = int(state["learner"]["step"])
        if "reward" in (state.get("best") or ()):
            self.best[name] = dict(state["best"])
        if not exact:
            return
        # Also of the same step, if there was none yet when the resume file was written.
        first = state["learner"]["step"] + (name not in state.get("run", {}).get("added", ()))
        for path in _all_numbered(files.named(self.run_dir, name), name):
            if _step_of(path, name) >= first:
                path.with_suffix(".onnx").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            else:
                self._numbered[name] = _step_of(path, name)

    def has_numbered(self, learner: Learner) -> bool:
        """Return whether this run has written a numbered checkpoint of a learner's present step.

        A run that is stopped there does not write it again: another behavior may have gone on.
        """
        return self._numbered.get(learner.name) == learner.step

    def refresh(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Write the files that the run continues from, without the environments' state.

        Open trajectories are kept only together with that state.
        """
        self.write(self.snapshot(learners, run, with_open=False), workers=None)

    def snapshot(
        self, learners: Sequence[Learner], run: Mapping[str, Any], *, with_open: bool
    ) -> dict[str, dict[str, Any]]:
        """Return what `write` needs of each behavior; no step may be taken meanwhile.

        `run` is the state of what behaviors share; `with_open` keeps trajectories that go on.
        """
        began = time.monotonic()
        self._save_best()
        states = {}
        for learner in learners:
            state = self._state(learner, run)
            state["experience"] = to_saved(learner.experience(with_open=with_open))
            save = save_replay if self.is_last else save_new_rows
            state |= save(files.named(self.run_dir, learner.name), learner)
            states[learner.name] = state
        self.save_s = time.monotonic() - began
        return states

    def write(self, states: Mapping[str, dict[str, Any]], *, workers: object | None) -> None:
        """Write the files that the run continues from, as `snapshot` gave them.

        `workers` is the environments' state at that moment; None where it cannot be saved.
        """
        began = time.monotonic()
        environments = to_saved(workers)
        self._save_together({n: {**s, "environments": environments} for n, s in states.items()})
        self.saved_at = time.monotonic()
        self.save_s += self.saved_at - began

    def milestone(self, learner: Learner, run: Mapping[str, Any]) -> None:
        """Write a numbered checkpoint, and delete those beyond `keep_checkpoints`."""
        folder = files.named(self.run_dir, learner.name)
        keep = learner.settings.keep_checkpoints
        path, surplus = numbered(folder, learner.name, keep, learner.step)
        save_checkpoint(path, self._state(learner, run))
        self._numbered[learner.name] = learner.step
        for old in surplus:
            old.with_suffix(".onnx").unlink(missing_ok=True)
            # last, because a run that is resumed after a kill finds both files by it
            old.unlink(missing_ok=True)
        if self.exporter is not None:
            with _written(path.with_suffix(".onnx"), "the exported policy"):
                self.exporter(path, folder, label=f"-{learner.step}")
            _log.info("Exported %s", path.with_suffix(".onnx"))
            recent = learner.statistics.recent
            reward = sum(recent) / len(recent) if recent else None
            with _written(self.status.path, "the list of checkpoints"):
                more = {} if learner.past is None else {"elo": learner.past.rating}
                self.status.add(learner.name, path, step=learner.step, reward=reward, **more)
        if self._on_checkpoint is not None:
            self._on_checkpoint(learner.name, path, learner.step)

    def finish(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Write the last checkpoints of a run that is complete; they are its results."""
        self._save_best()
        states = {}
        for learner in learners:
            self.milestone(learner, run)
            states[learner.name] = self._state(learner, run)
            states[learner.name] |= save_replay(files.named(self.run_dir, learner.name), learner)
        self._save_together(states)
        self.give_onnx(learners)

    def give_onnx(self, learners: Sequence[Learner]) -> None:
        """Put the newest policies, and the best ones, where users look for them."""
        if self.exporter is None:
            return
        for learner in learners:
            newest = self._file(learner.name, f"{learner.name}-{learner.step}.onnx")
            target = files.named(self.run_dir, learner.name, ".onnx")
            with _written(target, "the exported policy"):
                if not newest.exists():  # of a run that ended without an exporter
                    resumed = self._file(learner.name, RESUME_FILE)
                    self.exporter(resumed, resumed.parent, label=f"-{learner.step}")
                files.write_whole(target, newest.read_bytes())
            _log.info("Copied %s to %s.", newest, target)
            best = self._file(learner.name, BEST_FILE)
            if best.is_file():
                with _written(best.with_name(f"{learner.name}-best.onnx"), "the best policy"):
                    self.exporter(best, best.parent, label="-best")

    def _save_together(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Write all behaviors' resume files; after a kill there are files of one moment for all.

        Until all are written, the files of the moment before lie beside the new ones.
        """
        paths = {name: self._file(name, RESUME_FILE) for name in states}
        for name, path in paths.items():
            if len(paths) > 1 and name not in self._stale and path.exists():
                _keep_previous(path)
            save_checkpoint(path, states[name])
        self._stale.clear()
        self.saved_steps |= {name: int(state["learner"]["step"]) for name, state in states.items()}
        for name, path in paths.items():
            # Only after all are written: until then only the previous moment is complete.
            _previous(path).unlink(missing_ok=True)
            delete_older_replays(path.parent, states[name])

    def _file(self, behavior: str, name: str) -> Path:
        return files.named(self.run_dir, behavior) / name

    def _state(self, learner: Learner, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checkpoint, without what only the next step needs."""
        return {
            **description(learner.name, learner.spec, self.settings),
            "learner": learner.state_dict(),
            "best": self.best.get(learner.name),
            "run": dict(run),
        }

    def _save_best(self) -> None:
        for name, state in self._unsaved_best.items():
            save_checkpoint(self._file(name, BEST_FILE), state)
        self._unsaved_best.clear()


class NullCheckpointManager(CheckpointManager):
    """Writes and exports nothing: the first process of the run does."""

    def snapshot(
        self,
        learners: Sequence[Learner],
        run: Mapping[str, Any],  # noqa: ARG002  # the first process has it
        *,
        with_open: bool,
    ) -> dict[str, dict[str, Any]]:
        """Return what only this process has of each behavior, for the process that writes."""
        return {learner.name: _part_of(learner, with_open=with_open) for learner in learners}

    def restore(self, name: str, state: Mapping[str, Any], *, exact: bool) -> None:
        """Nothing to take up."""

    def saved(self) -> dict[str, dict[str, Any]]:
        """Nothing: the process that writes also reads."""
        return {}

    def consider(self, learner: Learner) -> None:
        """Nothing to remember."""

    def refresh(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Nothing to write."""

    def milestone(self, learner: Learner, run: Mapping[str, Any]) -> None:
        """Nothing to write."""

    def finish(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Nothing to write."""


def numbered(folder: Path, behavior: str, keep: int, step: int) -> tuple[Path, list[Path]]:
    """Return the file for a checkpoint at `step`, and older files to delete so `keep` remain."""
    path = files.named(folder, behavior, f"-{step}.pt")
    # A resumed run may reach the same step again and writes the same file.
    existing = [file for file in _all_numbered(folder, behavior) if file != path]
    n_surplus = len(existing) + 1 - keep
    return path, existing[:n_surplus] if keep > 0 and n_surplus > 0 else []


def _all_numbered(folder: Path, behavior: str) -> list[Path]:
    """Return the numbered checkpoints of a behavior, oldest first."""
    pattern = f"{glob.escape(behavior)}-*.pt"  # whose name may have brackets
    numbered = [p for p in folder.glob(pattern) if p.stem.removeprefix(f"{behavior}-").isdigit()]
    return sorted(numbered, key=lambda path: _step_of(path, behavior))


def _step_of(path: Path, behavior: str) -> int:
    return int(path.stem.removeprefix(f"{behavior}-"))


def _part_of(learner: Learner, *, with_open: bool) -> dict[str, Any]:
    """Return the state of a learner without what is the same in all processes."""
    state = learner.state_dict()
    shared = {*learner.algorithm.own_networks, "optimizer"}
    algorithm = {key: value for key, value in state["algorithm"].items() if key not in shared}
    part = {
        "learner": {"algorithm": algorithm, "recorded": state["recorded"]},
        "experience": to_saved(learner.experience(with_open=with_open)),
    }
    if learner.replay_to_keep is not None:
        part["replay_rows"] = to_saved(learner.replay_to_keep.state_dict())
    return part


def _previous(path: Path) -> Path:
    return path.with_name(f"previous-{path.name}")


def _keep_previous(path: Path) -> None:
    """Keep a file's present content under another name."""
    previous = _previous(path)
    previous.unlink(missing_ok=True)
    try:
        previous.hardlink_to(path)
    except OSError:  # a file system without links
        files.write_whole(previous, path.read_bytes())


@contextmanager
def _written(path: Path, label: str) -> Iterator[None]:
    """Raise an error that says which file cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(path, label, error) from error
