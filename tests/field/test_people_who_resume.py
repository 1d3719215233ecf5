"""Reports of users who resume runs, edit files of runs, or have agents that vanish."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_player import CONFIG, fake_player
from steps import decision_steps, take_turn, terminal_steps
from stops_after import EndsAfter
from toys import Corridor

import pipeline
from pipeline.cli import main as cli
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.dag.reporting.results import read_curves
from pipeline.data.slots import STALE_AFTER_MESSAGES
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import CheckpointError, SettingsError
from pipeline.settings import load_run_settings
from pipeline.tracking import names
from pipeline.tracking.base import Update
from pipeline.tracking.console import ConsoleSink
from pipeline.tracking.curve_csv import UPDATES_HEADER, CsvSink, UpdatesCsvSink, read_points
from pipeline.tracking.sinks.jsonl import JsonLinesSink
from pipeline.trainer import api
from pipeline.trainer.checkpoints.status import StatusFile
from pipeline.trainer.learner import Learner

SPEC = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec(1, ()))
MEMORY = {"memory": {"sequence_length": 4, "memory_size": 4}}


def learner_of(trainer, network=None):
    settings = {
        "trainer_type": trainer,
        "hyperparameters": {"batch_size": 32, "buffer_size": 10_000},
        "network_settings": {"hidden_units": 4, "num_layers": 1} | (network or {}),
    }
    run = load_run_settings(None, overrides={"behaviors": {"B": settings}})
    return Learner("B", SPEC, run.behaviors["B"], seed=1, device=torch.device("cpu"))


def message_of(agents):
    obs = [np.zeros((len(agents), 1))]
    return decision_steps(obs, agents, group_id=1), terminal_steps([np.zeros((0, 1))], [])


@pytest.mark.parametrize("network", [None, MEMORY], ids=["no_memory", "memory"])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
@pytest.mark.parametrize(
    ("n_messages", "n_left"),
    [(STALE_AFTER_MESSAGES - 100, 140), (STALE_AFTER_MESSAGES + 100, 41)],
)
def test_learner_forgets_agents_only_after_many_messages_without_those_agents(
    trainer, network, n_messages, n_left
):
    learner = learner_of(trainer, network)
    take_turn(learner, [message_of(range(100))])
    for _ in range(n_messages):
        take_turn(learner, [message_of([0])])
    for _ in range(2):  # new agents, so that the learner looks for vanished agents
        take_turn(learner, [message_of([0, *range(100, 140)])])
    assert learner.slots.n_taken == n_left


def curve(folder, n=3):
    """Write the progress.csv of a run, with decimals in all columns but behavior and step."""
    sink = CsvSink(folder / "progress.csv")
    for i in range(n):
        values = {names.REWARD: i + 0.5, names.EPISODE_LENGTH: 10.0, "Losses/GAIL Loss": 0.25}
        sink.on_summary("B", values, 1000 * (i + 1))
    return folder / "progress.csv"


def cells_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def saved(path, lines, *, delimiter=",", end="\n", encoding="utf-8", comma=False, quotes=False):
    text = io.StringIO()
    style = csv.QUOTE_ALL if quotes else csv.QUOTE_MINIMAL
    csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=style).writerows(
        [[cell.replace(".", ",") if comma else cell for cell in line] for line in lines]
    )
    path.write_bytes(text.getvalue().encode(encoding))


def swapped(lines):
    return [[line[2], *line[3:], line[1], line[0]] for line in lines]


def with_steps(lines, changed):
    return [lines[0], *([name, changed(step), *rest] for name, step, *rest in lines[1:])]


def in_thousands(step):
    return f"{step[:-3]}.{step[-3:]}"


SAVED_BY_SPREADSHEETS = {
    "semicolons": lambda p, c: saved(p, c, delimiter=";"),
    "tabs": lambda p, c: saved(p, c, delimiter="\t"),
    "decimal_commas": lambda p, c: saved(p, c, delimiter=";", comma=True),
    "title_above": lambda p, c: saved(p, [["My run"], [], *c]),
    "separator_above": lambda p, c: saved(p, [["sep=;"], *c], delimiter=";"),
    "columns_swapped": lambda p, c: saved(p, swapped(c)),
    "line_ends": lambda p, c: saved(p, c, end="\r\n"),
    "quotes": lambda p, c: saved(p, c, quotes=True, end="\r\n"),
    "byte_order_mark": lambda p, c: saved(p, c, encoding="utf-8-sig"),
    "utf_16": lambda p, c: saved(p, c, encoding="utf-16", delimiter="\t"),
    "empty_cells": lambda p, c: saved(p, [[*line, "", ""] for line in c] + [[""] * 12]),
    "spaces": lambda p, c: saved(p, [[f" {cell} " for cell in line] for line in c]),
    "steps_as_decimals": lambda p, c: saved(p, with_steps(c, "{}.0".format)),
    "thousands": lambda p, c: saved(p, with_steps(c, in_thousands), delimiter=";"),
    "sorted_by_reward": lambda p, c: saved(p, [c[0], *c[:0:-1]]),
}


@pytest.mark.parametrize("kind", SAVED_BY_SPREADSHEETS)
def test_progress_csv_saved_by_a_spreadsheet_is_read_and_continued(kind, tmp_path, caplog):
    """The curve is continued without a warning."""
    path = curve(tmp_path)
    expected = read_points(path)
    SAVED_BY_SPREADSHEETS[kind](path, cells_of(path))
    assert read_points(path) == expected
    CsvSink(path).on_summary("B", {names.REWARD: 9.5}, 4000)
    assert read_points(path) == [*expected, ("B", names.REWARD, 9.5, 4000)]
    assert read_curves(path)["B"].returns.tolist() == [0.5, 1.5, 2.5, 9.5]
    assert path.read_text().startswith("behavior,step,reward,reward_std,")
    assert not caplog.records
    assert [file.name for file in tmp_path.iterdir()] == ["progress.csv"]


def test_progress_csv_without_a_header_is_continued_or_kept_under_another_name(tmp_path, caplog):
    """A file with only the standard columns is continued; other files are kept aside."""
    path = tmp_path / "progress.csv"
    CsvSink(path).on_summary("B", {names.REWARD: 0.5}, 1000)
    path.write_text(path.read_text().split("\n", 1)[1])
    CsvSink(path).on_summary("B", {names.REWARD: 1.5}, 2000)
    assert [value for *_, value, _ in read_points(path)] == [0.5, 1.5]
    assert not caplog.records
    path = curve(tmp_path)
    text = path.read_text().split("\n", 1)[1]
    path.write_text(text)
    CsvSink(path).on_summary("B", {names.REWARD: 1.5}, 2000)
    assert (tmp_path / "progress.csv.1").read_text() == text
    assert [value for *_, value, _ in read_points(path)] == [1.5]
    (record,) = caplog.records
    assert "The file was renamed to" in record.getMessage()
    assert "\n" not in record.getMessage()


DAMAGES = {
    "renamed_column": lambda t: t.replace(b"step,", b"Schritt,"),
    "latin_1": lambda t: t.replace(b"B,2000", b"B\xe9,x"),
    "word": lambda t: t.replace(b"1.5", b"good"),
    "note": lambda t: t + b"these are good\n",
    "binary": lambda t: t[:0] + bytes(range(256)) * 20,
    "zeros": lambda t: t[:0] + bytes(1000),
    "quote": lambda t: t.replace(b"B,1000", b'"B,1000') + b"x" * 200_000,
    "utf_16_cut": lambda t: t.decode().encode("utf-16")[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_unreadable_progress_csv_is_kept_under_another_name_and_training_continues(
    damage, tmp_path, caplog
):
    """The unreadable file is kept under another name, and training goes on."""
    path = curve(tmp_path)
    content = DAMAGES[damage](path.read_bytes())
    path.write_bytes(content)
    CsvSink(path).on_summary("B", {names.REWARD: 9.5}, 4000)
    assert read_points(path)[-1] == ("B", names.REWARD, 9.5, 4000)
    assert (tmp_path / "progress.csv.1").read_bytes() == content
    assert len(caplog.records) == 1


STATUSES = [
    b'{"B": null}',
    b'{"B": {"checkpoints": null}}',
    b'{"B": {"checkpoints": [null, {"steps": "x"}]}}',
    b'{"B": [], "C": 3}',
    b"null",
    b"[]",
    b"",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"B": {"checkpoints": [{"steps": 1' + b"0" * 5000 + b"}]}}",
]


@pytest.mark.parametrize("content", STATUSES, ids=range(len(STATUSES)))
def test_unreadable_training_status_file_is_kept_under_another_name_and_replaced(
    content, tmp_path, caplog
):
    status = StatusFile(tmp_path)
    status.path.parent.mkdir()
    status.path.write_bytes(content)
    status.add("B", tmp_path / "B" / "B-5.pt", step=5, reward=1.0)
    status.set_lessons({"p": 2})
    written = json.loads(status.path.read_bytes())
    assert [entry["steps"] for entry in written["B"]["checkpoints"]] == [5]
    assert written["p"] == {"lesson_num": 2}
    assert status.path.with_name("training_status.json.1").read_bytes() == content
    assert len(caplog.records) == 1


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_training_status_in_another_encoding_is_read(encoding, tmp_path, caplog):
    status = StatusFile(tmp_path)
    status.set_lessons({"p": 2})
    text = status.path.read_text().replace(": 2", ': 2, "x": 1e999, "y": NaN')
    status.path.write_bytes(text.encode(encoding))
    status.set_lessons({"q": 1})
    written = json.loads(status.path.read_bytes())
    assert (written["p"]["lesson_num"], written["q"]["lesson_num"]) == (2, 1)
    assert not caplog.records


def test_unreadable_updates_csv_and_metrics_jsonl_are_kept_under_another_name(tmp_path, caplog):
    """Other files of a run that are continued: updates and metrics."""
    update = Update(step=1, update_s=0.1, n_episodes=0, recent_returns=[])
    path = tmp_path / "B.csv"
    path.write_text("Brain name;Time\nB;1\n")
    sink = UpdatesCsvSink(tmp_path)
    sink.on_update("B", update)
    sink.close()
    assert path.read_text().startswith(",".join(UPDATES_HEADER))
    assert (tmp_path / "B.csv.1").read_text() == "Brain name;Time\nB;1\n"
    run = SimpleNamespace(folder=tmp_path, keep_earlier=True)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"behavior": "B", "step": 1, "x": 2.0}\nnull\n{"step": "x"}\n')
    JsonLinesSink(run).on_summary("B", {"x": 3.0}, 2)
    assert [json.loads(line)["x"] for line in path.read_text().splitlines()] == [2.0, 3.0]
    assert path.with_name("metrics.jsonl.1").exists()
    assert len(caplog.records) == 2


BEHAVIOR = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 64, "num_epoch": 1},
    "network_settings": {"hidden_units": 8, "num_layers": 1},
    "reward_signals": {"extrinsic": {"gamma": 0.9, "strength": 1.0}},
    "max_steps": 100,
    "time_horizon": 8,
}
SAC = {"trainer_type": "sac", "hyperparameters": {"batch_size": 32, "buffer_init_steps": 50}}
CURIOSITY = {**BEHAVIOR["reward_signals"], "curiosity": {"gamma": 0.9, "strength": 0.1}}


def settings_of(changes):
    return {"behaviors": {"Toy": BEHAVIOR | changes}}


def train(folder, changes, **options):
    toy = InProcessEnvironment(Corridor(n_agents=4))
    return pipeline.train(toy, settings_of(changes), seed=1, run_dir=folder, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(folder, {})
    return folder


OTHER_NETWORKS = {
    "network_settings.hidden_units: 8 before, 4 now": {
        "network_settings": {"hidden_units": 4, "num_layers": 1}
    },
    "network_settings.num_layers: 1 before, 2 now": {
        "network_settings": {"hidden_units": 8, "num_layers": 2}
    },
    "network_settings.memory: none before, set now": {
        "network_settings": {"hidden_units": 8, "num_layers": 1} | MEMORY
    },
    "network_settings.normalize: False before, True now": {
        "network_settings": {"hidden_units": 8, "num_layers": 1, "normalize": True}
    },
    "trainer_type: ppo before, sac now": SAC,
    "trainer_type: ppo before, poca now": {"trainer_type": "poca"},
    "reward_signals.curiosity: none before, set now": {"reward_signals": CURIOSITY},
}


@pytest.mark.parametrize("said", OTHER_NETWORKS)
def test_resume_with_another_network_is_refused_before_environments_start(
    said, finished, monkeypatch
):
    """The run is refused before an environment is opened, and its files stay unchanged."""
    monkeypatch.setattr(api, "open_workers", lambda *_: pytest.fail("it was started"))
    content = (finished / "Toy" / "checkpoint.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"^[^\n]*checkpoint\.pt: --resume[^\n]*$") as caught:
        train(finished, OTHER_NETWORKS[said], resume=True)
    assert f"({said}" in str(caught.value)
    assert (finished / "Toy" / "checkpoint.pt").read_bytes() == content


def test_run_continues_if_resumed_with_other_settings_and_the_same_network(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    changes = {"max_steps": 200, "hyperparameters": {"batch_size": 16, "buffer_size": 64}}
    result = train(tmp_path / "run", changes, resume=True)
    assert result.behaviors["Toy"].steps >= 200


def test_init_from_a_file_that_is_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "open_workers", lambda *_: pytest.fail("it was started"))
    path = tmp_path / "old.pt"
    path.write_text("<html>")
    with pytest.raises(CheckpointError, match=r"^[^\n]*old\.pt: is a web page; download the file"):
        train(tmp_path / "run", {}, init_from={"Toy": path})


def test_resume_in_an_environment_with_other_actions_is_refused(finished, tmp_path):
    class Wider(Corridor):
        spec = BehaviorSpec(Corridor.spec.observation_specs, ActionSpec(0, (5,)))

    shutil.copytree(finished, tmp_path / "run")
    toy = InProcessEnvironment(Wider(n_agents=4))
    with pytest.raises(CheckpointError, match=r"branches of \[3\], but Toy has [^\n]*of \[5\]"):
        pipeline.train(toy, settings_of({}), seed=1, run_dir=tmp_path / "run", resume=True)


def content_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_second_training_into_the_same_folder_is_refused_unless_forced(
    finished, tmp_path, monkeypatch, caplog
):
    """The second run neither overwrites the first nor opens an environment or a sink."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "metrics.jsonl").write_text("the first\n")
    before = content_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(api, "open_workers", lambda *_: pytest.fail("it was started"))
        with pytest.raises(SettingsError, match=r"^run_dir: [^\n]*checkpoint\.pt[^\n]*$") as caught:
            train(run, {"max_steps": 40}, sinks=["jsonl"])
        assert "resume=True" in str(caught.value)
        assert "force=True, which renames the folder to run.1" in str(caught.value)
        with pytest.raises(SettingsError, match=r"^force: starts a new run; it cannot be"):
            train(run, {}, force=True, resume=True)
        monkeypatch.chdir(run)
        with pytest.raises(SettingsError, match=r"^force: \S*run is the working folder and"):
            train(".", {}, force=True)
    monkeypatch.chdir(tmp_path)
    assert content_of(run) == before
    caplog.set_level("INFO", logger="pipeline")
    assert train(run, {"max_steps": 40}, force=True).behaviors["Toy"].steps < 50
    assert content_of(tmp_path / "run.1") == before
    assert f"Renamed the folder of the earlier run to {tmp_path / 'run.1'}." in caplog.messages


