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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pipeline import files
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.settings.schema import RunSettings
    from pipeline.trainer.learner import Learner

    Exporter = Callable[..., Any]

_log = logging.getLogger(__name__)

BEST_FILE = "best.pt"
# Below this many episodes a mean reward says too little to call a policy the best.
EPISODES_FOR_BEST = 20


class CheckpointManager:
    """Writes what a run must not lose.

    `exporter(checkpoint, folder, label=...)` writes the ONNX of a checkpoint; without it there is
    no list of checkpoints either.
    """

    def __init__(
        self, run_dir: Path, settings: RunSettings, *, exporter: Exporter | None = None
    ) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.exporter = exporter
        self.on_checkpoint: Callable[[str, Path, int], None] | None = None
        """Told of each numbered checkpoint: behavior, file, step."""
        self.status = StatusFile(run_dir)
        self.best: dict[str, dict[str, Any]] = {}
        self._unsaved_best: dict[str, dict[str, Any]] = {}
        self._numbered: dict[str, int] = {}
        """Step of the newest numbered checkpoint of each behavior that this run has written."""
        self._stale: set[str] = set()
        """Behaviors whose newest resume file is newer than the state that the run resumed from."""
        self.saved_at = time.monotonic()
        self.is_last = False
        """Whether the next moment is the last before the run ends, and gets a whole replay."""
        self.save_s = 0.0
        """Seconds that the last refresh took."""

    def saved(self) -> dict[str, dict[str, Any]]:
        """What the run's resume files hold, by behavior: of one moment if there is one.

        Raises:
            CheckpointError: One of them cannot be read.
        """
        saved: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.run_dir.glob(f"*/{RESUME_FILE}")):
            both = [load_checkpoint(one) for one in (path, _previous(path)) if one.exists()]
            if "behavior" in both[0]:
                saved[both[0]["behavior"]] = both
        newest = {name: both[0] for name, both in saved.items()}
        for moment in [one.get("run") for both in saved.values() for one in both]:
            fitting = {
                name: [one for one in both if one.get("run") == moment]
                for name, both in saved.items()
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
        """Enter new lessons; rewards of earlier ones are no measure of the best any more."""
        self._save_best()  # whether an earlier resume point has written it is a matter of time
        self.best.clear()
        self.list_lessons(lessons)

    def list_lessons(self, lessons: Mapping[str, int]) -> None:
        """Enter the number of each environment parameter's lesson."""
        if self.exporter is not None and lessons:
            self.status.set_lessons(lessons)

    def restore(self, name: str, state: Mapping[str, Any], *, exact: bool) -> None:
        """Restore what a resume file says of a behavior's other files.

        Numbered checkpoints that were written later go, where the run goes on exactly: it writes
        them again, but for the one that was written because it was stopped.
        """
        if state.get("best") is not None:
            self.best[name] = dict(state["best"])
        if not exact:
            return
        # Of its own step, too, if there was none yet at that moment.
        first = state["learner"]["step"] + (name not in state.get("run", {}).get("added", ()))
        for path in _all_numbered(files.named(self.run_dir, name), name):
            if _step_of(path, name) >= first:
                path.with_suffix(".onnx").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            else:
                self._numbered[name] = _step_of(path, name)

    def has_numbered(self, learner: Learner) -> bool:
        """Whether this run has written a numbered checkpoint of a learner's present step.

        A run that is stopped there leaves it: since then another behavior may have gone on.
        """
        return self._numbered.get(learner.name) == learner.step

    def refresh(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Write the files that the run continues from, without the environments' state.

        Open trajectories are kept with that state only.
        """
        self.write(self.snapshot(learners, run, with_open=False), workers=None)

    def snapshot(
        self, learners: Sequence[Learner], run: Mapping[str, Any], *, with_open: bool
    ) -> dict[str, dict[str, Any]]:
        """Return what `write` needs of each behavior, as long as nothing goes on.

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
        if self.on_checkpoint is not None:
            self.on_checkpoint(learner.name, path, learner.step)

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
        """Write all behaviors' resume files; a kill leaves all of one moment, or of the other.

        As long as they differ, the older moment's lie beside the new ones.
        """
        paths = {name: self._file(name, RESUME_FILE) for name in states}
        for name, path in paths.items():
            if len(paths) > 1 and name not in self._stale and path.exists():
                _keep_previous(path)
            save_checkpoint(path, states[name])
        self._stale.clear()
        for name, path in paths.items():
            # Only after all are written: until then they are the moment that all have.
            _previous(path).unlink(missing_ok=True)
            delete_older_replays(path.parent, states[name])

    def _file(self, behavior: str, name: str) -> Path:
        return files.named(self.run_dir, behavior) / name

    def _state(self, learner: Learner, run: Mapping[str, Any]) -> dict[str, Any]:
        """A checkpoint, without what only the very next step needs."""
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
        """What only this process has of each behavior, for the one that writes."""
        return {one.name: _part_of(one, with_open=with_open) for one in learners}

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
    """The file for a checkpoint at `step`, and the older ones to delete so that `keep` remain."""
    path = files.named(folder, behavior, f"-{step}.pt")
    # A resumed run may reach the same step again and writes the same file.
    others = [p for p in _all_numbered(folder, behavior) if p != path]
    n_surplus = len(others) + 1 - keep
    return path, others[:n_surplus] if keep > 0 and n_surplus > 0 else []


def _all_numbered(folder: Path, behavior: str) -> list[Path]:
    """The numbered checkpoints of a behavior, oldest first."""
    pattern = f"{glob.escape(behavior)}-*.pt"  # whose name may have brackets
    numbered = [p for p in folder.glob(pattern) if p.stem.removeprefix(f"{behavior}-").isdigit()]
    return sorted(numbered, key=lambda path: _step_of(path, behavior))


def _step_of(path: Path, behavior: str) -> int:
    return int(path.stem.removeprefix(f"{behavior}-"))


def _part_of(learner: Learner, *, with_open: bool) -> dict[str, Any]:
    """The state of a learner without what is the same in all processes."""
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
    kept = _previous(path)
    kept.unlink(missing_ok=True)
    try:
        kept.hardlink_to(path)
    except OSError:  # a file system without links
        files.write_whole(kept, path.read_bytes())


@contextmanager
def _written(path: Path, what: str) -> Iterator[None]:
    """Say which file cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise not_written(path, what, error) from error
