import re
from dataclasses import replace
from pathlib import Path

import pytest
from dags import CHECK, Node, differences, dvc_before, dvc_nodes, snakemake_nodes
from project import ROOT, copy_project


def test_dvc_and_snakemake_describe_the_same_dag():
    dvc = dvc_nodes(ROOT)
    (train,) = (node for node in dvc if node.name == "train@collector_ppo-1")
    assert train.cmd == "python workflow/scripts/train.py collector_ppo --seed 1"
    assert "results/train/collector_ppo/seed1/policy.pt" in train.outs
    assert {"build/env/collector", "src/pipeline/algos/ppo.py"} <= train.deps
    assert "runtime" in train.params
    assert differences(dvc, snakemake_nodes(ROOT), ROOT) == []


def test_dvc_runs_the_stage_check_before_all_other_stages():
    """The Snakefile makes the same check when it is read, so only DVC has a stage for it."""
    before = dvc_before(ROOT)
    assert before.pop(CHECK) == set()
    assert [name for name, needed in before.items() if CHECK not in needed] == []
    rules = (ROOT / "workflow/rules/common.smk").read_text()
    assert "\n        check_params(PARAMS)" in rules


def test_dependency_on_a_folder_equals_dependencies_on_all_outputs_that_stages_write_there(
    tmp_path: Path,
):
    make = Node("make", {"results/a/x.json", "results/a/y.json"}, set())
    folder = Node("sum", {"total"}, {"results/a"})
    files = Node("sum", {"total"}, {"results/a/x.json", "results/a/y.json"})
    fewer = Node("sum", {"total"}, {"results/a/x.json"})
    assert differences([make, folder], [make, files], tmp_path) == []
    assert len(differences([make, folder], [make, fewer], tmp_path)) == 1


TRAIN = Node("train", {"policy.pt"}, {"build"}, {"seed": 1}, "python train.py")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "trains"}, ["train: only in dvc.yaml", "trains: only in the Snakefile"]),
        (
            {"outs": {"policy.pt", "a.json"}},
            ["train: outs: only in dvc.yaml [], only in the Snakefile ['a.json']"],
        ),
        ({"deps": set()}, ["train: deps: only in dvc.yaml ['build'], only in the Snakefile []"]),
        ({"params": {}}, ["train: params: {'seed': 1} != {}"]),
        (
            {"cmd": "python train.py --quick"},
            ["train: cmd: 'python train.py' != 'python train.py --quick'"],
        ),
    ],
)
def test_difference_between_the_stages_of_dvc_and_snakemake_is_reported(change, said, tmp_path):
    assert differences([TRAIN], [replace(TRAIN, **change)], tmp_path) == said


DVC_TRAIN = r"(  train:\n(?:.*\n)*?)"
DRIFTS = {  # file, pattern, its replacement, and the reported difference
    "dvc drops the environment": (
        "dvc.yaml",
        DVC_TRAIN + r"        - build/env/\$\{item.environment\}\n",
        r"\1",
        "train@.*: deps: .*only in the Snakefile .*'build/env/grid_world'",
    ),
    "dvc drops a metric": (
        "dvc.yaml",
        r"      metrics:\n        - results/demos/\$\{key\}.json: \{cache: false\}\n",
        "",
        r"demos@.*: outs: only in dvc.yaml \[\], only in the Snakefile \['results/demos/.*.json'\]",
    ),
    "snakemake narrows params": (
        "workflow/rules/training.smk",
        r'(overrides",\n) +"runtime",\n',
        r"\1",
        "(train|pretrain)@.*: params: .*'runtime'.* != (?:(?!'runtime').)*$",
    ),
    "snakemake adds a flag": (
        "workflow/rules/results.smk",
        r"(report\.py) >",
        r"\1 --quick >",
        "report: cmd: .* != '.* --quick'",
    ),
    "snakemake renames a rule": (
        "workflow/rules/results.smk",
        "rule export:",
        "rule exports:",
        "exports@grid_world_ppo-1: only in the Snakefile",
    ),
}
ANOTHER_TABLE = (
    "workflow/rules/results.smk",
    r'experiment=one_of\(experiments\("evaluate"\)\)',
    'experiment=one_of(experiments("train_pretrained"))',
)


def change(root: Path, name: str, pattern: str, new: str) -> None:
    text = (root / name).read_text()
    changed, count = re.subn(pattern, new, text, count=1)
    assert count == 1, f"{pattern} does not fit {name} any more"
    assert changed != text
    (root / name).write_text(changed)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> str:
    """The differences after all changes of `DRIFTS`, one line each."""
    root = copy_project(tmp_path_factory.mktemp("parity") / "project")
    by_dvc, by_snakemake = dvc_nodes(root), snakemake_nodes(root)
    assert differences(by_dvc, by_snakemake, root) == []
    for *drift, _ in DRIFTS.values():
        change(root, *drift)
    drifted = differences(dvc_nodes(root), by_snakemake, root)
    return "\n".join([*drifted, *differences(by_dvc, snakemake_nodes(root), root)])


@pytest.mark.slow
@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_between_the_files_of_dvc_and_snakemake_is_reported(drift: str, found: str):
    assert re.search(f"^{DRIFTS[drift][-1]}", found, re.MULTILINE)


@pytest.mark.slow
def test_snakemake_rule_that_reads_the_wrong_table_of_runs_fails_with_missing_inputs(project: Path):
    change(project, *ANOTHER_TABLE)
    with pytest.raises(Exception, match="Missing input files for rule report"):
        snakemake_nodes(project)
