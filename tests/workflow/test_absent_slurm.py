"""A machine from which SLURM accepts no job, with a substitute for Snakemake's plug-in."""

import sys
from pathlib import Path

import pytest
from only_our_parts import search_path
from project import run, set_params

PLUGIN = """\
from dataclasses import dataclass, field
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

common_settings = CommonSettings(
    non_local_exec=True, implies_no_shared_fs=False, job_deploy_sources=False
)

@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    no_account: bool = field(default=False, metadata={"help": "as of the plug-in"})

class Executor(RemoteExecutor):
    def run_job(self, job):
        self.report_job_error(SubmittedJobInfo(job), msg="submission failed")

    async def check_active_jobs(self, active_jobs):
        yield

    def cancel_jobs(self, active_jobs):
        pass
"""
PARAMS = """\
runtime: {torch_threads: 1, device: cpu}
environments:
  collector: {source: builtin, args: []}
experiments: {}
"""
ANSWERS, FAILS = "exit 0", "echo 'Unable to contact slurm controller' >&2; exit 1"


@pytest.mark.slow
def test_earlier_results_are_kept_if_slurm_commands_are_missing_or_do_not_answer(
    project: Path, tmp_path: Path
):
    set_params(project, PARAMS)
    built, commands = project / "build/env/collector", tmp_path / "commands"
    plugin = tmp_path / "snakemake_executor_plugin_slurm/__init__.py"
    for folder in (built, commands, plugin.parent):
        folder.mkdir(parents=True)
    plugin.write_text(PLUGIN)
    (built / "program").touch()

    def said(**slurm: str) -> str:
        for name, script in slurm.items():
            (commands / name).write_text(f"#!/bin/sh\n{script}\n")
            (commands / name).chmod(0o755)
        path = [str(Path(sys.executable).parent), str(commands), "/usr/bin", "/bin"]
        forced = ("--forcerun", "env", "--", str(built.relative_to(project)))
        more = {"PATH": ":".join(path), "PYTHONPATH": search_path(project / "src", tmp_path)}
        job = run(project, "snakemake", "-e", "slurm", "-j1", *forced, check=False, **more)
        assert job.returncode == 1
        return job.stderr

    assert "SLURM: no sacct in PATH, so nothing was submitted" in said(sbatch=ANSWERS, sinfo=FAILS)
    assert "`sinfo` failed (Unable to contact slurm controller)" in said(sacct=ANSWERS)
    assert (built / "program").is_file()
    assert "submission failed" in said(sinfo=ANSWERS)
    assert not (built / "program").exists(), "Snakemake deletes outputs of failed jobs"
