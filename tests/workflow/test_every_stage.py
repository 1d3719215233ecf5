"""Every kind of stage that params.yaml can define, as both engines describe it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from dags import CHECK, Node, counted_before, differences, dvc_before, dvc_nodes, snakemake_nodes
from project import ROOT, copy_project, set_params

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Described:
    root: Path
    dvc: dict[str, Node]
    snakemake: dict[str, Node]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Described:
    root = copy_project(tmp_path_factory.mktemp("every") / "project")
    for name in ("Assets", "Packages", "ProjectSettings", "Library"):
        (root / "game" / name).mkdir(parents=True)
        (root / "game" / name / "some.asset").write_text(name)
    (root / "game/ProjectSettings/ProjectVersion.txt").write_text("m_EditorVersion: 2022.3.10f1\n")
    (root / "builds/folder/data").mkdir(parents=True)
    for name in ("folder/Game.x86_64", "folder/data/level", "file.x86_64"):
        (root / "builds" / name).write_text("#!/bin/sh\n")
    (root / "my_games").mkdir()
    shutil.copy(ROOT / "examples/environments/rooms.py", root / "my_games")
    (root / "my_env.py").write_text("def make(seed, n_agents): pass\n")
    (root / "data/people").mkdir(parents=True)
    (root / "data/people/ball.demo").write_bytes(b"1")
    set_params(root, (HERE / "every_stage.yaml").read_text())
    by_name = ({node.name: node for node in nodes(root)} for nodes in (dvc_nodes, snakemake_nodes))
    return Described(root, *by_name)


def test_dvc_and_snakemake_describe_every_kind_of_stage_equally(described: Described):
    ours, theirs = list(described.dvc.values()), list(described.snakemake.values())
    assert differences(ours, theirs, described.root) == []


@pytest.mark.parametrize(
    "names",
    [
        "env@fetched env_path@folder env_path@file env_unity@game",
        "env@cart env_path@own env_path@packed env@balance_ball",
        "demos_file@people train@ball-1 train@shared-1",
        "train@rates-002-1 sweep@rates train_chosen@rates_best-12",
        "train@adaptive-001-1 propose@adaptive-002 train_chosen@adaptive-003-1",
    ],
)
def test_every_section_of_params_yaml_becomes_a_stage(names: str, described: Described):
    assert set(names.split()) <= described.dvc.keys()


def test_pipeline_run_counts_the_stages_that_dvc_runs(described: Described):
    before = {name: needed - {CHECK} for name, needed in dvc_before(described.root).items()}
    assert counted_before(described.root) | {CHECK: set()} == before


def test_stages_depend_on_the_builds_and_source_files_that_the_user_provides(described: Described):
    watched = {
        name: {dep for dep in node.deps if dep.startswith(("builds/", "game/", "my_", "data/"))}
        for name, node in described.snakemake.items()
    }
    assert watched["env_path@folder"] == {"builds/folder/Game.x86_64", "builds/folder/data/level"}
    assert watched["env_path@file"] == {"builds/file.x86_64"}
    assert watched["env_path@own"] == {"my_env.py"}
    assert watched["env_path@packed"] == {"my_games/rooms.py"}
    assert len(watched["env_unity@game"]) == 4
    assert not any("Library" in dep for dep in watched["env_unity@game"])
    assert watched["demos_file@people"] == {"data/people/ball.demo"}


def test_videos_are_outputs_of_filmed_evaluations(described: Described):
    outs = described.dvc["evaluate_video@ball-1"].outs
    assert {"median.gif", "best.gif"} <= {Path(out).name for out in outs}


def test_snakemake_jobs_request_the_resources_of_their_experiment_for_each_learner(
    described: Described,
):
    resources = {name: node.asked for name, node in described.snakemake.items()}
    for name in ("train@ball-1", "train@rates-002-1", "train_chosen@rates_best-11"):
        assert resources[name] == {"mem_mb": 1500, "runtime": 30, "gpu": 0}
    assert resources["sweep@rates"]["mem_mb"] != 1500
    assert (
        described.dvc["train@shared-1"].params["runs.train_from_scratch.shared-1"]
        == (described.snakemake["train@shared-1"].params["runs.train_from_scratch.shared-1"])
    )
    assert resources["train@shared-1"] == {"mem_mb": 1400, "runtime": 720, "gpu": 2}
