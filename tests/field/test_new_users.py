"""Reports of new users: a project for a build, a cluster, first runs."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from fake_player import fake_player
from refusals import refusal

from pipeline.cli import main as cli
from pipeline.cli import run, ui
from pipeline.cli.card import source_of
from pipeline.dag.stages import env
from pipeline.dag.stages.check import check_ids
from pipeline.envs import executable
from pipeline.envs.sources import executables
from pipeline.errors import SettingsError
from pipeline.settings import load_run_settings
from pipeline.settings.project.experiments import ResourceParams
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import plan
from pipeline.tracking import progress
from pipeline.tracking.console import ConsoleSink

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {
    "linux": ("MyGame.x86_64", "MyGame_Data/globalgamemanagers", "UnityPlayer.so"),
    "windows": (
        *("MyGame.exe", "MyGame_Data/globalgamemanagers", "UnityPlayer.dll"),
        "UnityCrashHandler64.exe",
    ),
    "darwin": ("MyGame.app/Contents/MacOS/MyGame", "MyGame.app/Contents/Info.plist"),
}
"""Files of a build by Unity, the program first."""


def player(folder: Path, platform: str = "linux") -> Path:
    """Make a build with the layout of Unity's."""
    program, *others = (folder / name for name in LAYOUTS[platform])
    for path in (program, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of Unity\n")
    fake_player(folder, "--quiet").replace(program)
    return program


def test_init_refuses_a_player_in_the_build_folder_of_the_pipeline(here, refused):
    """Regression: with a player in `build/`, the pipeline copied the folder into itself."""
    player(here / "build")
    line = refused("init", ".", "--unity", "build/MyGame.x86_64")
    assert line.startswith(
        "build/MyGame.x86_64: the folder build is copied completely, but contains build/env"
    )
    assert not (here / "params.yaml").exists()
    (here / "build").rename(here / "builds")
    assert cli.main(["init", ".", "--unity", "builds/MyGame.x86_64"]) == 0


@pytest.mark.parametrize(
    ("platform", "named"),
    [
        ("linux", "builds/MyGame.x86_64"),
        ("linux", "builds/MyGame"),
        ("linux", "builds"),
        ("windows", "builds/MyGame.exe"),
        ("windows", "builds"),
        ("darwin", "builds/MyGame.app"),
        ("darwin", "builds/MyGame.app/Contents/MacOS/MyGame"),
        ("darwin", "builds"),
    ],
)
def test_project_for_a_unity_player_copies_all_files_of_the_build(
    here, monkeypatch, capsys, platform, named
):
    monkeypatch.setattr(executables, "this_platform", lambda: platform)
    program = player(here / "builds", platform)
    assert cli.main(["init", "game", "--unity", named]) == 0, capsys.readouterr().err
    assert "Wrote game: Echo with 3 agents" in capsys.readouterr().out
    params = load_params("game/params.yaml")
    ((name, source),) = params.environments.items()
    app = platform == "darwin" and named != "builds"
    assert (name, source.path) == ("game", "../builds/MyGame.app" if app else "../builds")
    assert list(params.experiments) == ["game_ppo"]
    monkeypatch.chdir("game")
    env.make(name, source, Path("made"), Path(), Path("work"))
    build = executable.load(Path("made"))
    assert build.file.read_bytes() == program.read_bytes()
    assert os.access(build.file, os.X_OK)
    made = {path.name for path in Path("made").rglob("*") if path.is_file()}
    assert made == {Path(file).name for file in LAYOUTS[platform]} | {"environment.json"}
    # The path in the README and in a model card is valid for `--env`.
    command = f"--env {os.path.relpath(program)} "
    assert command in Path("README.md").read_text()
    assert source_of(source) == os.path.relpath(program)


@pytest.mark.parametrize("named", ["builds", "builds/MyGame.x86_64"])
def test_error_about_a_folder_with_two_programs_names_both_programs(here, refused, named):
    player(here / "builds")
    shutil.copy("builds/MyGame.x86_64", "builds/Other.x86_64")
    assert refused("init", "game", "--unity", named).startswith(
        "builds: expected one executable, found MyGame.x86_64, Other.x86_64. Move each build "
        "into its own folder"
    )
    assert not Path("game").exists()


def test_player_path_in_params_yaml_means_the_folder_of_the_player(here):
    """A person who writes `path: builds/MyGame.x86_64` by hand gets what `init` writes."""
    player(here / "builds")
    (here / "plain").write_text("#!/bin/sh\n")
    Path("params.yaml").write_text(
        "environments:\n"
        "  game: {source: path, path: builds/MyGame.x86_64}\n"
        "  short: {source: path, path: builds/MyGame}\n"
        "  plain: {source: path, path: plain}\n"
    )
    params = load_params("params.yaml")
    found = {
        name: entry["path"] for name, entry in plan(params)["runs"]["path_environments"].items()
    }
    assert found == {"game": "builds", "short": "builds", "plain": "plain"}
    env.make("game", params.environments["game"], here / "made", here, here / "work")
    assert (here / "made/UnityPlayer.so").is_file()


@pytest.mark.parametrize("project", ["game", "."])
def test_a_project_in_the_folder_of_the_player_is_refused(here, refused, project):
    """The player's folder, which is copied, would contain the copy."""
    player(here)
    error = refused("init", project, "--unity", "MyGame.x86_64")
    assert f"that folder, {here}, contains the project {(here / project).resolve()}; move" in error
    assert not Path("params.yaml").exists()
    Path("params.yaml").write_text("environments:\n  game: {source: path, path: .}\n")
    assert refusal(SettingsError, check_ids, load_params("params.yaml")).startswith(
        "params.yaml:2: environments.game.path: .: a player is copied together with all files"
    )


def test_project_has_every_snakemake_profile_and_the_programs_that_profiles_call(here, monkeypatch):
    assert cli.main(["init", "mine"]) == 0
    profiles = sorted(path.parent.name for path in here.glob("mine/profiles/*/config.yaml"))
    assert profiles == ["cluster-generic", "default", "kubernetes", "local", "slurm"]
    monkeypatch.chdir("mine")
    for name in profiles:
        text = Path(f"profiles/{name}/config.yaml").read_text()
        assert text == (ROOT / f"profiles/{name}/config.yaml").read_text()
        for program in re.findall(r'-cmd: "(\S+)"', text):
            assert os.access(program, os.X_OK), program


def test_cluster_page_agrees_with_the_slurm_profile(here):
    """Partition and account, which most clusters ask for, are lines to fill in."""
    page = (ROOT / "docs/tutorials/cluster.md").read_text()
    profile = (ROOT / "profiles/slurm/config.yaml").read_text()
    shown, limits = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S))
    filled_in = yaml.safe_load(re.sub(r"# (- \w+)", r"\1", profile))
    for key, values in shown.items():
        assert values == filled_in[key]
    assert "slurm_partition=short" in shown["default-resources"]
    assert "slurm_account=my_group" in shown["default-resources"]
    ((_, experiment),) = limits["experiments"].items()
    assert ResourceParams(**experiment["resources"]).minutes == 240
    assert f"time limit ({ResourceParams().minutes} minutes" in page


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["local", "cluster-generic", "slurm"])
def test_snakemake_accepts_each_profile_of_a_project(here, profile):
    """Without the package of a scheduler, Snakemake names that package, and not a file of ours."""
    assert cli.main(["init", "mine"]) == 0
    command = [sys.executable, "-m", "snakemake", "--profile", f"profiles/{profile}", "-n"]
    command += ["--set-resources", "train:slurm_partition=gpuu"]
    command += ["--default-resources", "slurm_account=mine"]
    done = subprocess.run(  # noqa: S603  # a fixed command
        command, cwd="mine", capture_output=True, text=True, check=False
    )
    plugin = f"snakemake_executor_plugin_{profile.replace('-', '_')}"
    if profile == "local" or find_spec(plugin):
        assert done.returncode == 0, done.stderr
        assert re.search(r"^train +3$", done.stdout, re.MULTILINE)
        messages = re.findall(r"(?:Train|Export) .*seed 1(; .*)", done.stdout)
        assert len(messages) == 2
        assert {text.partition("GPUs 0")[2] or text for text in messages} == {
            "; partition gpuu; account mine",
            "; account mine",
        }
    else:
        assert "config.yaml" not in done.stderr
        assert f"invalid choice: '{profile}'" in done.stderr


