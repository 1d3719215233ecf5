"""Reports of DVC users: names that YAML reads as numbers, and results on another disk."""

import os
import shlex
import shutil
import time
from pathlib import Path

import pytest
from refusals import refusal
from ruamel.yaml import YAML

from pipeline.cli import doctor
from pipeline.cli import main as cli
from pipeline.dag.stages.check import check, refuse_files_of_the_future, refuse_linked_results
from pipeline.errors import SettingsError, StageError
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_settings, plan, write_plan
from pipeline.settings.yaml_file import unusable_for_dvc

TRAINER = "behaviors:\n  Ball:\n    max_steps: 100\n  '7': {}\n"
PARAMS = """\
environments:
  ball: {source: builtin, name: balance_ball}
  cart:
    source: gymnasium
    id: CartPole-v1
    kwargs: {a: 1}
demonstrations:
  expert: {environment: ball, episodes: 5, seed: 1}
  other: {environment: ball, episodes: 5, seed: 1}
experiments:
  base:
    environment: ball
    trainer: trainer.yaml
    overrides: {behaviors: {Ball: {max_steps: 5}}}
    seeds: [1]
    stages: [train, export, evaluate]
    evaluation: {episodes: 1, seed: 1}
sweeps:
  sizes:
    experiment: base
    method: grid
    parameters: {behaviors.Ball.max_steps: [3, 4]}
    seeds: [1]
subsets:
  few: [base]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "trainer.yaml").write_text(TRAINER)
    return tmp_path / "params.yaml"


def described(project: Path, old: str, new: str) -> Path:
    assert PARAMS.count(old) == 1, old
    project.write_text(PARAMS.replace(old, new))
    return project


NAMES = {
    "  ball: {": ("environments", "a number", "2024"),
    "  cart:\n": ("environments", "a date", "2024-01-01"),
    "  other: {": ("demonstrations", "a truth value", "true"),
    "  base:\n": ("experiments", "a number", "42"),
    "  sizes:\n": ("sweeps", "a number", "1e3"),
    "  few: [": ("subsets", "nothing", "null"),
}


@pytest.mark.parametrize("old", NAMES)
@pytest.mark.parametrize("quote", ["", "'"])
def test_name_that_dvc_does_not_read_as_text_must_be_quoted(project: Path, old: str, quote: str):
    """dvc#8903: "'<' not supported between instances of 'int' and 'str'" for every target."""
    section, kind, name = NAMES[old]
    plain = old.strip(" :{[\n")
    text = PARAMS.replace(old, old.replace(plain, f"{quote}{name}{quote}"))
    for key in ("environment", "experiment"):  # a reference to the name may leave the quotes out
        text = text.replace(f"{key}: {plain}", f"{key}: {name}")
    project.write_text(text.replace(f"[{plain}]", f"[{name}]"))
    params = load_params(project)
    if quote:
        check_settings(params)
        assert name in getattr(params, section)
    else:
        (line,) = (n for n, row in enumerate(text.splitlines(), 1) if row.startswith(f"  {name}:"))
        assert refusal(SettingsError, write_plan, params, project.parent / "runs.yaml") == (
            f"{project}:{line}: {section}.{name}: DVC reads {name} as {kind}; "
            f"write it in quotes: '{name}'"
        )


def test_behavior_name_that_is_a_number_must_be_quoted_among_other_names(project: Path):
    """DVC sorts the keys of each map in its record."""
    described(project, "{Ball: {max", "{7: {max_steps: 3}, Ball: {max")
    assert refusal(SettingsError, check_settings, load_params(project)) == (
        f"{project}:14: experiments.base.overrides.behaviors.7: DVC reads 7 as a number; "
        "write it in quotes: '7'"
    )
    described(project, "{Ball: {max", "{'7': {max_steps: 3}, Ball: {max")
    assert load_params(project).run_settings("base").behaviors["7"].max_steps == 3


@pytest.mark.parametrize("keys", ["{1: 2, a: 3}", "{true: 2, 1: 3}", "{a: 2024-01-01}"])
def test_kwargs_keys_that_dvc_cannot_record_must_be_quoted(project: Path, keys: str):
    described(project, "{a: 1}", keys)
    with pytest.raises(SettingsError, match=r"environments.cart.kwargs.*write it in quotes"):
        check_settings(load_params(project))


