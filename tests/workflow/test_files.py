"""The workflow files: dry run, lint, plan and important settings."""

import re
from pathlib import Path

import yaml
from project import ROOT, run

CONDA = "Specify a conda environment or container for each rule."


def complaints(text: str) -> list[str]:
    """Return Snakemake's lints except the request for conda: `make install` pins all packages."""
    lints = re.findall(r"^    \* (.*?):?$", text, re.MULTILINE)
    return [line for line in lints if not line.startswith(CONDA[:-1])]


def test_snakemake_lint_reports_nothing(project: Path):
    completed = run(project, "snakemake", "--lint", check=False)
    text = completed.stdout + completed.stderr
    assert "Congratulations" in text
    assert complaints(text) == []


def test_filter_for_snakemake_lint_removes_only_the_complaint_about_conda():
    text = "Lints for rule a:\n    * Specify a conda environment or container for each rule.:\n"
    assert complaints(text) == []
    assert complaints(text + "    * No log directive defined:\n") == ["No log directive defined"]


def test_snakemake_and_stages_refuse_a_plan_that_is_out_of_date(project: Path):
    params = project / "params.yaml"
    params.write_text(params.read_text().replace("      - 1\n      - 2\n", "      - 1\n", 1))
    for command in (
        ("snakemake", "-n"),
        ("python", "workflow/scripts/report.py"),
        ("python", "workflow/scripts/train.py", "grid_world_ppo", "--seed", "1"),
        ("python", "-m", "pipeline.cli.main", "plan", "--check"),
    ):
        completed = run(project, *command, check=False)
        assert completed.returncode != 0
        assert "run `pipeline plan`" in " ".join((completed.stdout + completed.stderr).split()), (
            command
        )


def test_error_of_a_stage_names_the_missing_parameter_or_the_missing_input(project: Path):
    for command, message in (
        ("env.py nowhere", "error: params.yaml has no environments.nowhere"),
        ("train.py grid_world_ppo --seed 77", "experiments.grid_world_ppo.seeds"),
        (
            "export.py grid_world_ppo --seed 1",
            "results/train/grid_world_ppo/seed1/policy.pt does not exist",
        ),
    ):
        completed = run(project, "python", *f"workflow/scripts/{command}".split(), check=False)
        assert completed.returncode == 2
        assert completed.stderr.startswith("error: ")
        assert message in completed.stderr


def test_dvc_sends_no_analytics_and_ignores_files_of_snakemake():
    config = (ROOT / ".dvc/config").read_text()
    assert "analytics = false" in config
    assert "check_update = false" in config
    assert {".snakemake_timestamp", "__pycache__"} <= set(
        (ROOT / ".dvcignore").read_text().splitlines()
    )


def test_make_help_lists_every_target():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))
    output = run(ROOT, "make", "--silent", "help").stdout
    assert "run" in targets
    assert set(re.findall(r"^ +make ([\w-]+)", output, re.MULTILINE)) == targets


def test_constraints_txt_pins_every_package_and_contains_no_path_or_url():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "torch==2.13.0" in lines


def test_training_is_retried_by_the_engine_and_not_inside_the_job_of_a_scheduler():
    text = (ROOT / "workflow/rules/training.smk").read_text()
    rules = {part.split(":")[0]: part for part in text.split("\nrule ")[1:]}
    assert [name for name in rules if "retries: RETRIES" in rules[name]] == ["pretrain", "train"]
    for name in ("train_pretrained", "train_chosen"):
        assert f"\nuse rule train as {name} with:\n" in text
    assert "RETRIES = 0 if workflow.remote_exec else 3" in text


def test_metrics_and_curves_are_in_git_and_models_are_not():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    for name in ("train", "pretrain", "evaluate"):
        metrics = stages[name]["do"]["metrics"]
        assert all(entry[path]["cache"] is False for entry in metrics for path in entry)
    for name in ("train", "pretrain"):
        assert all(isinstance(entry, str) for entry in stages[name]["do"]["outs"])
