"""What is written to MLflow, in which order and to which run, with a store of this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.tracking import mlflow_run, mlflow_store, names
from pipeline.tracking.mlflow_run import MlflowRun
from pipeline.tracking.run_metadata import InputData, RunKey, RunMetadata


class Store:
    """Runs in a dictionary, and the calls that changed them."""

    uri, place, experiment_id, is_local = "sqlite:///x.db", "mlflow.db", "1", True

    def __init__(self) -> None:
        self.runs: dict[str, SimpleNamespace] = {}
        self.client = self
        self.histories: dict[str, list[int]] = {}

    def calls(self, run: str) -> list[tuple]:
        return self.runs[run].calls

    def holds(self, run):
        return run in self.runs

    def _with(self, name, value):
        return [run for run, entry in self.runs.items() if entry.data.tags.get(name) == value]

    def current(self, _):
        return next(iter(self._with(mlflow_store.CURRENT, "yes")), None)

    def trained(self, _, digest):
        return next(iter(self._with(mlflow_store.TRAINED, digest)), None)

    def get_run(self, run):
        return self.runs[run]

    def create_run(self, _, *, run_name, tags):
        run = f"run{len(self.runs)}"
        self.runs[run] = SimpleNamespace(data=SimpleNamespace(tags=dict(tags)), calls=[])
        self.runs[run].calls.append(("created", run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def set_tags(self, run, values):
        self.runs[run].data.tags |= values

    def supersede(self, run, _):
        for other, entry in self.runs.items():
            entry.data.tags[mlflow_store.CURRENT] = "yes" if other == run else "no"

    def put_back(self, run, name, tags):
        self.calls(run).append(("put back", name))
        self.supersede(run, tags)

    def get_metric_history(self, _run, name):
        return [SimpleNamespace(step=step) for step in self.histories.get(name, ())]

    def log_metrics(self, run, points):
        self.calls(run).append(
            ("metrics", [(name, value, step) for name, value, _, step in points])
        )

    def log_data(self, run, data, _tree):
        self.calls(run).append(("data", [item.name for item in data]))
        return {"environment": "e1", "demonstrations": "d1"}

    def log_artifact(self, run, path, folder):
        self.calls(run).append(("artifact", Path(path).name, folder))

    def __getattr__(self, name):
        return lambda run, *values, **options: self.calls(run).append(
            (name, *values, *options.values())
        )


@pytest.fixture
def store(monkeypatch) -> Store:
    store = Store()
    monkeypatch.setattr(mlflow_store.Store, "open", lambda _root: store)
    monkeypatch.setattr(mlflow_run.machine, "facts", dict)
    monkeypatch.setattr(mlflow_run.machine, "summary", lambda _: "m")
    return store


def key(root: Path, stage: str = "train", *, seed: int = 1, **more) -> RunKey:
    values = {"experiment": "e", "fingerprint": "f", "record": root / f"{seed}.json"}
    return RunKey(**values | {"root": root, "seed": seed, "stage": stage} | more)


def begun(run: MlflowRun) -> MlflowRun:
    """The run, when its thread has opened it."""
    run.artifacts([])
    while run.run_id is None:
        run._thread.join(0.001)
    return run


def finished(run: MlflowRun, status: str = "FINISHED") -> str:
    run.end(status, timeout_s=20)
    assert not run._thread.is_alive()
    assert run.lost == 0
    return run.run_id


def test_two_runs_at_once_write_what_is_their_own_in_order_and_each_number_once(tmp_path, store):
    both = begun(MlflowRun(key(tmp_path), prefix=True)), begun(MlflowRun(key(tmp_path, seed=2)))
    for step in (10, 20):
        for index, run in enumerate(both):
            for behavior in ("A", "B")[: 2 - index]:
                reward = step + 100.0 * index
                values = {names.REWARD: reward, "Losses/a:b": 0.5, names.IS_TRAINING: 1.0}
                run.metrics(behavior, values, step)
    (tmp_path / "x.png").touch()
    both[0].artifacts([tmp_path / "x.png", tmp_path / "y.png"])
    both[0].results({"mean": 2.0, "long": 1 / 3})
    ids = [finished(both[0]), finished(both[1], "KILLED")]
    expected = [
        [
            (f"{behavior}/{tag}", value, step)
            for step in (10, 20)
            for behavior in "AB"
            for tag, value in ((names.REWARD, float(step)), ("Losses/a:b", 0.5))
        ],
        [
            (tag, value, step)
            for step in (10, 20)
            for tag, value in ((names.REWARD, step + 100.0), ("Losses/a:b", 0.5))
        ],
    ]
    for run, curve in zip(ids, expected, strict=True):
        points = [p for name, *call in store.calls(run) if name == "metrics" for p in call[0]]
        assert [point for point in points if not point[0].startswith("train/")] == curve
    first = [call for call in store.calls(ids[0]) if call[0] != "created"]
    assert first[-4:] == [
        ("artifact", "x.png", "train"),
        ("artifact", "y.png", "train"),
        ("metrics", [("train/mean", 2.0, 0), ("train/long", 0.333333, 0)]),
        ("end", "FINISHED"),
    ]
    assert store.calls(ids[1])[-1] == ("end", "KILLED")
    both[0].metrics("A", {"late": 1.0}, 30)
    assert both[0].lost == 1, "after the end"
    records = [json.loads((tmp_path / f"{seed}.json").read_text()) for seed in (1, 2)]
    assert [record["run_id"] for record in records] == ids


def test_steps_of_all_behaviors_count_and_only_points_that_a_run_lacks_are_filled_in(
    tmp_path, store
):
    numbers = {"A": {"steps": 300, "mean": 1.5, "none": None}, "B": {"steps": 500, "mean": 2.5}}
    run = begun(MlflowRun(key(tmp_path), prefix=True))
    run.trained(numbers, curve=[], seconds=4.0, interrupted=[7, 9])
    first = finished(run)
    (points,) = [dict(p[:2] for p in c[1]) for c in store.calls(first) if c[0] == "metrics"]
    assert points == {
        "train/A/steps": 300,
        "train/A/mean": 1.5,
        "train/B/steps": 500,
        "train/B/mean": 2.5,
        "train/training_s": 4.0,
        "train/steps_per_second": 200.0,
    }
    tags = store.get_run(first).data.tags
    assert tags["train.exact"] == "interrupted at steps 7, 9, not exact"
    store.histories = {"A/r": [10, 20], "B/r": [20]}
    curve = [(name, "r", step / 10, step) for step in (10, 20, 30) for name in "AB"]
    resumed = MlflowRun(key(tmp_path, resumed=True), prefix=True)
    resumed.trained(numbers, curve=curve, seconds=4.0, interrupted=[])
    assert finished(resumed) == first
    filled, results = [call[1] for call in store.calls(first) if call[0] == "metrics"][1:]
    assert filled == [("B/r", 1.0, 10), ("A/r", 3.0, 30), ("B/r", 3.0, 30)]
    assert {name for name, _, _ in results} == set(points) - {
        "train/training_s",
        "train/steps_per_second",
    }


def test_stages_go_on_in_the_run_of_their_policy_and_training_anew_begins_another(tmp_path, store):
    policy = tmp_path / "policy.pt"

    def train(content: str, fingerprint: str, **more) -> str:
        policy.write_text(content)
        run = begun(MlflowRun(key(tmp_path, fingerprint=fingerprint, **more)))
        run.made(policy)
        return finished(run)

    def digest(run: str) -> str:
        return store.get_run(run).data.tags[mlflow_store.TRAINED]

    def recorded() -> tuple[str, dict]:
        record = json.loads((tmp_path / "1.json").read_text())
        return record["run_id"], record["stages"]

    first = train("one", "f1")
    assert recorded() == (first, {"train": "f1"})
    export = begun(MlflowRun(key(tmp_path, "export", fingerprint="x1", policy=digest(first))))
    assert finished(export) == first
    assert recorded() == (first, {"train": "f1", "export": "x1"})
    second = train("two", "f2")
    assert second != first
    assert recorded() == (second, {"train": "f2"}), "of another policy nothing was exported"
    assert [store.get_run(r).data.tags["pipeline.current"] for r in (first, second)] == [
        "no",
        "yes",
    ]
    # a stage that takes the first policy again goes on in its run, and so does training it again
    evaluate = begun(MlflowRun(key(tmp_path, "evaluate", policy=digest(first))))
    assert finished(evaluate) == first
    assert recorded() == (first, {"evaluate": "f"})
    assert ("put back", "e-seed1") in store.calls(first)
    third = train("two", "f3")
    assert third == second
    assert recorded() == (second, {"train": "f3"})
    assert store.calls("run2")[-1] == ("end", "FINISHED"), "the attempt has no policy of its own"
    for run in (first, second):  # in training alone, not in the stages after it
        assert [call for call in store.calls(run) if call[0] == "watch"] == [("watch",)]
    assert not [call for call in store.calls(second)[1:] if call[0] == "created"]


def test_a_run_is_described_with_its_data_and_scores_of_each_behavior(tmp_path, store, monkeypatch):
    scored = []
    monkeypatch.setattr(
        mlflow_run.mlflow_models,
        "score",
        lambda _client, run, name, tags: scored.append((run, name, tags["score"])),
    )
    monkeypatch.setattr(mlflow_run.mlflow_database, "file_of", lambda _: None)
    data = [InputData(name=name, path=name, context="environment") for name in ("a", "b")]
    run = begun(MlflowRun(key(tmp_path)))
    row = RunMetadata(params={"x": {"y": 1}}, configuration="c", data=data, note="n")
    run.describe(row, tmp_path)
    (tmp_path / "game").touch()
    run.score({"A": 1.5, "B": 2.5}, environment="w", build=tmp_path / "game", params={"n": 4})
    identifier = finished(run)
    calls = store.calls(identifier)
    assert ("log_params", {"x.y": "1"}) in calls
    assert ("data", ["a", "b"]) in calls
    assert ("log_text", "c", "configuration.yaml") in calls
    tags = store.get_run(identifier).data.tags
    assert (tags["dvc.environment"], tags["dvc.demonstrations"]) == ("e1", "d1")
    assert tags["mlflow.note.content"] == "n"
    assert scored == [(identifier, "w.A", "1.5"), (identifier, "w.B", "2.5")]


@pytest.mark.parametrize(("fails", "lost"), [((1, 2, 4, 5, 7), 5), ((2, 3, 4), 3 + 5 + 1)])
def test_failures_count_in_a_row_and_for_each_run_alone(fails, lost, tmp_path, store, monkeypatch):
    """After three the rest is dropped, with the end."""

    def log_artifact(run, _path, _folder):
        store.calls(run).append(("tried",))
        tried = len([call for call in store.calls(run) if call == ("tried",)])
        if run == "run0" and tried in fails:
            raise RuntimeError("no answer")

    monkeypatch.setattr(store, "log_artifact", log_artifact)
    both = [begun(MlflowRun(key(tmp_path, seed=seed))) for seed in (1, 2)]
    for run in both:
        for _ in range(9):
            run.artifacts([tmp_path])
        run.end(timeout_s=20)
    assert [run.lost for run in both] == [lost, 0]
    ended = [("end", "FINISHED") in store.calls(run.run_id) for run in both]
    assert ended == [lost == 5, True]