@pytest.mark.parametrize(
    ("words", "kind", "n_agents", "steps"),
    [
        (["--env", "balance_ball"], "ppo", 12, 4096),
        (["--env", "balance_ball", "--trainer", "sac"], "sac", 12, 4096),
        (["--gymnasium", "CartPole-v1", "--trainer", "sac"], "sac", 16, 4096),
        (["--env", "push_together"], "poca", 48, 16384),
    ],
)
def test_new_project_has_a_short_run_and_the_chosen_trainer(
    here, monkeypatch, words, kind, n_agents, steps
):
    """Regression: the first run in the README had up to a million steps."""
    assert cli.main(["init", "mine", *words]) == 0
    monkeypatch.chdir("mine")
    params = load_params("params.yaml")
    ((experiment, section),) = params.experiments.items()
    assert experiment == f"{section.environment}_{kind}"
    command = re.search(r"^pipeline learn (\S+) --env \S+ --run-id first$", readme(), re.MULTILINE)
    full, short = (
        load_run_settings(Path(file)).behaviors for file in (section.trainer, command[1])
    )
    assert full == params.run_settings(experiment).behaviors
    for name, behavior in short.items():
        assert (behavior.trainer_type, behavior.max_steps) == (kind, steps)
        assert replace(behavior, max_steps=0, summary_freq=0) == replace(
            full[name], max_steps=0, summary_freq=0
        )
        if kind == "sac":  # a gradient step for each step of all agents
            assert behavior.hyperparameters.steps_per_update == n_agents


