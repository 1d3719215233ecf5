"""`pipeline demo` from the command line."""

import runpy
from functools import partial
from pathlib import Path

import pytest

from pipeline.cli import main as cli
from pipeline.demos.demo_file import read_demo
from pipeline.settings.trainer.run_file import load_run_settings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def expert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three episodes of an expert, with images, masks and two observations."""
    path = tmp_path_factory.mktemp("expert") / "expert.demo"
    assert cli.main(["demo", "record", "grid_world", "-o", str(path), "--episodes", "3"]) == 0
    return path


@pytest.fixture
def run(printed):
    return partial(printed, "demo")


@pytest.mark.parametrize("spec", ["expert.demo", "expert.yaml", "grid_world"])
def test_exported_demonstration_is_imported_to_the_same_bytes(tmp_path, expert, spec, run):
    table, target = tmp_path / "play.csv", tmp_path / "again.demo"
    spec = {"expert.demo": expert, "expert.yaml": tmp_path / "spec.yaml"}.get(spec, spec)
    run("export", expert, "-o", tmp_path / "spec.yaml")
    run("export", expert, "-o", table)
    assert "3 terminated" in run("import", table, "--spec", spec, "-o", target)
    assert target.read_bytes() == expert.read_bytes()


def test_column_options_of_demo_import_override_columns_in_the_specification_file(tmp_path, run):
    (tmp_path / "a.csv").write_text("x,y,key,over\n1,2,1,1\n")
    (tmp_path / "a.yaml").write_text(
        "behavior: B\nobservations: [{shape: [1]}]\nactions: {discrete: [2]}\n"
        "columns: {obs0: x, discrete: key}\n"
    )
    words = ("import", tmp_path / "a.csv", "--spec", tmp_path / "a.yaml", "-o")
    options = ("--column", "terminated=over", "--column", "obs0=y", "--behavior", "C")
    output = run(*words, tmp_path / "b.demo", *options)
    assert "(1,): column y, 2 to 2" in output
    assert "behavior C" in output


def test_demo_command_reports_mistakes_in_one_line_with_remedy(tmp_path, expert, refused):
    table = tmp_path / "a.csv"
    table.write_text("obs0,terminated\n1,1\n")
    target = ("-o", tmp_path / "b.demo")
    assert "--spec gymnasium:CartPole-v1" in refused("demo", "import", table, *target)
    words = ("import", table, *target, "--spec", expert, "--column", "reward")
    assert "--column reward: needs the form FIELD=COLUMN" in refused("demo", *words)
    words = ("import", table, *target, "--spec", "tag")
    assert "name one of them with --behavior" in refused("demo", *words)
    words = ("import", tmp_path / "no.csv", *target, "--spec", expert)
    assert "no.csv: No such file" in refused("demo", *words)
    assert "--min-return" in refused("demo", "trim", expert, *target)
    assert refused("demo", "info", table).endswith("is not a '.demo' file: it is a CSV file")
    assert "--episodes" in refused("demo", "trim", expert, *target, "--episodes", "first")
    assert not (tmp_path / "b.demo").exists()


@pytest.mark.slow
def test_documented_commands_turn_a_table_into_a_demonstration(here, printed):
    pages = (ROOT / "docs/tutorials/imitation.md").read_text().splitlines()
    commands = [line for line in pages if line.startswith("pipeline demo")]
    runpy.run_path(str(ROOT / "examples/demonstrations/play.py"))
    lines = "".join(printed(*line.split()[1:]) for line in commands[:3]).splitlines()
    first = pages.index(next(line for line in pages if line.startswith("read   ")))
    documented = pages[first : first + 7]
    assert [line[:14] for line in lines[:7]] == [line[:14] for line in documented]
    assert min(read_demo("good.demo").returns()) >= 400
    settings = load_run_settings(ROOT / "examples/demonstrations/imitate.yaml")
    cloning = settings.behaviors["CartPole-v1"].behavioral_cloning
    assert cloning.demo_path.sources[0].path == "good.demo"


def test_merging_trimmed_parts_restores_the_original_demonstration(tmp_path, expert, run):
    first, rest, merged = (tmp_path / f"{name}.demo" for name in ("one", "rest", "whole"))
    run("trim", expert, "-o", first, "--episodes", "1")
    run("trim", expert, "-o", rest, "--episodes", "2-3")
    run("merge", first, rest, "-o", merged)
    assert merged.read_bytes() == expert.read_bytes()


def test_a_minari_dataset_is_written_and_imported(tmp_path, expert, monkeypatch, run, refused):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    target = tmp_path / "again.demo"
    run("export", expert, "-o", "minari:grid/expert-v0")
    message = refused("demo", "export", expert, "-o", tmp_path / "a.csv", "--env", "gymnasium:X-v0")
    assert "is only for minari:DATASET" in message
    text = run("import", "minari:grid/expert-v0", "--spec", expert, "-o", target)
    assert "3 terminated" in text
    original, imported = read_demo(expert), read_demo(target)
    assert (imported.spec, imported.behavior_name) == (original.spec, original.behavior_name)
    both = [*zip(original.obs, imported.obs, strict=True), (original.discrete, imported.discrete)]
    assert all((left == right).all() for left, right in both)
    run("import", "minari:grid/expert-v0", "--behavior", "Own", "-o", target)
    assert read_demo(target).behavior_name == "Own"


def test_demo_info_writes_histogram_of_returns(tmp_path, expert, run):
    picture = tmp_path / "returns.png"
    output = run("info", expert, "--plot", picture)
    assert "3 ended" in output
    assert "GridWorld" in output
    assert f"Wrote {picture}" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
