"""The progress that `pipeline run` shows, from the events of its stages."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path

import pytest
from interpreter import python

from pipeline.cli import compare, run
from pipeline.cli.progress import Screen
from pipeline.dag.graph import Graph, Job, graph_of
from pipeline.settings.project.params import load_params
from pipeline.tracking import names
from pipeline.tracking import progress as stage_side
from pipeline.tracking.sinks import TrackedRun, standard_sinks

ENV, REPORT = Job("env", "ball"), Job("report", "all")
A, B = Job("train", "ppo/seed1"), Job("train", "ppo/seed2")
GRAPH = Graph(
    before={ENV: frozenset(), A: frozenset({ENV}), B: frozenset({ENV}),
            REPORT: frozenset({ENV, A, B})},
    names={"env@ball": ENV, "train@ppo-1": A, "train@ppo-2": B, "report": REPORT},
)  # fmt: skip
PARAMS = "environments:\n  ball: {source: builtin, name: balance_ball}\nexperiments: {}\n"


def told(job: Job, at: float, **facts: object) -> dict[str, object]:
    return {"stage": job.stage, "instance": job.instance, "at": at, **facts}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown:
    """A screen, its time, and the file that stages write to."""

    def __init__(self, folder: Path, *waiting: Job, stream=None, **more):
        self.events, self.stream, self.now = folder / "events", stream or io.StringIO(), 0.0
        self.events.touch()
        more |= {"stream": self.stream, "clock": lambda: self.now}
        self.screen = Screen(GRAPH, set(waiting or GRAPH.before), self.events, **more)

    def take(self, job: Job, at: float, **facts: object) -> list[str]:
        """Return the lines after an event."""
        with self.events.open("a") as file:
            file.write(f"{json.dumps(told(job, at, **facts))}\n")
        return self.at(at)

    def at(self, now: float) -> list[str]:
        """Return the lines that are printed at a time."""
        self.now, before = now, len(self.stream.getvalue())
        self.screen.update()
        return self.stream.getvalue()[before:].splitlines()


def test_progress_ignores_stages_that_a_user_has_added(tmp_path: Path):
    user_stages = (
        "  plot: {foreach: [a, b], do: {cmd: 'python plot.py ${item}'}}\n"
        "  draw: {foreach: {a: 1}, do: {cmd: 'python workflow/scripts/draw.py ${item}'}}\n"
        "  both: {matrix: {of: [a, b]}, cmd: 'python workflow/scripts/both.py ${item.of}'}\n"
    )
    ours = (Path(__file__).resolve().parents[3] / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text(ours + user_stages)
    (tmp_path / "params.yaml").write_text(PARAMS)
    graph = graph_of(load_params(tmp_path / "params.yaml"), tmp_path)
    assert graph.names == {"env@ball": ENV, "report": REPORT}


def test_graph_returns_only_the_wanted_jobs_that_depend_on_a_changed_job():
    assert GRAPH.after(["train@ppo-1"], []) == {A, REPORT}
    assert GRAPH.after(["env@ball"], ["train@ppo-2"]) == {ENV, B}
    assert GRAPH.after(["check"], []) == set()


def test_progress_does_not_count_a_skipped_stage(tmp_path):
    shown = Shown(tmp_path)
    assert shown.take(ENV, 0.0, state="begun") == ["stage 1 of 4, env ball"]
    assert shown.take(ENV, 2.0, state="done") == ["stage 1 of 4, env ball, done in 0:02"]
    # the build is the same as before, so no training runs
    assert shown.take(REPORT, 3.0, state="begun") == ["stage 2 of 2, report"]


def test_progress_line_of_a_training_has_step_speed_reward_and_remaining_time(tmp_path):
    shown = Shown(tmp_path, A, B, REPORT)
    assert shown.take(A, 0.0, state="begun") == ["stage 1 of 3, train ppo seed 1"]
    assert shown.at(10.0) == ["stage 1 of 3, train ppo seed 1"]
    shown.take(A, 15.0, step=100_000, of=300_000, reward=None, rate=None)
    # 10 s are left of this training, and the other seed is expected to take 30 s as well
    assert shown.take(A, 20.0, step=200_000, of=300_000, reward=97.125, rate=1e4) == [
        "stage 1 of 3, train ppo seed 1, step 200k of 300k, 10k steps/s, reward 97.12, "
        "at least 0:40 left in all"
    ]
    # a line every ten seconds
    assert shown.at(29.0) == []
    assert shown.at(30.0)[0].endswith(", at least 0:30 left in all")
    assert shown.take(A, 31.0, state="done") == [
        "stage 1 of 3, train ppo seed 1, done in 0:31, step 200k of 300k, 10k steps/s, reward 97.12"
    ]


def test_remaining_time_accounts_for_parallel_jobs(tmp_path):
    shown = Shown(tmp_path, A, B, cores=2)
    for job, rate in ((A, 1.0), (B, 2.0)):
        shown.take(job, 0.0, state="begun")
        shown.take(job, 10.0, step=40, of=100, reward=None, rate=rate)
    # the slower job decides: it reported 60 steps left, 10 s ago
    assert shown.at(20.0)[0].endswith("0:50 left in all")
    # the third seed is expected to take 55 s, the mean of 70 and 40; half of all work is less
    shown.screen.waiting.add(Job("train", "ppo/seed3"))
    assert shown.at(30.0)[0].endswith("0:55 left in all")


def test_remaining_time_uses_mean_duration_of_each_stage(tmp_path):
    export = [Job("export", f"ppo/seed{seed}") for seed in (1, 2, 3)]
    shown = Shown(tmp_path, A, *export)
    for job, seconds in ((A, 20.0), (export[0], 10.0), (export[1], 20.0)):
        shown.take(job, 0.0, state="begun")
        shown.take(job, seconds, state="done")
    shown.take(export[2], 30.0, state="begun")
    assert shown.at(40.0)[0].endswith(", 0:05 left in all")  # 10 of the mean 15 s have passed


def test_failed_stage_counts_as_failed_until_a_retry_succeeds(tmp_path):
    shown = Shown(tmp_path, A, B)
    shown.take(A, 0.0, state="begun")
    assert shown.take(A, 61.0, state="failed") == [
        "stage 1 of 2, train ppo seed 1, failed after 1:01"
    ]
    assert shown.screen.failed == [A]
    assert shown.take(A, 70.0, state="begun") == ["stage 1 of 2, train ppo seed 1"]
    # killed without an event of its end, and started again
    assert shown.take(A, 75.0, state="begun") == ["stage 1 of 2, train ppo seed 1"]
    assert shown.take(A, 80.0, state="done") == ["stage 1 of 2, train ppo seed 1, done in 0:05"]
    assert not shown.screen.failed
    assert not shown.screen.running


def test_incomplete_line_of_the_event_file_is_read_after_its_end_is_written(tmp_path):
    shown, line = Shown(tmp_path, A), json.dumps(told(A, 0.0, state="begun"))
    for part, lines in ((line[:7], []), (line[7:], []), ("\n", ["stage 1 of 1, train ppo seed 1"])):
        with shown.events.open("a") as file:
            file.write(part)
        assert shown.at(1.0) == lines


def test_terminal_redraws_progress_and_keeps_the_final_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = Shown(tmp_path, A, stream=Terminal())
    with shown.screen.bars:
        shown.take(A, 0.0, state="begun")
        shown.take(A, 5.0, step=5, of=9, reward=2.0, rate=1.0)
        shown.take(A, 8.0, state="done")
    drawn = shown.stream.getvalue()
    assert "step 5 of 9, 1 steps/s, reward 2, 0:04 left in all" in drawn
    assert "\x1b[2K" in drawn
    assert drawn.count("done in 0:08") == 1


@pytest.fixture
def events(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "events"
    path.touch()
    monkeypatch.setenv(stage_side.FILE, str(path))
    return path


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "done"), (KeyboardInterrupt(), "stopped"), (ValueError(), "failed")],
)
def test_a_stage_writes_events_of_start_progress_and_end(events, tmp_path, error, state):
    sinks = standard_sinks(TrackedRun(folder=tmp_path, max_steps={"Ball": 9}), ())
    try:
        with stage_side.reporting("train", "ppo/seed1", tmp_path):
            for sink in sinks:
                sink.on_start("Ball", {"max_steps": 9})
                sink.on_summary("Ball", {names.REWARD: 2.0}, 3)
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    messages = [json.loads(line) for line in events.read_text().splitlines()]
    assert {(message["stage"], message["instance"]) for message in messages} == {A}
    assert [message.get("state") for message in messages] == ["begun", None, state]
    facts = [messages[1][key] for key in ("step", "of", "reward", "rate")]
    assert facts == [3, 9, 2.0, None]


def test_stage_without_pipeline_run_writes_no_progress_events(tmp_path, monkeypatch):
    monkeypatch.delenv(stage_side.FILE, raising=False)
    monkeypatch.setenv("DVC_STAGE", "train@ppo-1")
    with stage_side.reporting("train", "ppo/seed1", tmp_path):
        stage_side.tell(step=1)
    assert not list(tmp_path.iterdir())


def test_stage_continues_although_its_progress_events_cannot_be_written(events, tmp_path):
    events.unlink()
    with stage_side.reporting("train", "ppo/seed1", tmp_path):
        stage_side.tell(step=1)
    assert not events.exists()


def test_output_of_a_dvc_stage_goes_to_its_log(events, tmp_path):
    code = (
        "from pathlib import Path; from pipeline.tracking.progress import reporting\n"
        "print('before')\nwith reporting('report', 'all', Path.cwd()): print('within')\n"
        "print('after')"
    )
    assert python("-c", code, cwd=tmp_path, DVC_STAGE="report").stdout.split() == ["before"]
    assert (tmp_path / "logs/report.log").read_text().split() == ["within", "after"]


ENGINE = """
import signal, sys
from pathlib import Path
def stop(*_):
    with Path("stops").open("a") as file: file.write("x")
    sys.exit(1)
