"""What each stage declares in dvc.yaml covers what its script really imports."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipeline.stages.sources import closure

ROOT = Path(__file__).resolve().parents[2]
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def declared(name: str) -> dict:
    return STAGES[name].get("do", STAGES[name])


def script(name: str) -> str:
    return declared(name)["cmd"].split()[1]


def imported(name: str) -> set[str]:
    module = f"pipeline.stages.{Path(script(name)).stem}"
    assert f"from {module} import main" in (ROOT / script(name)).read_text()
    return {str(file.relative_to(ROOT)) for file in closure(ROOT / "src", module)}


def covered(file: str, deps: list[str]) -> bool:
    return any(file == dep or file.startswith(f"{dep}/") for dep in deps)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_declares_every_source_that_it_imports(name: str):
    deps = declared(name)["deps"]
    assert script(name) in deps
    assert [file for file in sorted(imported(name)) if not covered(file, deps)] == []


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_declares_no_source_that_it_does_not_import(name: str):
    used = imported(name)
    sources = [dep for dep in declared(name)["deps"] if dep.startswith("src/")]
    if script(name).endswith("/env.py"):  # not imported, but packed into the executable
        sources.remove("src/pipeline/arrays.py")
    assert [dep for dep in sources if not any(covered(file, [dep]) for file in used)] == []


def test_stages_that_use_torch_declare_the_runtime():
    for name in STAGES:
        packages = {Path(file).parts[2] for file in imported(name) if len(Path(file).parts) > 3}
        assert ("runtime" in declared(name)["params"]) == ("nets" in packages), name


def test_the_env_stage_depends_on_the_installed_versions():
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
    found = closure(root, module)
    return {str(p.relative_to(root / "pipeline"))[:-3] for p in found if p.name != "__init__.py"}


def test_lazy_relative_and_named_imports_count(tmp_path: Path):
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


def test_the_start_of_a_module_name_stands_for_the_package(tmp_path: Path):
    root = tree(tmp_path, a="name = f'pipeline.many.{kind}'\n", many__one="", many__two="")
    assert names(root, "pipeline.a") == {"a", "many/one", "many/two"}


def test_imports_for_type_checkers_and_on_demand_do_not_count(tmp_path: Path):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pipeline.b\n"
    root = tree(tmp_path, a=text, b="")
    (root / "pipeline/__init__.py").write_text("def __getattr__(name):\n    import pipeline.b\n")
    assert names(root, "pipeline.a") == {"a"}