def readme() -> str:
    return Path("README.md").read_text()


def test_project_readme_names_existing_pages(here, monkeypatch):
    assert cli.main(["init", "mine"]) == 0
    monkeypatch.chdir("mine")
    pages = re.findall(r"`([\w/-]+\.md)`", readme())
    assert "tutorials/cluster.md" in pages
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_short_run_of_the_project_readme_takes_less_than_a_minute(
    here, monkeypatch, capsys, trainer
):
    assert cli.main(["init", "mine", "--gymnasium", "CartPole-v1", "--trainer", trainer]) == 0
    monkeypatch.chdir("mine")
    (command,) = re.findall(r"^pipeline (learn .*)$", readme(), re.MULTILINE)
    began = time.monotonic()
    assert cli.main(shlex.split(command)) == 0, capsys.readouterr().err
    assert time.monotonic() - began < 60
    assert Path("results/first/CartPole-v1.onnx").is_file()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104  # of a foreign program
def test_ui_refuses_an_occupied_port_before_it_prints_an_address(
    here, refused, monkeypatch, caplog, address
):
    """Regression: the pages of another project's server looked like this project's."""
    monkeypatch.setattr(ui.mlflow_store.Store, "existing", lambda _: SimpleNamespace(uri="sqlite:"))
    with socket.socket() as other, caplog.at_level("INFO"):
        other.bind((address, 0))
        other.listen()
        port = other.getsockname()[1]
        error = refused("ui", "--port", str(port))
    start = f"--port {port} cannot be used: another program serves there; `pipeline ui --port "
    assert error.startswith(start)
    free = int(re.search(r"--port (\d+)` uses a free port$", error)[1])
    assert port < free <= 65535
    assert caplog.messages == []


@pytest.mark.parametrize("port", ["0", "-1", "65536", "700000"])
def test_ui_refuses_an_invalid_port_number(here, refused, monkeypatch, port):
    monkeypatch.setattr(ui.mlflow_store.Store, "existing", lambda _: SimpleNamespace(uri="sqlite:"))
    assert refused("ui", "--port", port) == f"--port must be from 1 to 65535, got {port}"


OLD = "default:\n  trainer: ppo\n  memory_size: 8\n  batch_size: 64\nWalker:\n  max_steps: 1e3\n"


def test_config_upgrade_prints_counts_of_keys_and_lists_the_keys_only_if_verbose(here, capsys):
    """Regression: the command printed 240 lines for a file of an old release."""
    Path("old.yaml").write_text(OLD)
    assert cli.main(["config", "upgrade", "old.yaml", "-o", "new.yaml"]) == 0
    counts, wrote = capsys.readouterr().out.splitlines()
    assert wrote.startswith("Wrote new.yaml; read again, it gives the same settings")
    assert cli.main(["config", "upgrade", "old.yaml", "-o", "newer.yaml", "--verbose"]) == 0
    listed = capsys.readouterr().out.splitlines()
    titles = [line for line in listed if line.endswith(":") and line[0] != " "]
    assert titles == ["Moved:", "Removed:", "Notes:"]
    places = [*map(listed.index, titles), len(listed) - 1]
    moved, gone, known = (b - a - 1 for a, b in itertools.pairwise(places))
    assert min(moved, gone, known) > 0
    assert counts == (
        f"Keys: {moved} moved, {gone} removed, {known} notes (`--verbose` lists each)."
    )


