"""The parts of a release: version, citation, wheel, sdist, Dockerfile and examples."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml
from project import ROOT, run

import pipeline

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
RECIPE = (ROOT / "workflow/Dockerfile").read_text()


def test_version_is_the_same_in_pyproject_citation_changelog_and_git_tag():
    version = pipeline.__version__
    assert PROJECT["tool"]["setuptools_scm"]["fallback_version"] == version
    assert str(CITATION["version"]) == version
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]
    tag = subprocess.run(  # git of this checkout, if it is one
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    assert tag in ("", f"v{version}")


def test_citation_has_the_required_keys_of_its_format():
    """The rules of Citation File Format 1.2.0 for the keys that are used here."""
    assert CITATION["cff-version"] == "1.2.0"
    assert {"authors", "message", "title"} <= set(CITATION)
    known = {"cff-version", "message", "title", "type", "version", "date-released", "license"}
    assert set(CITATION) <= known | {"authors", "keywords", "abstract", "repository-code", "url"}
    assert CITATION["type"] == "software"
    assert CITATION["license"] == PROJECT["project"]["license"]
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", CITATION["date-released"])
    assert all({"name"} == set(author) for author in CITATION["authors"])
    assert len(set(CITATION["keywords"])) == len(CITATION["keywords"])


@pytest.mark.slow
def test_wheel_contains_all_sources_and_wheel_and_sdist_have_the_version(built: Path):
    version = pipeline.__version__
    assert [path.name for path in built.glob("*.tar.gz")] == [f"rl_pipeline-{version}.tar.gz"]
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"rl_pipeline-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"pipeline/py.typed", "pipeline/project/dvc.yaml"} <= names
    sources = {f"pipeline/{path.relative_to(ROOT / 'src/pipeline').as_posix()}"
               for path in (ROOT / "src/pipeline").rglob("*.py")}  # fmt: skip
    assert sources <= names
    assert not [name for name in names if name.startswith(("tests", "docs"))]


@pytest.mark.slow
def test_the_wheel_is_installed_and_its_command_works(built: Path, tmp_path: Path):
    venv.create(tmp_path / "env", system_site_packages=False, symlinks=True, with_pip=False)
    python = tmp_path / "env/bin/python"
    (wheel,) = built.glob("*.whl")
    # the dependencies are taken from the installation that runs the tests
    (packages,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    run(tmp_path, sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps",
        "--no-index", "--disable-pip-version-check", str(wheel))  # fmt: skip
    completed = run(tmp_path, str(tmp_path / "env/bin/pipeline"), "--version", PYTHONPATH="")
    assert completed.stdout == f"pipeline {pipeline.__version__}\n"
    code = "import pipeline; print(pipeline.__file__)"
    location = run(tmp_path, str(python), "-c", code, PYTHONPATH="").stdout
    assert str(packages) in location


def test_dockerfile_copies_existing_files_and_installs_existing_extras():
    instructions = re.sub(r"\\\n", " ", RECIPE)
    lines = [
        text.split() for text in instructions.splitlines() if text and not text.startswith("#")
    ]
    assert lines[0][0] == "FROM"
    assert {words[0] for words in lines} <= {"FROM", "RUN", "WORKDIR", "ARG", "COPY", "ENV"}
    for line in lines:
        if line[0] == "COPY":
            assert [name for name in line[1:-1] if not (ROOT / name).exists()] == []
    for extra in re.findall(r"'\.\[(\w+)\]'", RECIPE):
        assert extra in PROJECT["project"]["optional-dependencies"]


def scripts() -> list[tuple[str, str]]:
    cloud = yaml.safe_load((ROOT / "examples/cloud/skypilot.yaml").read_text())
    named_scripts = [(f"skypilot.{key}", cloud[key]) for key in ("setup", "run")]
    jobs = yaml.safe_load((ROOT / "examples/ci/metrics.yaml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    return named_scripts + [(step["name"], step["run"]) for step in steps if "run" in step]


@pytest.mark.parametrize(("name", "script"), scripts(), ids=lambda value: value[:30].split("\n")[0])
def test_cloud_and_ci_example_scripts_are_valid_bash_and_call_existing_commands(
    name: str, script: str
):
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)  # noqa: S607
    from pipeline.cli.main import COMMANDS

    for command in re.findall(r"^\s*pipeline (\w+)", script, re.MULTILINE):
        assert command in COMMANDS
    for extra in re.findall(r"'\.\[(\w+)\]'", script):
        assert extra in PROJECT["project"]["optional-dependencies"]


@pytest.mark.slow
def test_dvc_prints_the_metrics_table_that_the_ci_example_uses(project: Path):
    metrics = project / "results/report/summary.json"
    run(project, "git", "config", "user.email", "a@b.c")
    for score in ("1.5", "2.5"):
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_text(f'{{"balance_ball_ppo": {{"3DBall": {{"iqm": {score}}}}}}}')
        if score == "1.5":
            run(project, "git", "add", "-f", str(metrics))
            run(project, "git", "-c", "user.name=a", "commit", "-qm", "results")
    text = run(project, "dvc", "metrics", "diff", "--md", "HEAD").stdout
    assert "| results/report/summary.json | balance_ball_ppo.3DBall.iqm | 1.5" in text
    assert run(project, "dvc", "params", "diff", "--md", "HEAD").stdout.count("\n") <= 3