def test_kwargs_with_only_numeric_keys_are_allowed(project: Path):
    check_settings(load_params(described(project, "{a: 1}", "{1: 2, 3: 4}")))


TEXTS = (
    *("42", "007", "1_000", "1_", "_1", "0x1f", "0x", "0o17", "0b11", "1e3", "1E-3", "1_0e3", "1e"),
    *("1.5", ".5", "5.", "-1", "+1", "1-2", "12-30", "true", "True", "yes", "on", "no", "null"),
    *("Null", "~", "inf", "nan", "2024-01-01", "2024-1-1", "2024-01", "2024-01-01-1", "a42"),
    *("2024-01-01T10:00:00", "2024-1-1 9:00:00", "2024-01-01 note"),
)


def test_check_for_names_that_dvc_cannot_read_agrees_with_the_yaml_reader_of_dvc(project: Path):
    read = {"int": "a number", "float": "a number", "bool": "a truth value", "NoneType": "nothing"}
    read |= {"date": "a date", "datetime": "a date", "TimeStamp": "a date"}
    for text in TEXTS:
        project.write_text(f"experiments: {{? {text} : 1}}\n")
        ((name, _),) = YAML(typ="safe").load(project.read_text())["experiments"].items()
        seen = [kind for _, _, kind in unusable_for_dvc(project, ["experiments"])]
        expected = [] if isinstance(name, str) else [read[type(name).__name__]]
        assert seen == expected, text


@pytest.mark.parametrize(
    "place",
    ["data/demos", *("results", "results/train", "results/train/base", "results/train/base/seed1")],
)
def test_results_behind_a_link_to_another_disk_are_refused_before_training(
    project: Path, tmp_path_factory: pytest.TempPathFactory, place: str
):
    """Regression: DVC trained to the end, refused the results, and trained again each time."""
    root, disk = project.parent, tmp_path_factory.mktemp("disk")
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(disk, target_is_directory=True)
    described(project, "  few: [base]\n", "  few: [base]\n")
    write_plan(load_params(project), root / "workflow/runs.yaml")
    said = f"{place}: is a link to {disk}, outside of the project, where DVC takes no results. Move"
    assert refusal(StageError, check, root).startswith(said)
    (root / "dvc.yaml").touch()
    assert refusal(StageError, doctor.CHECKS["project"], root).startswith(said)


@pytest.mark.parametrize("place", ["results/train", "build", "results/.work", ".dvc/cache"])
def test_symbolic_links_that_dvc_follows_are_allowed(project, tmp_path_factory, place):
    """Links inside the project, of folders without results, and to the project itself."""
    inside = place == "results/train"
    disk = project.parent / "big" if inside else tmp_path_factory.mktemp("disk")
    disk.mkdir(exist_ok=True)
    (project.parent / place).parent.mkdir(parents=True, exist_ok=True)
    (project.parent / place).symlink_to(disk, target_is_directory=True)
    here = tmp_path_factory.mktemp("here") / "project"
    here.symlink_to(project.parent, target_is_directory=True)
    for root in (project.parent, here):  # a link to the whole project, as the error advises
        refuse_linked_results(root)


def test_runs_yaml_quotes_names_that_look_like_other_types(project: Path):
    """DVC reads workflow/runs.yaml, too, in which the program must quote the names."""
    described(project, "  base:\n", "  '2024-01':\n")
    project.write_text(
        project.read_text()
        .replace("experiment: base", "experiment: '2024-01'")
        .replace("[base]", "['2024-01']")
        .replace("seeds: [1]", "seeds: [15]")
    )
    params = load_params(project)
    write_plan(params, project.parent / "runs.yaml")
    table = YAML(typ="safe").load((project.parent / "runs.yaml").read_text())
    assert table == plan(params)
    assert "2024-01-15" in table["runs"]["export"]


