"""The files of a run: checkpoints, the best policy, ONNX files, and the list of checkpoints.

`<run>/<Behavior>/` has the resume file `checkpoint.pt`, from which the run continues; with
`save_replay_buffer: true` the files of the replay buffer, which are listed in `checkpoint.pt`; the
newest `keep_checkpoints` numbered checkpoints `<Behavior>-<step>.pt`; and the best policy so far,
`best.pt`. With an exporter each policy has an ONNX file next to it, the newest policy is also
`<run>/<Behavior>.onnx`, and `run_logs/training_status.json` lists the numbered checkpoints.
"""

import glob
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.settings.trainer.schema import RunSettings
from pipeline.trainer.checkpoints.file import (
    RESUME_FILE,
    description,
    load_checkpoint,
    save_checkpoint,
    to_saved,
    written,
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
# With fewer episodes the mean reward is too uncertain to compare policies.
EPISODES_FOR_BEST = 20


class CheckpointManager:
    """Writes the checkpoints of a run.

    `exporter(checkpoint, folder, label=...)` writes the ONNX file of a checkpoint; without it the
    list `run_logs/training_status.json` is not written either. `on_checkpoint` is called with the
    behavior's name, the file and the step of each numbered checkpoint.
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
        """Step of the newest numbered checkpoint that this run has written, by behavior."""
        self._stale: set[str] = set()
        """Behaviors with a resume file that is newer than the state that the run resumed from."""
        self.saved_at = time.monotonic()
        self.saved_steps: dict[str, int] = {}
        """Step of each behavior in the newest resume files."""
        self.is_last = False
        """Whether the next snapshot is the last of the run, with the whole replay in one file."""
        self.save_s = 0.0
        """Seconds that the last `snapshot` and the writing of its files took."""

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return the contents of the resume files by behavior, all of the same step if possible."""
        saved: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.run_dir.glob(f"*/{RESUME_FILE}")):
            # The newest version comes first; a kill in `_save_together` leaves a previous version.
            versions = [load_checkpoint(file) for file in (path, _previous(path)) if file.exists()]
            if "behavior" in versions[0]:
                saved[versions[0]["behavior"]] = versions
        newest = {name: versions[0] for name, versions in saved.items()}
        # Files that were saved together have an equal "run", the state that all behaviors share.
        for moment in [state.get("run") for versions in saved.values() for state in versions]:
            fitting = {
                name: [state for state in versions if state.get("run") == moment]
                for name, versions in saved.items()
            }
            # After a kill between the writes of two behaviors' files, only the earlier save has a
            # file of every behavior.
            if all(fitting.values()):
                chosen = {name: of_moment[0] for name, of_moment in fitting.items()}
                self._stale = {name for name in saved if chosen[name] is not newest[name]}
                return chosen
        # If no save has a file of every behavior, each behavior continues from its newest file, but
        # not exactly.
        return newest

    def consider(self, learner: Learner) -> None:
        """Save the policy as the best one if the mean reward of recent episodes is a new maximum.

        In self-play rewards depend on the opponent, so the ELO rating is compared instead.
        """
        recent = learner.statistics.recent
        if len(recent) < EPISODES_FOR_BEST:
            return
        reward = sum(recent) / len(recent)
        best = self.best.get(learner.name)
        rated = {} if learner.snapshot_pool is None else {"elo": learner.snapshot_pool.rating}
        # At an equal score the older policy is kept, so the file is not written again.
        score = rated.get("elo", reward)
        if best is not None and score <= best.get("elo", best["reward"]):
            return
        self.best[learner.name] = {"reward": reward, "step": learner.step, **rated}
        # The best policy may change several times before it is written with the next resume file.
        self._unsaved_best[learner.name] = {
            **description(learner.name, learner.spec, self.settings),
            "learner": learner.weights_dict(),
            "best": self.best[learner.name],
        }

    def begin_lessons(self, lessons: Mapping[str, int]) -> None:
        """Write the new lessons into the list of checkpoints, and forget the best rewards so far.

        The rewards of two lessons cannot be compared.
        """
        # Without this call, the policy in `best.pt` would depend on the time of the last resume
        # point.
        self._save_best()
        self.best.clear()
        self.list_lessons(lessons)

    def list_lessons(self, lessons: Mapping[str, int]) -> None:
        """Write the lesson number of each environment parameter into the list of checkpoints."""
        if self.exporter is not None and lessons:
            self.status.set_lessons(lessons)

    def restore(self, name: str, state: Mapping[str, Any], *, exact: bool) -> None:
        """Restore the record of a behavior's files from the state in the behavior's resume file.

        If the run continues exactly, numbered checkpoints of later steps are deleted: the run will
        write them again, except a checkpoint that was only written because the run stopped.
        """
        self.saved_steps[name] = int(state["learner"]["step"])
        if "reward" in (state.get("best") or ()):
            self.best[name] = dict(state["best"])
        if not exact:
            return
        # `added` lists the behaviors that had no numbered checkpoint of the saved step when the
        # resume file was written, so such a checkpoint is newer, and is deleted, too.
        first = state["learner"]["step"] + (name not in state.get("run", {}).get("added", ()))
        for path in _all_numbered(files.named(self.run_dir, name), name):
            if _step_of(path, name) >= first:
                path.with_suffix(".onnx").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            else:
                self._numbered[name] = _step_of(path, name)

    def has_numbered(self, learner: Learner) -> bool:
        """Return whether this run has written a numbered checkpoint of the learner's present step.

        It may be old: a finished behavior keeps its step while other behaviors continue to train.
        """
        return self._numbered.get(learner.name) == learner.step

    def refresh(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Write the resume files without the environments' state.

        Open trajectories can continue only together with that state, so they are not saved either.
        """
        self.write(self.snapshot(learners, run, with_open=False), workers=None)

    def snapshot(
        self, learners: Sequence[Learner], run: Mapping[str, Any], *, with_open: bool
    ) -> dict[str, dict[str, Any]]:
        """Return the state of each behavior for `write`; no step may be taken during this call.

        `run` is the state that all behaviors share; `with_open` includes open trajectories.
        """
        began = time.monotonic()
        self._save_best()
        states = {}
        for learner in learners:
            state = self._state(learner, run)
            state["experience"] = to_saved(learner.experience(with_open=with_open))
            # The replay is saved first, so that all replay files that the checkpoint names exist.
            save = save_replay if self.is_last else save_new_rows
            state |= save(files.named(self.run_dir, learner.name), learner)
            states[learner.name] = state | _held(learner, with_open=with_open)
        self.save_s = time.monotonic() - began
        return states

    def write(self, states: Mapping[str, dict[str, Any]], *, workers: object | None) -> None:
        """Write the resume files from the states that `snapshot` returned.

        `workers` is the environments' state at that time; None if they do not give their states.
        """
        began = time.monotonic()
        environments = to_saved(workers)
        self._save_together({n: {**s, "environments": environments} for n, s in states.items()})
        self.saved_at = time.monotonic()
        self.save_s += self.saved_at - began

    def milestone(self, learner: Learner, run: Mapping[str, Any]) -> None:
        """Write a numbered checkpoint, and delete the oldest ones beyond `keep_checkpoints`."""
        folder = files.named(self.run_dir, learner.name)
        keep = learner.settings.keep_checkpoints
        path, surplus = numbered(folder, learner.name, keep, learner.step)
        save_checkpoint(path, self._state(learner, run))
        # The step is noted after the write, because `has_numbered` promises that the file exists.
        self._numbered[learner.name] = learner.step
        for old in surplus:
            old.with_suffix(".onnx").unlink(missing_ok=True)
            # The checkpoint is deleted after its ONNX file: after a kill between the two, a resumed
            # run still finds the checkpoint and deletes it.
            old.unlink(missing_ok=True)
        if self.exporter is not None:
            with written(path.with_suffix(".onnx"), "the exported policy"):
                self.exporter(path, folder, label=f"-{learner.step}")
            _log.info("Exported %s", path.with_suffix(".onnx"))
            recent = learner.statistics.recent
            reward = sum(recent) / len(recent) if recent else None
            with written(self.status.path, "the list of checkpoints"):
                more = (
                    {} if learner.snapshot_pool is None else {"elo": learner.snapshot_pool.rating}
                )
                self.status.add(learner.name, path, step=learner.step, reward=reward, **more)
        # Sinks are called after the export, so that they find the ONNX file next to the checkpoint.
        if self._on_checkpoint is not None:
            self._on_checkpoint(learner.name, path, learner.step)

    def finish(self, learners: Sequence[Learner], run: Mapping[str, Any]) -> None:
        """Write the final checkpoints of a complete run, which are its results."""
        self._save_best()
        states = {}
        for learner in learners:
            self.milestone(learner, run)
            states[learner.name] = self._state(learner, run)
            states[learner.name] |= save_replay(files.named(self.run_dir, learner.name), learner)
        self._save_together(states)
        self.export_final(learners)

    def export_final(self, learners: Sequence[Learner]) -> None:
        """Write the newest policies to `<run>/<Behavior>.onnx`, and export the best policies."""
        if self.exporter is None:
            return
        for learner in learners:
            newest = self._file(learner.name, f"{learner.name}-{learner.step}.onnx")
            target = files.named(self.run_dir, learner.name, ".onnx")
            with written(target, "the exported policy"):
                if not newest.exists():  # the run ended without an exporter
                    resumed = self._file(learner.name, RESUME_FILE)
                    self.exporter(resumed, resumed.parent, label=f"-{learner.step}")
                # The newest export is copied and not made again, so that both files are equal.
                files.write_whole(target, newest.read_bytes())
            _log.info("Copied %s to %s.", newest, target)
            best = self._file(learner.name, BEST_FILE)
            if best.is_file():
                with written(best.with_name(f"{learner.name}-best.onnx"), "the best policy"):
                    self.exporter(best, best.parent, label="-best")

    def _save_together(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Write all behaviors' resume files; a kill leaves a complete set of files of one step."""
        paths = {name: self._file(name, RESUME_FILE) for name in states}
        for name, path in paths.items():
            if len(paths) > 1 and name not in self._stale and path.exists():
                # A stale file is newer than the state from which the run was resumed, so it must
                # not replace the previous file.
                _keep_previous(path)
            save_checkpoint(path, states[name])
        self._stale.clear()
        self.saved_steps |= {name: int(state["learner"]["step"]) for name, state in states.items()}
        for name, path in paths.items():
            # Until all new files are written, only the previous files belong to the same save.
            _previous(path).unlink(missing_ok=True)
            delete_older_replays(path.parent, states[name])

    def _file(self, behavior: str, name: str) -> Path:
        return files.named(self.run_dir, behavior) / name

    def _state(self, learner: Learner, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return a learner's checkpoint without the entries `experience` and `environments`."""
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
    """Writes and exports nothing: used in processes of rank 1 and above, because rank 0 writes."""

    def snapshot(
        self,
        learners: Sequence[Learner],
        run: Mapping[str, Any],  # noqa: ARG002  # the first process saves it
        *,
        with_open: bool,
    ) -> dict[str, dict[str, Any]]:
        """Return this process's part of each behavior's state, which the first process writes."""
        return {learner.name: _part_of(learner, with_open=with_open) for learner in learners}

    def saved(self) -> dict[str, dict[str, Any]]:
        """Return an empty map: only the first process reads the resume files."""
        return {}

    def _do_nothing(self, *_arguments: object, **_options: object) -> None:
        pass

    restore = consider = refresh = milestone = finish = _do_nothing


def numbered(folder: Path, behavior: str, keep: int, step: int) -> tuple[Path, list[Path]]:
    """Return the path of the checkpoint at `step`, and the old ones to delete, if `keep` > 0."""
    path = files.named(folder, behavior, f"-{step}.pt")
    # A resumed run may write the file of the same step again, which must not count twice.
    existing = [file for file in _all_numbered(folder, behavior) if file != path]
    n_surplus = len(existing) + 1 - keep
    return path, existing[:n_surplus] if keep > 0 and n_surplus > 0 else []


def _all_numbered(folder: Path, behavior: str) -> list[Path]:
    """Return the numbered checkpoints of a behavior, oldest first."""
    # A behavior's name may have brackets, which `glob` would interpret.
    pattern = f"{glob.escape(behavior)}-*.pt"
    numbered = [p for p in folder.glob(pattern) if p.stem.removeprefix(f"{behavior}-").isdigit()]
    return sorted(numbered, key=lambda path: _step_of(path, behavior))


def _step_of(path: Path, behavior: str) -> int:
    return int(path.stem.removeprefix(f"{behavior}-"))


def _part_of(learner: Learner, *, with_open: bool) -> dict[str, Any]:
    """Return the part of a learner's state that differs between processes."""
    state = learner.state_dict()
    # Networks and Adam's state are equal in all processes, so the first process saves them.
    shared = {*learner.algorithm.own_networks, "optimizer"}
    algorithm = {key: value for key, value in state["algorithm"].items() if key not in shared}
    part = {
        "learner": {"algorithm": algorithm, "recorded": state["recorded"]},
        "experience": to_saved(learner.experience(with_open=with_open)),
    }
    if learner.replay_to_keep is not None:
        part["replay_rows"] = to_saved(learner.replay_to_keep.state_dict())
    return part | _held(learner, with_open=with_open)


def _held(learner: Learner, *, with_open: bool) -> dict[str, int]:
    # This number decides when a synchronisation is due, and differs between processes.
    return {"held": learner.sync.held} if with_open and learner.sync is not None else {}


def _previous(path: Path) -> Path:
    return path.with_name(f"previous-{path.name}")


def _keep_previous(path: Path) -> None:
    previous = _previous(path)
    previous.unlink(missing_ok=True)
    try:
        previous.hardlink_to(path)
    except OSError:  # a file system without hard links
        files.write_whole(previous, path.read_bytes())
