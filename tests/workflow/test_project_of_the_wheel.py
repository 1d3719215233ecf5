"""`pipeline init` from a wheel, in an empty folder: both engines run there, and agree."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from only_our_parts import search_path
from project import ROOT, run

SMALL = """overrides:
      behaviors:
        CartPole-v1:
          max_steps: 600
          summary_freq: 300
          hyperparameters:
            buffer_size: 256
"""


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an installation from the wheel of these sources."""
    site = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def called(site: Path, root: Path, *command: str, **more: str) -> str:
    """Run a command with the installed package, and return what it printed."""
    completed = run(root, *command, PYTHONPATH=search_path(site), **more)
    return completed.stdout + completed.stderr


@pytest.mark.slow
def test_project_made_by_an_installed_wheel_runs_with_dvc_and_snakemake(
    installed: Path, tmp_path: Path
):
    def here(*command: str) -> str:
        return called(installed, root, *command)

    root = tmp_path / "my own"
    ours = ("python", "-m", "pipeline")
    called(installed, tmp_path, *ours, "init", root.name, "--gymnasium", "CartPole-v1")
    assert str(ROOT) not in "".join(
        path.read_text() for path in root.rglob("*") if path.is_file() and ".git/" not in str(path)
    )
    text = (root / "params.yaml").read_text().replace("overrides: {}\n", SMALL)
    text = text.replace("      - 2\n      - 3\n", "").replace("episodes: 50", "episodes: 2")
    (root / "params.yaml").write_text(text)
    here(*ours, "plan")
    here("dvc", "repro")
    policy = root / "results/export/cartpole_v1_ppo/seed1/CartPole-v1.onnx"
    first = policy.read_bytes()
    here(*ours, "card", "cartpole_v1_ppo-1", "-o", "card")
    card = (root / "card/README.md").read_text()
    assert "on evaluation episodes" in card
    assert "--env gymnasium:CartPole-v1" in card
    output = here("dvc", "repro")
    assert re.findall("Running stage '(.*)'", output) == ["check"]
    assert "now agrees" in here(*ours, "sync")
    assert "Nothing to be done" in here("snakemake", "--cores", "1")
    for folder in ("results", "build", ".snakemake", "workflow/code"):
        shutil.rmtree(root / folder)
    here("snakemake", "--cores", "1")
    assert policy.read_bytes() == first
    _an_edit_reruns_what_imports_it(installed, root, here)


def _an_edit_reruns_what_imports_it(site: Path, root: Path, call) -> None:
    """The edit stands for a newer version of the package."""
    call("dvc", "commit", "--force")
    edited = site / "pipeline/evaluation/statistics.py"
    edited.write_text(edited.read_text() + "\nEDITED = True\n")
    would = call("snakemake", "-n")
    assert re.search(r"^evaluate +1$", would, re.MULTILINE)
    assert not re.search(r"^train +1$", would, re.MULTILINE)
    ran = re.findall("Running stage '(.*)'", call("dvc", "repro"))
    assert ran[0] == "check"
    assert "evaluate@cartpole_v1_ppo-1" in ran
    assert "train@cartpole_v1_ppo-1" not in ran
    stage = json.loads(
        (root / "results/.work/evaluate/cartpole_v1_ppo/seed1/stage.json").read_text()
    )
    assert os.fspath(site) not in json.dumps(stage["inputs"])