MADE = {
    "env@ball": ("build/env/ball/environment.json",),
    "demos@expert": ("data/demos/expert.demo", "results/demos/expert.json"),
    "train@base-1": ("results/train/base/seed1/policy.pt",),
    "evaluate@base-1": ("results/evaluate/base/seed1/metrics.json",),
    "train@sizes-001-1": ("results/train/sizes/001/seed1/policy.pt",),
    "sweep@sizes": ("results/sweep/sizes/best.json",),
}
"""Outputs of stages of PARAMS, by DVC's names of the stages."""
GONE = {
    "env@old_ball": ("build/env/old_ball/environment.json",),
    "demos@old_expert": ("data/demos/old_expert.demo", "results/demos/old_expert.json"),
    "train@old-1": ("results/train/old/seed1/policy.pt",),
    "evaluate@old-1": ("results/evaluate/old/seed1/metrics.json",),
    "train@base-9": ("results/train/base/seed9/policy.pt",),
    "pretrain@base-1": ("results/pretrain/base/seed1/policy.pt",),
    "train@sizes-003-1": ("results/train/sizes/003/seed1/policy.pt",),
    "sweep@shapes": ("results/sweep/shapes/best.json",),
    "propose@shapes-001": ("results/propose/shapes/001.json",),
}
"""Outputs of an experiment, seed, stage, trial and sweep that PARAMS no longer has."""
SCRATCH = ("train/old/seed1", "train/base/seed9", "propose/shapes/001", "env/old_ball")
OURS = ("data/demos/mine.demo", "results/train/notes.txt", "results/ppo/old/seed1/policy.pt")
"""Files that no stage has made."""


