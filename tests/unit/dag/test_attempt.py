import errno
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.dag import attempt as attempts
from pipeline.dag import process
from pipeline.dag.attempt import Attempt, Job, attempt_at, note_finished
from pipeline.errors import SettingsError, StageError


def job(**changes) -> Job:
    values = {
        "stage": "report",
        "instance": "walk/seed1",
        "params": {"learning_rate": 3e-4},
        "inputs": (Path("data.txt"), Path("folder")),
        "outputs": (Path("results/a/model.bin"), Path("results/a/curves")),
    }
    return Job(**(values | changes))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with the sources of one stage and two inputs."""
    package = tmp_path / "src/pipeline/dag/stages"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "report.py"):
        file.touch()
    (tmp_path / "data.txt").write_text("one")
    (tmp_path / "folder/nested").mkdir(parents=True)
    (tmp_path / "folder/b.txt").write_text("two")
    (tmp_path / "folder/nested/a.txt").write_text("other")
    return tmp_path


def make(attempt: Attempt) -> None:
    attempt.out("model.bin").write_text("weights")
    attempt.out("curves").mkdir()
    (attempt.out("curves") / "a.png").write_text("picture")


def finish(root: Path, **changes) -> Attempt:
    """Run an attempt that makes all outputs."""
    with attempt_at(job(**changes), root) as attempt:
        make(attempt)
    return attempt


def stop(root: Path, **changes) -> None:
    """Stop an attempt after it has saved a checkpoint."""

    def killed() -> None:
        with attempt_at(job(**changes), root) as attempt:
            (attempt.run / "checkpoint").write_text("half way")
            raise process.Stopped

    with pytest.raises(process.Stopped):
        killed()


def fail(root: Path, error: type[Exception], name: str) -> None:
    """Run an attempt that makes only one of its two outputs."""
    with attempt_at(job(), root) as attempt:
        attempt.out("model.bin").touch()
        attempt.out(name)
        if error is RuntimeError:
            raise error("boom")


def test_results_folder_gets_outputs_only_if_the_stage_succeeds_and_makes_all_declared_outputs(
    root,
):
    for error, said, name in (
        (RuntimeError, "boom", "curves"),
        (StageError, "did not make results/a/curves", "model.bin"),
        (ValueError, "declares no output", "other.bin"),
    ):
        with pytest.raises(error, match=said):
            fail(root, error, name)
        assert not (root / "results/a").exists()
    with attempt_at(job(), root) as attempt:
        make(attempt)
        (attempt.run / "checkpoint").touch()
        assert not (root / "results/a").exists()
    assert (root / "results/a/model.bin").read_text() == "weights"
    assert (root / "results/a/curves/a.png").read_text() == "picture"
    again = finish(root)
    assert not again.resumed
    assert list(again.run.iterdir()) == []


@pytest.mark.parametrize("is_other_disk", [False, True])
def test_new_outputs_replace_the_whole_old_folder_also_on_another_disk(
    is_other_disk, root: Path, monkeypatch: pytest.MonkeyPatch
):
    """With another disk as if `results` were a link to it, which Snakemake follows."""
    replace, rename = Path.replace, os.rename

    def refusing(move):
        def refused(source, target):
            if ("results/.work" in str(source)) != ("results/.work" in str(target)):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            return move(source, target)

        return refused

    if is_other_disk:
        monkeypatch.setattr(Path, "replace", refusing(replace))
        monkeypatch.setattr(os, "rename", refusing(rename))
    for _ in range(2):  # the second attempt replaces a file and a folder
        finish(root)
        assert (root / "results/a/model.bin").read_text() == "weights"
        names = sorted(path.name for path in (root / "results/a").rglob("*"))
        assert names == ["a.png", "curves", "model.bin"]
        (root / "results/a/curves/left-over.png").touch()


def test_next_attempt_of_a_stage_removes_files_of_an_attempt_killed_while_writing_its_results(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    finish(root)

    def killed(path: Path, **_: object) -> None:
        raise process.Stopped(str(path))

    def replaced() -> None:
        with attempt_at(job(params={}), root) as attempt:
            make(attempt)
            (attempt.run / ".checkpoint.pt.abcd1234.tmp").touch()
            monkeypatch.setattr(shutil, "rmtree", killed)  # between two moves

    with pytest.raises(process.Stopped):
        replaced()
    monkeypatch.undo()
    shutil.rmtree(root / "results/a")  # as an engine does before it runs the stage again
    assert not list(finish(root, params={}).run.iterdir())
    leftovers = [p.name for p in (root / "results").rglob("*") if p.name.startswith(".")]
    assert leftovers == [".work"]
    assert not (root / "results/.work/report/walk/seed1/old").exists()


def test_next_attempt_of_a_stage_removes_temporary_files_of_a_killed_attempt(root: Path):
    before = tempfile.gettempdir()
    with attempt_at(job(), root) as attempt:
        make(attempt)
        temporary = Path(tempfile.mkdtemp())
    assert not temporary.exists()
    assert tempfile.gettempdir() == before
    temporary.mkdir(parents=True)  # as after kill -9
    with attempt_at(job(), root) as attempt:
        assert not temporary.exists()
        make(attempt)
    assert attempt.folder in temporary.parents


@pytest.mark.parametrize(
    "other", [None, "src/pipeline/dag/stages/other.py", "folder/.snakemake_timestamp"]
)
def test_killed_stage_is_resumed_if_its_inputs_are_unchanged(root, other):
    """Code of another stage and Snakemake's marker file do not count as inputs."""
    stop(root)
    if other:
        (root / other).write_text("VALUE = 1\n")
    with attempt_at(job(), root) as attempt:
        assert attempt.resumed
        assert (attempt.run / "checkpoint").read_text() == "half way"
        make(attempt)


