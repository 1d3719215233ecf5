"""The files that each stage depends on include all files that its script imports."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml
from project import ROOT

from pipeline.dag import sources
from pipeline.dag.sources import closure
from pipeline.simulators import pack

STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def declared(name: str) -> dict:
    return STAGES[name].get("do", STAGES[name])


def script(name: str) -> str:
    return declared(name)["cmd"].split()[1]


def imported(name: str) -> set[str]:
    stage = Path(script(name)).stem
    assert f'    stage("{stage}")\n' in (ROOT / script(name)).read_text()
    module = f"pipeline.dag.stages.{stage}"
    return {str(file.relative_to(ROOT)) for file in closure(ROOT / "src", module)}


@pytest.mark.parametrize("name", STAGES)
def test_dvc_stage_depends_on_the_source_record_of_its_own_script(name: str):
    code = [dep for dep in declared(name)["deps"] if dep.startswith("workflow/code/")]
    if name == "check":
        assert {"src/pipeline", "workflow/scripts"} <= set(declared(name)["deps"])
    else:
        assert code == [f"workflow/code/{Path(script(name)).stem}.txt"]


@pytest.mark.parametrize("stage", sources.stages(ROOT))
def test_stage_depends_on_its_script_and_on_every_file_that_the_script_imports(stage: str):
    files = sources.watched(ROOT, stage)
    assert {f"workflow/scripts/{stage}.py", "workflow/scripts/_start.py"} <= set(files)
    module = f"pipeline.dag.stages.{stage}"
    assert {str(file.relative_to(ROOT)) for file in closure(ROOT / "src", module)} <= set(files)


def test_a_stage_depends_on_whole_packages_but_not_on_other_stages():
    files = sources.watched(ROOT, "train")
    for package in ("algos", "nets", "core", "wire", "demos", "tracking"):
        inside = (ROOT / "src/pipeline" / package).rglob("*.p[yr]*")
        assert {str(path.relative_to(ROOT)) for path in inside if path.suffix != ".pyc"} <= set(
            files
        )
    assert "src/pipeline/dag/stages/report.py" not in files
    assert not [path for path in files if path.startswith("src/pipeline/evaluation")]
    assert "src/pipeline/dag/reporting/report.html.j2" in sources.watched(ROOT, "report")


def test_stage_env_depends_on_all_sources_that_are_packed_into_executables():
    packed = {f"{name}.py" for name in pack._MODULES} | {f"{f}/__init__.py" for f in pack._FOLDERS}
    files = set(sources.watched(ROOT, "env"))
    assert {f"src/pipeline/{name}" for name in packed} <= files
    assert "src/pipeline/envs/unity.py" not in files, "would build Unity projects again"


def test_source_record_of_a_stage_changes_only_with_the_sources_of_that_stage(tmp_path: Path):
    (tmp_path / "workflow/scripts").mkdir(parents=True)
    src = tree(tmp_path / "src", dag__stages__env="import pipeline.a.b\n", a__b="", a__c="", d="")
    path = tmp_path / sources.CODE / "env.txt"

    def noted() -> str:
        sources.note(tmp_path, "env")
        return path.read_text()

    before = noted()
    (src / "pipeline/d.py").write_text("VALUE = 1\n")
    assert noted() == before
    (src / "pipeline/a/c.py").write_text("VALUE = 1\n")
    assert noted() != before


def test_dvc_stages_that_import_networks_depend_on_the_runtime_parameters():
    for name in STAGES:
        packages = {Path(file).parts[2] for file in imported(name) if len(Path(file).parts) > 3}
        assert ("runtime" in declared(name).get("params", [])) == ("nets" in packages), name


def test_stage_env_depends_on_the_file_that_pins_package_versions():
    for name in ("env", "env_path", "env_unity"):
        assert "constraints.txt" in declared(name)["deps"]


def tree(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "pipeline" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in [root / "pipeline", *(p for p in (root / "pipeline").rglob("*") if p.is_dir())]:
        (folder / "__init__.py").touch()
    return root


def names(root: Path, module: str) -> set[str]:
    paths = closure(root, module)
    return {str(p.relative_to(root / "pipeline"))[:-3] for p in paths if p.name != "__init__.py"}


def test_imports_in_functions_relative_imports_and_module_names_in_strings_are_dependencies(
    tmp_path: Path,
):
    root = tree(
        tmp_path,
        a="def f():\n    import pipeline.b\n",
        b="from pipeline import c\nfrom pipeline.d.e import thing\n",
        c="ENTRY = 'pipeline.f:Class'\n",
        d__e="from . import g\nfrom ..h import x\n",
        d__g="",
        f="",
        h="",
        unused="",
    )
    assert names(root, "pipeline.a") == {"a", "b", "c", "d/e", "d/g", "f", "h"}


def test_string_that_begins_with_a_package_name_adds_the_whole_package_to_the_dependencies(
    tmp_path: Path,
):
    root = tree(tmp_path, a="name = f'pipeline.many.{kind}'\n", many__one="", many__two="")
    assert names(root, "pipeline.a") == {"a", "many/one", "many/two"}


def test_imports_under_type_checking_and_in_module_getattr_do_not_count_as_dependencies(
    tmp_path: Path,
):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipeline.b\n"
    root = tree(tmp_path, a=text, b="")
    (root / "pipeline/__init__.py").write_text("def __getattr__(name):\n    import pipeline.b\n")
    assert names(root, "pipeline.a") == {"a"}


def test_file_names_of_test_modules_outside_of_packages_are_unique():
    """pytest takes two files of one name for the same module, and refuses the second file."""
    names = Counter(
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    )
    assert [name for name, n in names.items() if n > 1] == []
