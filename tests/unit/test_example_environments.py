"""The environments of `examples/environments`, which docs/tutorials/own.md shows."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.specs import ActionTuple
from pipeline.simulators import registry

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/environments"
NAMES = {"docking:Docking": "Docking", "rooms:Rooms": "Rooms"}


@pytest.fixture(autouse=True)
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a copy of the examples, with a separate cache."""
    own = here / "own"
    shutil.copytree(EXAMPLE, own, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(own)
    monkeypatch.syspath_prepend(str(own))
    monkeypatch.setenv("PIPELINE_CACHE", str(here / "cache"))
    return own


@pytest.mark.parametrize("name", ["own.yaml", "docking.py", "rooms.py"])
def test_tutorial_shows_the_example_files_unchanged(name: str):
    page = (ROOT / "docs/tutorials/own.md").read_text()
    assert f"\n{(EXAMPLE / name).read_text().rstrip()}\n```\n" in page


def test_rooms_example_rewards_the_target_temperature_and_ends_episodes_far_from_the_target():
    rooms = registry.make("module", id="rooms:Rooms", seed=1, n_agents=4)
    ((decision, _),) = rooms.reset().values()
    for _ in range(10):
        off, loss = decision.obs[0].T
        heat = np.clip((loss - 5 * off) / 2, -1, 1)[:, None]
        ((decision, _),) = rooms.step({"Rooms?team=0": ActionTuple(continuous=heat)}).values()
    assert decision.reward == pytest.approx(np.ones(4), abs=1e-5)
    full = ActionTuple(continuous=np.ones((4, 1), dtype=np.float32))
    for _ in range(20):
        ((_, terminal),) = rooms.step({"Rooms?team=0": full}).values()
        if len(terminal):
            break
    assert len(terminal) > 0
    assert not terminal.interrupted.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_example_is_built_trained_exported_and_evaluated(name, folder, caplog, printed):
    settings = (folder / "own.yaml").read_text()
    small = settings.replace("50000", "1500").replace("5000", "500").replace("1024", "256")
    (folder / "own.yaml").write_text(small)
    with caplog.at_level("INFO"):
        printed("learn", "own.yaml", "--env", name, "--run-id", "one", "--seed", "1")
        model = f"results/one/{NAMES[name]}.onnx"
        printed("evaluate", model, "--env", name, "--episodes", 2)
    text = caplog.text
    assert text.count(f"{name}: building into build/cache/") == 1
    assert text.count(f"{name}: using the build build/cache/") == 1
    rows = (folder / "results/one/progress.csv").read_text().splitlines()
    assert len(rows) >= 3