# The content of files after a change; None for a file that is deleted.
CHANGES: dict[str, dict[str, str | None]] = {
    "another parameter": {},
    "input": {"data.txt": "other"},
    "new file in an input folder": {"folder/c.txt": ""},
    "swapped files": {"folder/b.txt": "other", "folder/nested/a.txt": "two"},
    "renamed file": {"folder/b.txt": None, "folder/c.txt": "two"},
    "code": {"src/pipeline/dag/stages/report.py": "VALUE = 1\n"},
}


def changed(root: Path, change: str) -> dict:
    """Make a change, and return the changes of the job."""
    for name, text in CHANGES[change].items():
        if text is None:
            (root / name).unlink()
        else:
            (root / name).write_text(text)
    return {} if CHANGES[change] else {"params": {"learning_rate": 1e-4}}


@pytest.mark.parametrize("change", CHANGES)
def test_killed_stage_starts_from_the_beginning_if_its_inputs_have_changed(root: Path, change):
    stop(root)
    attempt = finish(root, **changed(root, change))
    assert not attempt.resumed
    assert list(attempt.run.iterdir()) == []


def lost(root: Path) -> None:
    """Finish an attempt, and delete its outputs as an engine does that has not recorded them."""
    with attempt_at(job(takes_long=True), root) as attempt:
        make(attempt)
        attempt.facts["mlflow_run_id"] = "abc"
    (root / "results/a/model.bin").unlink()
    shutil.rmtree(root / "results/a/curves")


