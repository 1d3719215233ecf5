from dataclasses import replace
from pathlib import Path

import pytest
from dags import CHECK, Node, differences, dvc_before, dvc_nodes, snakemake_nodes
from project import ROOT


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
