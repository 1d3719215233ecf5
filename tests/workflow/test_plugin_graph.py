"""A package with a trainer, an encoder and a simulator, through both engines."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from example_plugin_site import EXAMPLE, install
from project import REPRO, commit, copy_project, fast_stages, init_dvc, ran, run, tiny

OWN = ["env corridor", *(f"{stage} plugged --seed 1" for stage in ("train", "export", "evaluate"))]
OTHERS = [
    "env balance_ball",
    *(f"{stage} plain --seed 1" for stage in ("train", "export", "evaluate")),
]

pytestmark = pytest.mark.slow


@pytest.fixture
def plugged(tmp_path: Path) -> Path:
    """A copy of the project with the package next to its sources, without results."""
    root = copy_project(tmp_path / "project")
    content = tiny("plain", demonstrations={})
    content["environments"]["corridor"] = {"source": "builtin"}
    content["experiments"]["plugged"] = content["experiments"]["plain"] | {
        "environment": "corridor",
        "trainer": "config/Corridor.yaml",
        "overrides": {"behaviors.Corridor.max_steps": 1000},
    }
    (root / "params.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    shutil.copy(EXAMPLE / "Corridor.yaml", root / "config/Corridor.yaml")
    install(root / "src", version="1.0")
    plan(root)
    init_dvc(root)
    commit(root, "with a plug-in")
    return root


def plan(root: Path) -> None:
    run(root, "python", "-m", "pipeline.cli.main", "plan")


@pytest.mark.parametrize("engine", REPRO)
def test_new_plugin_version_reruns_only_the_stages_that_use_the_plugin(plugged: Path, engine: str):
    fast_stages(plugged)
    assert ran(plugged, *REPRO[engine]) == sorted([*OWN, *OTHERS, "report"])
    assert ran(plugged, *REPRO[engine]) == []
    install(plugged / "src", version="1.1")
    if engine == "snakemake":
        refused = run(plugged, *REPRO[engine][:3], check=False)
        assert refused.returncode != 0
        assert "run `pipeline plan`" in refused.stdout + refused.stderr
    plan(plugged)
    # DVC stops after a stage with unchanged outputs; a real policy changes, as it names versions
    expected = OWN[:2] if engine == "dvc" else [*OWN, "report"]
    assert ran(plugged, *REPRO[engine]) == sorted(expected)


NETS = """\
from torch import nn


class Encoder(nn.Linear):
    def __init__(self, shape, output):
        super().__init__(*shape, output)
"""


@pytest.mark.parametrize("engine", REPRO)
def test_edited_encoder_file_reruns_only_the_stages_that_use_the_encoder(
    plugged: Path, engine: str
):
    fast_stages(plugged)
    (plugged / "my_nets.py").write_text(NETS)
    params = (plugged / "params.yaml").read_text()
    own = "\n      behaviors.Corridor.network_settings.encoder: my_nets:Encoder"
    params = params.replace("max_steps: 1000", f"max_steps: 1000{own}")
    (plugged / "params.yaml").write_text(params)
    plan(plugged)
    assert ran(plugged, *REPRO[engine]) == sorted([*OWN, *OTHERS, "report"])
    assert ran(plugged, *REPRO[engine]) == []
    (plugged / "my_nets.py").write_text(NETS + "# other\n")
    plan(plugged)
    # DVC stops where a stage makes the bytes of before, as these do
    expected = OWN[1:2] if engine == "dvc" else [*OWN[1:], "report"]
    assert ran(plugged, *REPRO[engine]) == sorted(expected)


def test_provenance_names_the_plugin_version(plugged: Path):
    run(plugged, "dvc", "repro", "evaluate@plugged-1")
    place = plugged / "results"
    assert json.loads((place / "train/plugged/seed1/metrics.json").read_text())["Corridor"]
    completed = run(
        plugged,
        *("python", "-m", "pipeline.cli.main", "provenance", "--json"),
        str(place / "export/plugged/seed1/Corridor.onnx"),
    )
    assert '"example-plugin": "1.0"' in completed.stdout
