import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import python, variables

from pipeline.dag import process
from pipeline.errors import Interrupted, SettingsError

SRC = Path(__file__).resolve().parents[3] / "src"

WAITS = """
import sys, threading
from pipeline.dag import process
def wait():
    # Python looks for signals between its instructions: one that comes on the way into a long wait
    # is only seen after it, so work that is to be stopped waits a little at a time.
    while True:
        threading.Event().wait(0.05)
def work():
    print("ready", flush=True)
    {body}
sys.exit(process.run(work))
"""


def start(body: str) -> subprocess.Popen:
    child = subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", WAITS.format(body=body)],
        env=variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_each_signal_ends_the_stage_with_the_exit_code_of_that_signal(number, code):
    with start("wait()") as child:
        child.send_signal(number)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == code
    assert errors.startswith("interrupted: stopped by SIG")


@pytest.mark.parametrize(
    "ignoring",
    [
        [
            "import os, subprocess",
            "os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))",
            "subprocess.run(['true'], preexec_fn=int)",
            "wait()",
        ],
        [
            "class Finalized:",
            "    def __del__(self): signal.raise_signal(signal.SIGTERM)",
            "Finalized()",
            "wait()",
        ],
        [
            "try: signal.raise_signal(signal.SIGTERM)",
            "except BaseException: pass",
            "wait()",
        ],
        [
            "try: signal.raise_signal(signal.SIGTERM)",
            "except KeyboardInterrupt: pass",
        ],
    ],
    ids=["fork", "finalizer", "bare except", "end of the work"],
)
def test_signal_ends_the_stage_although_other_code_catches_the_keyboard_interrupt(ignoring):
    with start("\n    ".join(["import signal", *ignoring])) as child:
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 143
    assert errors == "interrupted: stopped by SIGTERM\n"


def test_interrupt_is_not_raised_a_second_time_while_the_stage_saves_its_state():
    body = [
        "import time",
        "try:",
        "    print('works', flush=True)",
        "    wait()",
        "except KeyboardInterrupt:",
        "    time.sleep(0.5)",
        "    sys.stderr.write('saved, ')",
        "    raise",
    ]
    with start("\n    ".join(body)) as child:
        assert child.stdout.readline() == "works\n"
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 143
    assert errors == "saved, interrupted: stopped by SIGTERM\n"


# An engine starts a stage itself, by a shell that is replaced by the stage (bash), or by a shell
# that stays until the stage ends (dash). In each case the stage has another parent.
SHELLS = pytest.mark.parametrize(
    "shell",
    [[], ["/bin/sh", "-c", 'exec "$0" "$@"'], ["/bin/sh", "-c", '"$0" "$@"; exit $?']],
    ids=["no shell", "shell replaced", "shell stays"],
)


ENGINE = """
import subprocess, sys
child = subprocess.Popen([*sys.argv[2:], sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""


def engine_of(stage: str, *shell: str) -> subprocess.Popen:
    """Start a process that starts a stage, through a shell if one is given, and prints its id."""
    return subprocess.Popen(  # noqa: S603  # this interpreter
        [sys.executable, "-c", ENGINE, stage, *shell],
        env=variables(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


@SHELLS
def test_a_stage_ends_when_its_engine_is_killed(shell):
    with engine_of(WAITS.format(body="threading.Event().wait(120)"), *shell) as engine:
        assert "ready\n" in (engine.stdout.readline(), engine.stdout.readline())
        engine.kill()
        # The stage holds the other end of the pipe, so the pipe closes when the stage has ended.
        assert engine.stdout.read() == ""


ORPHAN = """
import sys
{early}
print("waits", flush=True)
sys.stdin.readline()
from pipeline.dag import process
print("works", process.run(lambda: print("worked", flush=True)), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells orphans by Linux's means")
@pytest.mark.parametrize("early", ["", "from pipeline.dag import process"])
@SHELLS
def test_a_stage_does_not_start_if_the_engine_that_called_it_was_killed(early, shell):
    """A stage recognizes a dead engine by its session at first, and later by its parent's id."""
    with engine_of(ORPHAN.format(early=early), *shell) as engine:
        assert "waits\n" in (engine.stdout.readline(), engine.stdout.readline())
        engine.kill()
        engine.wait()
        engine.stdin.write("\n")
        engine.stdin.flush()
        assert engine.stdout.read() == "works 143\n"


@pytest.mark.parametrize("error", [RuntimeError, SettingsError, OSError])
def test_signal_ends_the_stage_although_other_code_raises_another_exception_instead(error, capsys):
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as stopped:
            raise error("an import was cut short") from stopped

    assert process.run(work) == 143
    assert capsys.readouterr().err == "interrupted: stopped by SIGTERM\n"


def test_unexpected_error_of_a_stage_is_raised_unchanged_if_no_signal_has_arrived():
    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        process.run(work)


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have us ignore it
sys.meta_path.insert(0, Interrupting())
if sys.argv[2].endswith(".py"):
    sys.path.insert(0, os.path.dirname(sys.argv[2]))  # as `python FILE` does
    runpy.run_path(sys.argv[2], run_name="__main__")
else:
    runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "program"),
    [
        ("pipeline.cli.main", "pipeline"),
        ("pipeline.cli.parser", "pipeline"),
        ("pipeline.dag.process", "train.py"),
        ("pipeline.dag.stages.train", "train.py"),
        ("pipeline.settings", "report.py"),
    ],
)
def test_interrupt_while_a_stage_imports_modules_prints_no_traceback(module, program):
    scripts = SRC.parent / "workflow/scripts"
    program = str(scripts / program) if program.endswith(".py") else program
    completed = python("-c", INTERRUPTED_IMPORT, module, program, check=False)
    assert (completed.returncode, completed.stdout, completed.stderr) == (-signal.SIGINT, "", "")