@pytest.fixture
def pruned(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with results, some of which params.yaml no longer has."""
    monkeypatch.chdir(project.parent)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project.parent}/none.db")
    project.write_text(PARAMS)
    scratch = (f"results/.work/{place}/stage.json" for place in SCRATCH)
    for file in (*sum({**MADE, **GONE}.values(), ()), *OURS, *scratch):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("made")
    Path("dvc.lock").write_text(locked({**GONE, **MADE}))
    return project.parent


def locked(stages: dict[str, tuple[str, ...]]) -> str:
    """Return the text of a dvc.lock with these stages and their outputs."""
    blocks = [
        f"  {name}:\n    cmd: python\n    outs:\n"
        + "".join(f"    - path: {path}\n      hash: md5\n      md5: f00d\n" for path in paths)
        for name, paths in stages.items()
    ]
    return "schema: '2.0'\nstages:\n" + "".join(blocks)


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_prune_deletes_exactly_the_results_that_params_yaml_no_longer_has(pruned, caplog, capsys):
    assert cli.main(["plan"]) == 0
    assert caplog.messages == [
        "params.yaml no longer has old-1, base-9, sizes-003-1, build/env/old_ball and 4 more, but "
        "results/ or dvc.lock still has their results; `pipeline plan --prune` deletes the "
        "results, and removes the runs from MLflow's tables."
    ]
    assert set(sum(GONE.values(), ())) <= files_below(pruned), "a plan deletes nothing"
    capsys.readouterr()
    assert cli.main(["plan", "--prune"]) == 0
    assert capsys.readouterr().out.startswith("Deleted results: 9; stages of dvc.lock: 9; ")
    kept = {"dvc.lock", "params.yaml", "trainer.yaml", "workflow/runs.yaml", *OURS}
    assert files_below(pruned) == kept | set(sum(MADE.values(), ()))
    assert not Path("results/train/old").exists()
    assert not Path("results/train/sizes/003").exists()
    assert Path("dvc.lock").read_text() == locked(MADE)
    for without in ("", "results", "dvc.lock"):
        if without == "results":
            shutil.rmtree(without)
        elif without:
            Path(without).unlink()
        caplog.clear()
        assert cli.main(["plan"]) == 0
        assert caplog.messages == []


def test_plan_with_prune_removes_stages_that_only_dvc_lock_contains(pruned, caplog):
    for path in sum(GONE.values(), ()):
        Path(path).unlink()
    shutil.rmtree("results/train/old")
    assert cli.main(["plan"]) == 0
    assert "no longer has old-1, base-9, sizes-003-1, build/env/old_ball and 4 more" in caplog.text
    Path("dvc.lock").write_text(locked(GONE))
    assert cli.main(["plan", "--prune"]) == 0
    assert not Path("dvc.lock").exists()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("experiments:\n\tbase: {}\n", 2),
        ("experiments:\n  base:\n\t  seeds: [1]\n", 3),
        ("experiments:\n  base:\n    seeds:\n\t- 1\n", 4),
        ("\texperiments: {}\n", 1),
        ("experiments:\t{}\n", 1),
    ],
)
def test_tab_in_params_yaml_is_reported_with_its_line(project: Path, text: str, line: int):
    """Regression: the message was "found character '\\t' that cannot start any token"."""
    project.write_text(text)
    assert refusal(SettingsError, load_params, project) == (
        f"{project}:{line}: this line has a tab, where YAML allows only spaces; use spaces."
    )


def test_tabs_in_comments_of_params_yaml_are_allowed(project: Path):
    described(project, "  few: [base]\n", "  few: [base]  # a\tb\n")
    assert list(load_params(project).subsets) == ["few"]


SHARED = {
    "alias": "overrides: *o\n    seeds: [1]",
    "merge": "<<: *b\n    seeds: [2]",
}


@pytest.mark.parametrize("form", SHARED)
def test_yaml_alias_shared_by_two_experiments_logs_a_warning(project, tmp_path, caplog, form):
    """Regression: `dvc exp run -S experiments.other...` silently changed both experiments."""
    text = PARAMS.replace("  base:\n", "  base: &b\n").replace("overrides: {", "overrides: &o {")
    first = text.partition("experiments:\n  base: &b\n")[2].partition("sweeps:")[0]
    other = first.replace("overrides: &o {behaviors: {Ball: {max_steps: 5}}}\n    seeds: [1]", "@")
    assert other.count("@") == 1
    second = "  other:\n" + (
        other.replace("@", SHARED[form]) if form == "alias" else f"    {SHARED[form]}\n"
    )
    project.write_text(text.replace("sweeps:\n", f"{second}sweeps:\n"))
    write_plan(load_params(project), tmp_path / "runs.yaml")
    (line,) = caplog.messages
    key, name = (
        ("overrides", "experiments.base.overrides")
        if form == "alias"
        else ("<<", "experiments.base")
    )
    number = next(n for n, row in enumerate(project.read_text().splitlines(), 1) if "*" in row)
    assert line == (
        f"{project}:{number}: experiments.other.{key} is an alias of the map {name}, so "
        "`dvc exp run -S` changes both maps; write the map out twice if the copies may differ."
    )
    loaded = YAML().load(project.read_text())  # as DVC does
    loaded["experiments"]["other"]["overrides"]["behaviors"]["Ball"]["max_steps"] = 9
    assert loaded["experiments"]["base"]["overrides"]["behaviors"]["Ball"]["max_steps"] == 9


FUTURE = (
    *("constraints.txt", "trainer.yaml", "config/other.yaml", "data/demos/expert.demo"),
    *("results/train/base/seed1/policy.pt", "builds/game/level", "workflow/code/train.txt"),
)


@pytest.mark.parametrize("place", FUTURE)
def test_file_with_a_modification_time_in_the_future_is_refused_before_snakemake_runs(
    project: Path, monkeypatch, place: str
):
    """Regression: Snakemake ran each job to its end, and then deleted its outputs."""
    monkeypatch.chdir(project.parent)
    described(project, "  cart:\n", "  game: {source: path, path: builds/game}\n  cart:\n")
    for name in FUTURE[2:] + FUTURE[:1]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    params = load_params(Path("params.yaml"))
    write_plan(params)
    refuse_files_of_the_future(params)
    os.utime(place, (time.time() + 1e6, time.time() + 1e6))
    error = refusal(StageError, refuse_files_of_the_future, params)
    assert error.startswith(f"{place}: is dated in the future, so each job of Snakemake")
    assert refusal(StageError, doctor.CHECKS["project"], Path()) == error
    for words in (["run"], ["run", "base"]):
        assert cli.main(words) == StageError.exit_code
    command = error.partition("`")[2].partition("`")[0]
    program, *names = shlex.split(command)
    assert program == "touch"
    for name in names:
        Path(name).touch()
    refuse_files_of_the_future(params)
