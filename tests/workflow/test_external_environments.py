"""Third-party environments in the DAG: made by both engines, and used for training."""

import csv
import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from made_archives import digest
from project import commit, run, set_params, tiny

pytestmark = pytest.mark.usefixtures("private_cache")

ROOMS = Path(__file__).resolve().parents[2] / "examples/environments/rooms.py"
SMALL = {
    "behaviors.3DBall.max_steps": 600,
    "behaviors.3DBall.summary_freq": 200,
    "behaviors.3DBall.hyperparameters.buffer_size": 200,
    "behaviors.3DBall.hyperparameters.batch_size": 50,
}
EDITOR = """\
#!{python}
import pathlib, shutil, sys
value = lambda name: sys.argv[sys.argv.index(name) + 1]
print("Unity Editor version:    2022.3.10f1")
shutil.copy("{player}", value("-pipelineOutput") + ".x86_64")
"""


@pytest.fixture(scope="module")
def player(packed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed simulator."""
    return packed("balance_ball", tmp_path_factory.mktemp("player") / "ball")


def archive_of(player: Path, tmp_path: Path) -> bytes:
    """Return a zip archive without file permissions, as a game team would upload it."""
    path = tmp_path / "ball.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("Ball/Ball.x86_64"), player.read_bytes())
        archive.writestr(zipfile.ZipInfo("Ball/readme.txt"), b"A ball.\n")
    return path.read_bytes()


def unity_project(folder: Path) -> Path:
    for name in ("Assets", "Packages", "ProjectSettings"):
        (folder / name).mkdir(parents=True)
        (folder / name / "some.asset").write_text(name)
    version = folder / "ProjectSettings/ProjectVersion.txt"
    version.write_text("m_EditorVersion: 2022.3.10f1\n")
    (folder / "Library").mkdir()
    (folder / "Library/changes.with.every.build").touch()
    return folder


def described(project: Path, name: str) -> dict:
    return json.loads((project / "build/env" / name / "environment.json").read_text())


def train(project: Path) -> dict:
    run(project, sys.executable, "workflow/scripts/train.py", "small", "--seed", "1")
    return json.loads((project / "results/train/small/seed1/metrics.json").read_text())


def set_up(root: Path, /, **source: str) -> None:
    """Plan a training of the experiment `small` in the environment `ball` from a source."""
    plain = tiny("plain")["experiments"]["plain"]
    del plain["evaluation"]
    small = plain | {"environment": "ball", "overrides": SMALL, "stages": ["train"]}
    set_params(root, {"environments": {"ball": source}, "experiments": {"small": small}})


@pytest.mark.slow
def test_policy_trains_in_an_executable_that_was_downloaded(project, web, player, tmp_path):
    content = archive_of(player, tmp_path)
    url = web.add("ball.zip", content)
    set_up(project, source="fetch", url=url, sha256=digest(content))
    for _ in range(2):
        run(project, sys.executable, "workflow/scripts/env.py", "ball")
    assert len(web.asked) == 1
    ball = described(project, "ball")
    assert ball == {
        "name": "ball",
        "file": "player/Ball/Ball.x86_64",
        "args": [],
        "source": "fetch",
        "simulator": None,
        "sha256": digest(player.read_bytes()),
        "build_sha256": ball["build_sha256"],
        "archive_sha256": digest(content),
    }
    assert train(project)["3DBall"]["steps"] >= 600


@pytest.mark.slow
def test_unity_project_is_built_by_the_editor(project, player, tmp_path, monkeypatch):
    editor = tmp_path / "Unity"
    editor.write_text(EDITOR.format(python=sys.executable, player=player))
    editor.chmod(0o755)
    monkeypatch.setenv("PIPELINE_UNITY_EDITOR", str(editor))
    unity_project(tmp_path / "My Game")
    set_up(project, source="unity", project="../My Game")
    run(project, sys.executable, "workflow/scripts/env.py", "ball")
    ball = described(project, "ball")
    assert ball["file"] == "player/ball.x86_64"
    assert ball["sha256"] == digest(player.read_bytes()), "that of the simulator that trains above"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dvc", "snakemake"])
def test_environment_is_packed_again_only_if_its_files_have_changed(project, engine):
    build, module = project / "builds/mine", project / "rooms.py"
    (build / "data").mkdir(parents=True)
    (build / "Game.x86_64").write_text("#!/bin/sh\n")
    (build / "data/level").write_text("one")
    shutil.copy(ROOMS, module)
    set_params(
        project,
        "environments:\n  mine:\n    source: path\n    path: builds/mine\n"
        "  own: rooms:Rooms\nexperiments: {}\n",
    )
    if engine == "dvc":
        command = ["dvc", "repro", "env_path@mine", "env_path@own"]
    else:
        command = ["snakemake", "--cores", "1", "build/env/mine", "build/env/own"]
    digests = []
    for text in ("one", "two", "two"):
        if (build / "data/level").read_text() != text:
            (build / "data/level").write_text(text)
            module.write_text(module.read_text().replace("max_step=50", "max_step=60"))
        before = sorted(_stamps(project))
        run(project, *command)
        digests.append([described(project, name)["build_sha256"] for name in ("mine", "own")])
        changed = before != sorted(_stamps(project))
    for first, second, third in zip(*digests, strict=True):
        assert first != second == third
    assert not changed


def _stamps(project: Path) -> list[tuple[str, int]]:
    paths = (project / "results/.work/env").rglob("stage.json")
    return [(str(path), path.stat().st_mtime_ns) for path in paths]


@pytest.mark.slow
def test_policy_trains_and_is_evaluated_in_a_gymnasium_environment(project: Path):
    content = tiny("plain")
    kwargs = {"sutton_barto_reward": True}
    cart = {"source": "gymnasium", "id": "CartPole-v1", "copies": 4, "kwargs": kwargs}
    steps = {"max_steps": 2000, "summary_freq": 1000}
    experiment = content["experiments"]["plain"] | {
        "environment": "cart",
        "trainer": "config/ppo/CartPole.yaml",
        "overrides": {f"behaviors.CartPole-v1.{key}": value for key, value in steps.items()},
    }
    content |= {"environments": {"cart": cart}, "demonstrations": {}}
    set_params(project, content | {"experiments": {"cart_ppo": experiment}})
    commit(project, "bridged")
    run(project, "dvc", "repro")
    cart = described(project, "cart")
    assert (cart["source"], cart["simulator"]) == ("gymnasium", None)
    place = project / "results"
    trained = json.loads((place / "train/cart_ppo/seed1/metrics.json").read_text())
    assert trained["CartPole-v1"]["steps"] >= 2000
    with (place / "evaluate/cart_ppo/seed1/episodes.csv").open(newline="") as file:
        episodes = list(csv.DictReader(file))
    assert len(episodes) == 4
    for episode in episodes:
        # with `sutton_barto_reward`, the reward is -1 for a fall and else 0
        assert float(episode["episode_return"]) == (0 if episode["interrupted"] == "True" else -1)