@pytest.mark.parametrize("started_by", ["dvc", "pipeline run", "snakemake"])
def test_settings_of_a_training_run_are_written_to_its_log(here, monkeypatch, started_by):
    """Regression: `dvc repro` printed 40 lines of settings; other engines print into a log."""
    monkeypatch.delenv("DVC_STAGE", raising=False)
    if started_by != "snakemake":
        monkeypatch.setenv("DVC_STAGE", "train@x-1")
    if started_by == "pipeline run":
        monkeypatch.setenv(progress.FILE, str(here / "events"))
        monkeypatch.setattr(progress, "_print_to", lambda _: None)
    log, printed = Path("logs/train/x/seed1.log"), io.StringIO()
    log.parent.mkdir(parents=True)
    log.write_text("of an earlier run\n")
    with progress.reporting("train", "x/seed1", here):
        for name in ("Walker", "Other"):
            ConsoleSink(stream=printed).on_start(name, {"max_steps": 7})
    settings = "Hyperparameters for behavior name {}:\n\tmax_steps:\t7\n"
    if started_by == "dvc":
        assert printed.getvalue() == "".join(
            f"[INFO] The settings of behavior {name} are in {log}.\n"
            for name in ("Walker", "Other")
        )
        assert log.read_text() == settings.format("Walker") + settings.format("Other")
    else:
        assert printed.getvalue() == "".join(
            f"[INFO] {settings.format(name)}" for name in ("Walker", "Other")
        )
        assert log.read_text() == "of an earlier run\n"
    ConsoleSink(stream=printed).on_start("After", {})
    assert printed.getvalue().endswith("Hyperparameters for behavior name After:\n\n")


@pytest.mark.parametrize("engine", ["dvc", "snakemake"])
@pytest.mark.parametrize(
    ("names", "shown"),
    [(["mine"], "mine 2"), (["mine-2"], "mine 1"), (["few", "mine"], "mine 2")],
)
def test_pipeline_run_of_an_experiment_prints_its_table_of_results(
    here, monkeypatch, capsys, engine, names, shown
):
    """Regression: the output ended with "up to date"."""
    Path("params.yaml").write_text(
        "environments: {balance_ball: balance_ball}\nexperiments:\n"
        + "".join(
            f"  {name}: {{environment: balance_ball, trainer: t.yaml, overrides: {{}}, "
            "seeds: [1, 2], stages: [train, export, evaluate], "
            "evaluation: {episodes: 2, seed: 1}}\n"
            for name in ("mine", "other")
        )
        + "subsets: {few: [mine-1]}\n"
    )
    Path("t.yaml").write_text("behaviors: {B: {max_steps: 10}}\n")
    Path(".dvc").mkdir()
    for name in ("mine", "other"):
        for seed in (1, 2):
            made = Path(f"results/evaluate/{name}/seed{seed}/metrics.json")
            made.parent.mkdir(parents=True)
            numbers = {"mean_return": float(seed), "episodes": 2}
            made.write_text(json.dumps({"B": numbers}))
    monkeypatch.setattr(run, "_run_with_progress", lambda *_: None)
    assert cli.main(["run", *names, "--engine", engine]) == 0, capsys.readouterr().err
    first, *table = capsys.readouterr().out.splitlines()
    assert first == f"{engine}: {', '.join(names)} up to date."
    name, n_seeds = shown.split()
    rows = [line.split() for line in table if line.startswith(("mine  ", "other  "))]
    assert [row[0] for row in rows] == [name]
    assert n_seeds in rows[0]


def test_pipeline_run_without_results_prints_up_to_date(here, monkeypatch, capsys):
    assert cli.main(["init", "mine"]) == 0
    monkeypatch.chdir("mine")
    monkeypatch.setattr(run, "_run_with_progress", lambda *_: None)
    capsys.readouterr()
    assert cli.main(["run", "balance_ball_ppo-1"]) == 0
    assert capsys.readouterr().out == "snakemake: balance_ball_ppo-1 up to date.\n"
    curve = Path("results/train/balance_ball_ppo/seed1/progress.csv")
    curve.parent.mkdir(parents=True)
    curve.write_text("no curve\n")
    assert cli.main(["run", "balance_ball_ppo-1"]) == 0
    first, _, last = capsys.readouterr().out.splitlines()
    assert first == "snakemake: balance_ball_ppo-1 up to date."
    monkeypatch.setattr(run, "_run_with_progress", lambda *_: True)
    assert cli.main(["run", "balance_ball_ppo-1"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "snakemake: balance_ball_ppo-1 up to date; nothing ran."
    assert last.startswith(
        f"The table of results cannot be made: {curve.resolve()}: cannot be read"
    )
