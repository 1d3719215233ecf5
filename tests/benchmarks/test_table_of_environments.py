"""The checks behind the table of environments, and their reports on misbehaving executables."""

import sys
from pathlib import Path

import catalogue
import conformance
import environments
import psutil
import pytest
import tables

from pipeline.simulators import registry

N_STEPS = 80
PROGRAM = """\
#!{python}
import sys
sys.path[:0] = {path!r}
from pipeline.simulators.executable import main
from pipeline.simulators.games.grid_world import GridWorld
{code}
"""
RAISES = """
step, n_steps = GridWorld.step, 0

def failing(self, actions):
    global n_steps
    n_steps += 1
    if n_steps == 50:
        raise RuntimeError("the physics broke")
    return step(self, actions)

GridWorld.step = failing
sys.exit(main("grid_world", sys.argv[1:]))
"""
DOES_NOT_END = """
import time
main("grid_world", sys.argv[1:])
while True:
    time.sleep(60)
"""
LEAVES_A_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({file!r}, "w").write(str(child.pid))
sys.exit(main("grid_world", sys.argv[1:]))
"""
WELL = 'sys.exit(main("grid_world", sys.argv[1:]))'
NEVER_CALLS = 'sys.exit("no licence")'


@pytest.fixture
def program(tmp_path):
    def write(code):
        file = tmp_path / "environment"
        file.write_text(PROGRAM.format(python=sys.executable, path=sys.path, code=code))
        file.chmod(0o755)
        return file

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hallway", "tag", "gymnasium:CartPole-v1"])
def test_environment_that_follows_the_protocol_passes_all_checks(name, tmp_path):
    (listed,) = catalogue.chosen([name])
    outcome = environments.run(listed, tmp_path, n_steps=N_STEPS)
    assert outcome.failures == []
    assert outcome.n_steps == N_STEPS
    assert outcome.agent_rate > outcome.env_rate > 0.0
    cells = environments.row(listed, outcome, {"random": "0.1"})
    assert cells[2:7] == ["yes", str(N_STEPS), "3", "yes", "yes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "failures", "cells"),
    [
        (RAISES, ["took 49 of 80 steps", "answered 3 of 4 resets"], ["yes", "**49**", "2"]),
        (DOES_NOT_END, [], ["yes", "80", "3"]),
        (
            NEVER_CALLS,
            ["did not start", "took 0 of 80 steps", "answered 0 of 4 resets"],
            ["**no**", "**0**", "**0**"],
        ),
    ],
)
def test_misbehaving_executable_is_reported_and_killed(program, code, failures, cells):
    outcome = conformance.drive(program(code), n_steps=N_STEPS, timeout_s=15.0)
    problem = [outcome.problem] if failures else []
    assert outcome.failures == [*failures, "did not end by itself", *problem]
    assert code != RAISES or "exited" in outcome.problem or "shut down" in outcome.problem
    assert environments.row(catalogue.ALL[0], outcome, {})[2:7] == [*cells, "**no**", "yes"]


@pytest.mark.slow
def test_child_process_that_an_executable_leaves_is_found_and_killed(program, tmp_path):
    file = tmp_path / "pid"
    outcome = conformance.drive(program(LEAVES_A_CHILD.format(file=str(file))), n_steps=N_STEPS)
    assert outcome.failures == ["left 1 processes"]
    assert not lives(int(file.read_text()))


@pytest.mark.slow
def test_command_for_the_table_of_environments_fails_if_an_environment_fails(
    program, monkeypatch, capsys
):
    monkeypatch.setattr(catalogue.Listed, "build", lambda _self, _folder: program(RAISES))
    monkeypatch.setattr(sys, "argv", ["environments.py", "grid_world", "--steps", str(N_STEPS)])
    monkeypatch.setattr(environments, "score", lambda _listed, _kind: "")
    assert environments.main() == 1
    assert "grid_world: took 49 of 80 steps" in capsys.readouterr().out


def test_environment_that_cannot_be_packed_is_reported_as_not_started(tmp_path):
    listed = catalogue.Listed(name="gymnasium:CartPol-v1", exercises="")
    outcome = environments.run(listed, tmp_path, n_steps=N_STEPS)
    assert outcome.failures[0] == "did not start"
    assert "CartPole-v1" in outcome.problem


def test_every_built_in_simulator_is_listed_with_its_page_row_and_configuration():
    assert {simulator.name for simulator in catalogue.BUILT_IN} == set(registry.NAMES)
    root = Path(__file__).parents[2]
    text = environments.PAGE.read_text(encoding="utf-8")
    table = text.partition("environments: begin")[2].partition("environments: end")[0]
    for listed in catalogue.ALL:
        assert (root / "docs/reference/environments" / listed.page).is_file()
        assert all((root / "config" / file).is_file() for file in listed.configs)
        assert f"| [{listed.env_id or listed.name}]({listed.page}) |" in table


@pytest.fixture
def page(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("before\n<!-- a: begin -->\nold\n<!-- a: end -->\nafter\n")
    return file


def test_new_table_replaces_the_table_between_its_markers(page):
    tables.put(page, "a", ["k", "v"], [["one", "1"], ["two", ""]])
    tables.put(page, "a", ["k", "v"], [["three", "3"]])
    assert page.read_text() == (
        "before\n<!-- a: begin -->\n\n| k | v |\n| --- | --- |\n| three | 3 |\n\n"
        "<!-- a: end -->\nafter\n"
    )
    with pytest.raises(ValueError, match="markers called 'b'"):
        tables.put(page, "b", ["k"], [])


def test_measuring_single_environments_replaces_only_their_rows_of_the_table(page):
    header = ["k", "l", "v", "w"]
    old = [["1", "a", "x", ""], ["1", "b", "", ""], ["2", "", "y", "z"]]
    tables.put(page, "a", header, old, n_keys=2)
    new = [["1", "b", "new", ""], ["3", "", "", "last"]]
    tables.put(page, "a", header, new, n_keys=2, keep=True)
    assert [line for line in page.read_text().splitlines() if line.startswith("|")][2:] == [
        "| 1 | a | x |  |",
        "| 1 | b | new |  |",
        "| 2 |  | y | z |",
        "| 3 |  |  | last |",
    ]


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