def test_retried_stage_uses_the_outputs_of_its_finished_attempt(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    lost(root)
    facts = root / "results/.work/report/walk/seed1/stage.json"
    before = facts.read_bytes()
    monkeypatch.setenv("PIPELINE_RETRY", "yes")
    for _ in range(2):
        with attempt_at(job(takes_long=True), root) as attempt:
            assert attempt.done
        assert (root / "results/a/model.bin").read_text() == "weights"
        assert (root / "results/a/curves/a.png").read_text() == "picture"
        assert facts.read_bytes() == before


@pytest.mark.parametrize("change", CHANGES)
def test_retried_stage_whose_inputs_have_changed_repeats_all_its_work(
    root: Path, monkeypatch: pytest.MonkeyPatch, change
):
    lost(root)
    monkeypatch.setenv("PIPELINE_RETRY", "yes")
    changes = {"takes_long": True, **changed(root, change)}
    attempt = finish(root, **changes)
    assert not attempt.done
    assert not attempt.resumed
    with attempt_at(job(**changes), root) as attempt:
        assert attempt.done


def test_next_snakemake_call_uses_outputs_that_a_killed_snakemake_did_not_record(
    root: Path, monkeypatch
):
    monkeypatch.setenv("PIPELINE_CALL", "killed")
    lost(root)
    monkeypatch.setenv("PIPELINE_CALL", "next")
    note_finished(root, "another")
    with attempt_at(job(takes_long=True), root) as attempt:
        assert attempt.done
    assert (root / "results/a/model.bin").read_text() == "weights"
    note_finished(root, "next")
    monkeypatch.setenv("PIPELINE_CALL", "forced")  # a forced job does its work again
    assert not finish(root, takes_long=True).done


@pytest.mark.parametrize(
    ("now", "is_taken"), [("a: {rate: '0.5'}", True), ("a: {rate: 5e-1}", False), ("a: 1", True)]
)
def test_dvc_uses_finished_outputs_if_parameters_are_only_spelled_differently(
    root: Path, monkeypatch: pytest.MonkeyPatch, now: str, is_taken: bool
):
    """For DVC, 5e-1 equals 0.5, so a run after that edit is forced, and does all work again."""
    monkeypatch.setenv("DVC_STAGE", "report@walk-1")
    noted = {"params.yaml": {"a.rate": 0.5}}
    (root / "dvc.lock").write_text(json.dumps({"stages": {"report@walk-1": {"params": noted}}}))
    lost(root)
    (root / "params.yaml").write_text(now)
    with attempt_at(job(takes_long=True), root) as attempt:
        assert attempt.done == is_taken
        if not is_taken:
            make(attempt)
    assert (root / "results/a/model.bin").read_text() == "weights"


def test_error_for_a_second_attempt_at_a_running_stage_names_the_id_of_the_running_process(
    root: Path,
):
    def second() -> None:
        with attempt_at(job(), root):
            raise AssertionError("two attempts")

    with attempt_at(job(), root) as attempt, ThreadPoolExecutor(1) as another:
        refused = another.submit(second).exception()
        assert isinstance(refused, SettingsError)
        assert f"another process (pid {os.getpid()}) is writing" in str(refused)
        make(attempt)
    finish(root, instance="other")


def test_missing_input_is_reported_with_the_command_that_makes_the_input(root: Path):
    message = r"gone.txt does not exist. Run the whole pipeline with `pip"
    with pytest.raises(StageError, match=message):
        finish(root, inputs=(Path("gone.txt"),))


def test_stage_json_is_written_outside_of_the_declared_outputs(root: Path):
    with attempt_at(job(), root) as attempt:
        attempt.facts["mlflow_run_id"] = "abc"
        make(attempt)
    facts = json.loads((attempt.folder / "stage.json").read_text())
    assert facts["params"] == {"learning_rate": 3e-4}
    assert facts["mlflow_run_id"] == "abc"
    assert facts["resumed"] is False
    assert facts["duration_s"] >= 0
    # of the attempt alone, not of the process since its start
    assert 0 <= facts["cpu_s"] <= facts["duration_s"] + 0.1 < sum(os.times()[:4])
    assert set(facts["inputs"]) == {"data.txt", "folder"}
    assert facts["versions"]["numpy"]


def test_result_is_not_given_to_dvc_if_parameters_changed_while_the_stage_ran(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    def run(*, edited: bool) -> Attempt:
        params = {"learning_rate": 1e-3} if edited else job().params
        with attempt_at(job(), root, lambda: job(params=params)) as attempt:
            make(attempt)
        return attempt

    monkeypatch.setenv("DVC_STAGE", "report")
    with pytest.raises(StageError, match="its parameters were changed while it ran"):
        run(edited=True)
    assert not (root / "results/a").exists()
    assert run(edited=False).resumed, "with the old parameters nothing is lost"
    assert (root / "results/a/model.bin").exists()
    monkeypatch.delenv("DVC_STAGE")
    run(edited=True)  # Snakemake records the parameters at the job's start


def test_dvc_gets_results_although_sources_were_edited_or_params_yaml_became_unreadable(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("DVC_STAGE", "report")
    source = root / "src/pipeline/dag/stages/report.py"
    code_file = root / "workflow/code/report.txt"
    with attempt_at(job(), root) as attempt:
        before = code_file.read_text()
        source.write_text("VALUE = 'edited'\n")
        make(attempt)
    assert "changed while it ran" not in caplog.text
    assert code_file.read_text() == before

    def broken() -> Job:
        raise SettingsError("half written")

    with attempt_at(job(), root, broken) as attempt:  # an unreadable params.yaml changes nothing
        make(attempt)
    assert code_file.read_text() != before, "a stage after an edit notes what it runs"
    assert (root / "results/a/model.bin").exists()


@pytest.mark.parametrize("name", ["src/pipeline/dag/stages/report.py", "data.txt", "folder"])
def test_file_that_was_edited_during_a_run_is_named_in_a_warning(
    name: str, root: Path, caplog: pytest.LogCaptureFixture
):
    with attempt_at(job(), root) as attempt:
        make(attempt)
        file = root / name / "b.txt" if name == "folder" else root / name
        file.write_text("VALUE = 1\n")
    (message,) = caplog.messages
    assert f"report walk/seed1: changed while it ran: {name}. The engine will record" in message
    facts = json.loads((attempt.folder / "stage.json").read_text())
    assert facts["changed_meanwhile"] == [name]
    caplog.clear()
    finish(root)
    assert caplog.messages == []


def test_attempt_is_marked_finished_only_after_the_outputs_and_their_backup_copy_exist(
    root, monkeypatch
):
    seen, mark, copy = [], attempts._mark, shutil.copytree
    target = root / "results/a/model.bin"

    def marked(current, *, finished):
        seen.append((finished, target.exists(), (current.folder / "kept/model.bin").exists()))
        mark(current, finished=finished)

    def copied(source, to, *more):
        seen.append(("copy", target.exists()))
        return copy(source, to, *more)

    monkeypatch.setattr(attempts, "_mark", marked)
    monkeypatch.setattr(attempts.shutil, "copytree", copied)
    finish(root, takes_long=True, outputs=(Path("results/a/model.bin"), Path("results/a/curves")))
    assert seen[:2] + seen[-1:] == [(False, False, False), ("copy", False), (True, True, True)]


def test_only_finished_jobs_of_a_snakemake_call_are_marked_as_recorded_when_the_call_ends(
    tmp_path: Path,
):
    marks = {
        "train/a": {"call": "me", "finished": True},
        "train/b": {"call": "me", "finished": False},
        "export/a": {"call": "other", "finished": True},
        "report/all": {"call": "me", "finished": True},
    }
    paths = {job: tmp_path / attempts.WORK / job / "attempt.json" for job in marks}
    for job, path in paths.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(marks[job]))
    attempts.note_finished(tmp_path, "me")
    left = {job: json.loads(path.read_text()).get("call") for job, path in paths.items()}
    assert left == {"train/a": None, "train/b": "me", "export/a": "other", "report/all": None}
