from __future__ import annotations

import re
from pathlib import Path

import networkx as nx
import pytest
from dags import CHECK, Node, differences, dvc_nodes, plain_command, snakemake_nodes
from project import copy_project

ROOT = Path(__file__).resolve().parents[2]


def test_both_engines_describe_the_same_dag():
    dvc = dvc_nodes(ROOT)
    assert "train@balance_ball_ppo-1" in {node.name for node in dvc}
    assert differences(dvc, snakemake_nodes(ROOT), ROOT) == []


@pytest.mark.filterwarnings("ignore:_NoneStep:DeprecationWarning")  # of DVC's pygtrie
def test_dvc_checks_before_it_runs_any_other_stage():
    """As the Snakefile does when it is read, so that this is a stage for DVC alone."""
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        before = {
            stage.addressing: {one.addressing for one in nx.descendants(repo.index.graph, stage)}
            for stage in repo.index.stages
        }
    assert before.pop(CHECK) == set()
    assert [name for name, needed in before.items() if CHECK not in needed] == []
    rules = (ROOT / "workflow/rules/common.smk").read_text()
    assert "\n        check_params(PARAMS)" in rules


def test_a_folder_dependency_stands_for_what_others_write_into_it(tmp_path: Path):
    make = Node("make", {"results/a/x.json", "results/a/y.json"}, set())
    folder = Node("sum", {"total"}, {"results/a"})
    files = Node("sum", {"total"}, {"results/a/x.json", "results/a/y.json"})
    fewer = Node("sum", {"total"}, {"results/a/x.json"})
    assert differences([make, folder], [make, files], tmp_path) == []
    assert len(differences([make, folder], [make, fewer], tmp_path)) == 1


def test_the_log_redirection_is_not_part_of_the_command():
    assert plain_command("python a.py 1  > logs/a.log 2>&1") == "python a.py 1"
    assert plain_command("python a.py --out=x") == "python a.py --out=x"


DVC_TRAIN = r"(  train:\n(?:.*\n)*?)"
DRIFTS = {
    "dvc drops a dependency": (
        "dvc.yaml",
        DVC_TRAIN + r"        - workflow/code/train.txt\n",
        r"\1",
    ),
    "dvc drops the environment": (
        "dvc.yaml",
        DVC_TRAIN + r"        - build/env/\$\{item.environment\}\n",
        r"\1",
    ),
    "dvc widens params": (
        "dvc.yaml",
        DVC_TRAIN + r"(        - experiments.\$\{item.base\}).overrides\n",
        r"\1\2\n",
    ),
    "dvc narrows params": ("dvc.yaml", DVC_TRAIN + r"        - runtime\n", r"\1"),
    "dvc adds a flag": ("dvc.yaml", r"(train\.py .*)(--seed)", r"\1--fast \2"),
    "dvc drops a metric": (
        "dvc.yaml",
        r"      metrics:\n        - results/demos/\$\{key\}.json: \{cache: false\}\n",
        "",
    ),
    "dvc renames a stage": ("dvc.yaml", r"\n  evaluate:\n", "\n  assess:\n"),
    "dvc renames an output": ("dvc.yaml", r"returns\.png", "episodes.png"),
    "snakemake drops a dependency": ("workflow/rules/training.smk", r'SOURCES\["train"\]', "[]"),
    "snakemake narrows params": (
        "workflow/rules/training.smk",
        r'(overrides",\n) +"runtime",\n',
        r"\1",
    ),
    "snakemake adds a flag": ("workflow/rules/results.smk", r"(report\.py) >", r"\1 --quick >"),
    "snakemake renames a rule": ("workflow/rules/results.smk", "rule export:", "rule exports:"),
    "snakemake reads another table": (
        "workflow/rules/results.smk",
        r'experiment=one_of\(experiments\("evaluate"\)\)',
        'experiment=one_of(experiments("train_pretrained"))',
    ),
}


@pytest.fixture(scope="module")
def described(tmp_path_factory) -> tuple[Path, list[Node], list[Node]]:
    """A copy of the project, and what the engines say of it before anything drifts."""
    root = copy_project(tmp_path_factory.mktemp("parity") / "project")
    nodes = dvc_nodes(root), snakemake_nodes(root)
    assert differences(*nodes, root) == []
    return root, *nodes


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS)
def test_a_drift_between_the_engines_is_caught(drift: str, described):
    root, by_dvc, by_snakemake = described
    name, pattern, new = DRIFTS[drift]
    text = (root / name).read_text()
    changed, count = re.subn(pattern, new, text, count=1)
    assert count == 1, "the seeded drift does not fit the file any more"
    assert changed != text
    (root / name).write_text(changed)
    try:
        if name == "dvc.yaml":
            by_dvc = dvc_nodes(root)
        else:
            by_snakemake = snakemake_nodes(root)
        found = differences(by_dvc, by_snakemake, root)
    except Exception as error:  # noqa: BLE001  # an invalid description is caught too
        found = [str(error)]
    finally:
        (root / name).write_text(text)
    assert found