def test_training_into_a_folder_with_other_files_keeps_these_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    train(tmp_path, {"max_steps": 40})
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.fixture
def learn(tmp_path, monkeypatch, caplog):
    """Run `pipeline learn` on the fake environment, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    player = fake_player(tmp_path, "--quiet")

    def run(*arguments, max_steps=120):
        config = CONFIG.replace("max_steps: 120", f"max_steps: {max_steps}")
        (tmp_path / "config.yaml").write_text(config)
        caplog.clear()
        with caplog.at_level("INFO", logger="pipeline"):
            return cli.main(["learn", "config.yaml", "--env", str(player), "--seed=1", *arguments])

    return run


def test_run_killed_before_its_first_checkpoint_is_resumed_at_step_0(tmp_path, caplog):
    train(tmp_path, {"max_steps": 40}, resume=True)
    text = f"Toy starts at step 0: {tmp_path} has no checkpoint of this behavior."
    assert text in caplog.messages
    caplog.clear()
    train(tmp_path, {"max_steps": 80}, resume=True)
    assert "starts at step 0" not in caplog.text


def test_resuming_a_finished_run_changes_no_files(learn, tmp_path, caplog, capsys):
    """The output says that the run was finished; its times, settings and curves stay."""
    track = ["--track", "tensorboard", "--track", "jsonl"]
    assert learn(*track) == 0
    assert "Trained with seed 1; everything is in results/ppo." in capsys.readouterr().out
    before = content_of(tmp_path / "results")
    assert learn(*track, "--resume", "--seed", "9", max_steps=60) == 0
    assert {k: v for k, v in content_of(tmp_path / "results").items() if k.suffix != ".log"} == {
        k: v for k, v in before.items() if k.suffix != ".log"
    }
    said = "The run was finished at step 122 of Echo; set a larger max_steps to continue."
    assert caplog.messages.count(said) == 1
    out = capsys.readouterr().out
    assert out.startswith("Finished before; everything is in results/ppo.\n")
    assert "Time:" not in out


@pytest.mark.parametrize("place", ["behaviors", "default_settings"])
@pytest.mark.parametrize("inference", [False, True])
def test_console_prints_remaining_time_for_training_but_not_for_inference(
    place, inference, tmp_path
):
    """Training counts down to `max_steps`, wherever it is given; playing counts up."""
    changed = BEHAVIOR | {"summary_freq": 40}
    settings = {place: changed if place == "default_settings" else {"Toy": changed}}
    stream, clock = io.StringIO(), itertools.count()
    sink = ConsoleSink(stream=stream, clock=lambda: float(next(clock)))
    toy = InProcessEnvironment(Corridor(n_agents=4))
    pipeline.train(
        toy,
        settings,
        seed=1,
        run_dir=tmp_path,
        sinks=[sink],
        callbacks=[EndsAfter(60)],
        inference=inference,
    )
    # the first summary has no speed yet, and the last may be after the end
    (first, *later) = [line for line in stream.getvalue().splitlines() if "steps/s" in line]
    assert ("Toy. Step: 80." in first, "s, 0:01 left)" in first) == (True, not inference)
    assert not any("left" in line for line in later)
    assert len(later) == (3 if inference else len(later))
