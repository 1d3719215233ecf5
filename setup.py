"""Let the wheel carry the workflow, of which `pipeline init` makes a project outside a checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = (
    "constraints.txt",
    "dvc.yaml",
    ".dvcignore",
    ".gitignore",
    ".dvc/.gitignore",
    ".dvc/config",
    ".dvc/plots",
    "locks/torch-cpu.txt",
    "locks/torch.txt",
    "locks/train.txt",
    "profiles",
    "workflow/Snakefile",
    "workflow/cluster",
    "workflow/envs",
    "workflow/report",
    "workflow/rules",
    "workflow/scripts",
    "workflow/unity",
)


class BuildWithWorkflow(build_py):
    """Build the package, and put what it needs of the repository into its folder `project`."""

    def run(self) -> None:
        """Copy the Python files first, then the workflow; nothing in an editable installation."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "pipeline/project")
        shutil.rmtree(target, ignore_errors=True)
        for name in CARRIED:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            if Path(name).is_dir():
                shutil.copytree(name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(name, target / name)


setup(cmdclass={"build_py": BuildWithWorkflow})