def test_environment_variable_sets_the_exit_code_that_makes_a_scheduler_requeue_the_job(
    monkeypatch, caplog
):
    assert process.exit_code(138) == 138
    monkeypatch.setenv("PIPELINE_REQUEUE_EXIT_CODE", "99")
    assert [process.exit_code(code) for code in (130, 143, 138)] == [130, 143, 99]
    for never in ("0", "256", "soon"):
        monkeypatch.setenv("PIPELINE_REQUEUE_EXIT_CODE", never)
        assert process.exit_code(138) == 138
    assert "'soon', not an exit code from 1 to 255" in caplog.text


def test_stage_saves_its_state_completely_after_its_parent_process_has_ended():
    # A scheduler signals the whole group: the shell between the engine and the stage ends at once.
    saves = [
        "try:",
        "    print('works', flush=True)",
        "    wait()",
        "except KeyboardInterrupt:",
        "    print('asked', flush=True)",
        "    sys.stdin.readline()",
        "    print('saved', flush=True)",
        "    raise",
    ]
    with engine_of(WAITS.format(body="\n    ".join(saves))) as parent:
        lines = {parent.stdout.readline().strip() for _ in range(3)}
        stage = int((lines - {"ready", "works"}).pop())
        os.kill(stage, signal.SIGUSR1)
        assert parent.stdout.readline() == "asked\n"
        parent.kill()
        parent.stdin.write("go on\n")
        parent.stdin.close()
        assert parent.stdout.read() == "saved\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SettingsError("params.yaml:3: no"), 2, "error: params.yaml:3: no\n"),
        (Interrupted("at step 5", exit_code=143), 143, "interrupted: at step 5\n"),
    ],
)
def test_user_error_is_reported_in_one_line_and_determines_the_exit_code(error, code, said, capsys):
    def work() -> None:
        raise error

    assert process.run(work) == code
    assert capsys.readouterr().err == said


def test_successful_stage_returns_0_and_restores_the_signal_handlers():
    before = signal.getsignal(signal.SIGTERM)
    assert process.run(lambda: None) == 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_garbage_collection_is_rare_in_a_short_stage_and_unchanged_in_other_stages():
    before = gc.get_threshold()
    seen = []
    assert process.run(lambda: seen.append(gc.get_threshold()), short=True) == 0
    assert process.run(lambda: seen.append(gc.get_threshold())) == 0
    assert seen[0][0] > 10 * before[0]
    assert (seen[1], gc.get_threshold()) == (before, before)


SHORT = """
import atexit, sys
from pipeline.dag.process import leave, run
class Held:
    def __del__(self):
        print("collected", flush=True)
held = Held()
atexit.register(print, "left")
leave(run(lambda: None, short=sys.argv[1] == "short"))
"""


@SHELLS
@pytest.mark.parametrize(("how", "said"), [("short", "left\n"), ("long", "left\ncollected\n")])
def test_short_stage_runs_its_exit_handlers_and_skips_the_garbage_collection_at_exit(
    how, said, shell
):
    """The thread that watches a parent behind a shell does not count as unfinished work."""
    completed = python("-c", SHORT, how, before=shell, check=False)
    assert (completed.returncode, completed.stdout) == (0, said), completed.stderr


ABANDONED = """
import sys, threading, time
from pipeline.dag.process import leave
class Held:
    def __del__(self):
        print("unloaded", flush=True)
held = Held()
if sys.argv[1] == "busy":
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("done")
leave(3)
"""


@pytest.mark.parametrize(("how", "said"), [("busy", "done\n"), ("idle", "done\nunloaded\n")])
def test_modules_are_not_unloaded_at_exit_while_a_daemon_thread_runs(how, said):
    completed = python("-c", ABANDONED, how, check=False)
    assert (completed.returncode, completed.stdout) == (3, said), completed.stderr
