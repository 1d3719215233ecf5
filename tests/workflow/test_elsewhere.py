"""The workflow for a project outside of the checkout: by `--config`, and as a module."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from project import ROOT, run, tiny

SNAKEFILE = f"""\
module agents:
    snakefile: "{ROOT}/workflow/Snakefile"
    config: config


use rule * from agents
"""
COMMAND = ("snakemake", "--cores", "1", "--snakefile")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A project that has its own parameters and trainer file, and no code."""
    folder = tmp_path / "my project"
    folder.mkdir()
    content = tiny("plain", demonstrations={})
    content["environments"] = {"grid_world": {"source": "builtin", "args": []}}
    mine = {"environment": "grid_world", "trainer": "GridWorld.yaml", "overrides": {}}
    content["experiments"] = {"mine": content["experiments"]["plain"] | mine}
    (folder / "params.yaml").write_text(yaml.safe_dump(content))
    shutil.copy(ROOT / "config/ppo/GridWorld.yaml", folder)
    return folder


def planned(text: str) -> set[str]:
    """Return the rules in the first table of jobs of a dry run."""
    return set(re.findall(r"^(\w+) +1$", text, re.MULTILINE)) - {"total"}


@pytest.mark.parametrize(
    "given", [("--config", "params=my project/params.yaml"), ("--configfile", "where.yaml")]
)
def test_snakemake_option_config_or_configfile_gives_the_path_of_params_yaml(
    given: tuple[str, ...], elsewhere: Path
):
    file = elsewhere.parent / "where.yaml"
    file.write_text(yaml.safe_dump({"params": str(elsewhere / "params.yaml")}))
    completed = run(elsewhere.parent, *COMMAND, str(ROOT / "Snakefile"), "-n", *given)
    rules = {"env", "train", "export", "evaluate", "report", "everything"}
    assert planned(completed.stdout) == rules


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["seed=1"], "take only `params`, which says where params.yaml lies, and not seed"),
        (["params=other.yaml"], "must be called params.yaml"),
        (["params=nowhere/params.yaml"], "nowhere/params.yaml"),
        (["params={here}/params.yaml", "--directory", str(ROOT)], "name different folders"),
    ],
)
def test_snakefile_refuses_config_values_other_than_a_valid_path_of_params_yaml(
    given, said, elsewhere
):
    command = (*COMMAND, str(ROOT / "Snakefile"), "-n", "--config")
    given = [word.format(here=elsewhere) for word in given]
    completed = run(elsewhere, *command, *given, check=False)
    assert completed.returncode != 0
    assert said in completed.stdout + completed.stderr


def test_files_that_the_snakemake_catalog_requires_exist():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["software-stack-deployment"]["conda"] is True
    assert (ROOT / "workflow/Snakefile").is_file()
    assert (ROOT / "config/README.md").is_file()


@pytest.mark.slow
def test_workflow_used_as_a_snakemake_module_writes_only_into_the_project_that_uses_it(
    elsewhere: Path,
):
    (elsewhere / "Snakefile").write_text(SNAKEFILE)
    command = (*COMMAND, "Snakefile", "build/env/grid_world")
    run(elsewhere, *command)
    assert (elsewhere / "build/env/grid_world/environment.json").is_file()
    assert (elsewhere / "results/.work/env/grid_world/attempt.json").is_file()
    assert [path.name for path in (elsewhere / "workflow").iterdir()] == ["code"]
    second_run = run(elsewhere, *command)
    assert "Nothing to be done" in second_run.stdout + second_run.stderr