signal.signal(signal.SIGINT, stop)
Path("ready").touch()
signal.pause()
"""
PARENT = """
import os, signal, sys
from pathlib import Path
from pipeline.cli.run import _run_engine
from pipeline.errors import Interrupted
sent = []
def update():
    if Path("ready").exists() and not sent:
        sent.append(os.kill(os.getpid(), signal.SIG))
try:
    with open("log", "wb") as log:
        _run_engine([sys.executable, "engine.py"], Path.cwd(), dict(os.environ), log, update)
except Interrupted as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_pipeline_run_passes_a_signal_to_the_engine_once_and_waits_for_its_end(tmp_path, name):
    (tmp_path / "engine.py").write_text(ENGINE)
    program = PARENT.replace("SIG)", f"{name})")
    completed = python("-c", program, cwd=tmp_path, check=False, timeout=60)
    assert completed.returncode == 128 + getattr(signal, name)
    assert (tmp_path / "stops").read_text() == "x"


@pytest.mark.parametrize(
    ("changed", "begun", "said"),
    [
        ([], [], "Everything is up to date; nothing ran.\n\ntable\n"),
        (["env@ball"], [ENV], "table\n"),
        # an engine that does not know what has changed may still run something
        ([], [ENV], "table\n"),
        # a stage whose events cannot be written, and a user's own stage, which writes none
        (["env@ball"], [], "table\n"),
        (["plot@a"], [], "table\n"),
    ],
)
def test_run_reports_that_everything_is_up_to_date_only_if_no_stage_ran(
    changed, begun, said, here, monkeypatch, printed
):
    def watched(command, root, variables, output, update):
        with Path(variables[stage_side.FILE]).open("a") as events:
            events.writelines(f"{json.dumps(told(job, 0.0, state='begun'))}\n" for job in begun)
        update()
        return 0

    (here / "params.yaml").write_text(PARAMS)
    (here / "workflow").mkdir()
    monkeypatch.setattr(run, "_changed", lambda *_: changed)
    monkeypatch.setattr(run, "_run_engine", watched)
    monkeypatch.setattr(compare, "answer", lambda *_: "table")
    assert printed("run") == said
