"""`pipeline claims`: claims of real trainings, checked after each kind of change."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from interpreter import python
from small_project import left, params_of

from pipeline.cli.main import main
from pipeline.dag import engines, run_context, sources
from pipeline.dag.project import checkout
from pipeline.dag.reporting import claims
from pipeline.dag.stages import env, evaluate, export, report, train
from pipeline.errors import SettingsError
from pipeline.evaluation.comparison import compare
from pipeline.settings.project.claims import CLAIMS, LOCK, load_claims
from pipeline.settings.project.params import load_params

TRAINER = """
behaviors:
  3DBall:
    trainer_type: ppo
    max_steps: 1500
    summary_freq: 500
    hyperparameters: {batch_size: 100, buffer_size: 500, learning_rate: 0.003, num_epoch: 2}
    network_settings: {hidden_units: 8, num_layers: 1}
"""


def experiment(*seeds: int, **overrides: float) -> dict[str, object]:
    rate = {f"behaviors.3DBall.hyperparameters.{key}": value for key, value in overrides.items()}
    return {
        "environment": "ball",
        "trainer": "t.yaml",
        "overrides": rate,
        "seeds": [*seeds],
        "stages": ["train", "export", "evaluate"],
        "evaluation": {"episodes": 2, "seed": 9},
    }


class Project:
    """A project whose stages run in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def params(self, ppo: object, **runtime: str) -> None:
        written = {
            "runtime": {"torch_threads": 1} | runtime,
            "environments": {"ball": {"source": "builtin", "name": "balance_ball"}},
            "experiments": {"ppo": ppo, "other": experiment(1, learning_rate=1e-6)},
        }
        (self.root / "t.yaml").write_text(TRAINER)
        (self.root / "params.yaml").write_text(yaml.safe_dump(written, sort_keys=False))

    def run(self, name: str, *seeds: int) -> None:
        if not (self.root / "build").exists():
            env.build("ball", self.root)
        for seed in seeds:
            for stage in (train.train, export.export, evaluate.evaluate):
                stage(run_context.find(self.root, name, seed))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two experiments with results, a claim of each kind, and their records."""
    root = tmp_path_factory.mktemp("original")
    project = Project(root)
    project.params(experiment(1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_PROJECT", str(root))
        patch.setenv("PIPELINE_MLFLOW", "off")
        patch.chdir(root)
        project.run("ppo", 1, 2)
        project.run("other", 1)
        assert main(["claims", "write"]) == 0
        written = yaml.safe_load((root / CLAIMS).read_text())
        written["ppo_iqm"]["tolerance"] = 1000  # two seeds give no interval
        written["ppo_mean"] = written["ppo_iqm"] | {"metric": "mean"}
        written["ppo_wins"] = {"experiment": "ppo", "better_than": "other", "probability": 0.0}
        (root / CLAIMS).write_text(yaml.safe_dump(written, sort_keys=False))
        yield root


@pytest.fixture
def project(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    root = shutil.copytree(original, tmp_path / "project")
    monkeypatch.chdir(root)
    monkeypatch.setenv("PIPELINE_PROJECT", str(root))
    return Project(root)


def checked(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert main(["claims", "check", "--json"]) == code
    return {one["claim"]: one for one in json.loads(capsys.readouterr().out)}


def verdicts(found: dict[str, dict[str, object]]) -> dict[str, object]:
    return {name: one["answer"] for name, one in found.items()}


@pytest.mark.slow
def test_claims_are_identical_after_the_same_training_is_repeated(project, capsys):
    shutil.rmtree(project.root / "results/train/ppo/seed2")
    shutil.rmtree(project.root / "results/evaluate/ppo/seed2")
    shutil.rmtree(project.root / "results/.work")
    project.run("ppo", 2)
    found = checked(capsys, 0)
    assert set(verdicts(found).values()) == {"identical"}
    assert [*found] == ["ppo_iqm", "other_iqm", "ppo_mean", "ppo_wins"]
    assert {str(one["cause"]) for one in found.values()} == {"[]"}


CHANGED = dict.fromkeys(("ppo_iqm", "ppo_mean", "ppo_wins"), "reproduced")
CHANGED |= {"other_iqm": "identical"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ppo", "seeds", "head", "end"),
    [
        # in any order of seeds, only the replaced one is a cause
        (experiment(3, 1), [3], "with seed 3: seed of train", "  seed: 2, 3"),
        (
            experiment(1, 2, learning_rate=0.002),
            [1, 2],
            "with seed 1: parameters of train",
            "hyperparameters.learning_rate: 0.003, 0.002",
        ),
    ],
)
def test_another_seed_or_learning_rate_is_named_as_the_cause_of_a_difference(
    ppo, seeds, head, end, project, capsys
):
    project.params(ppo)
    project.run("ppo", *seeds)
    found = checked(capsys, 0)
    assert verdicts(found) == CHANGED
    first, second = found["ppo_mean"]["cause"][:2]
    assert first == f"first cause, {head}"
    assert second.endswith(end)


@pytest.mark.slow
def test_claimed_interval_of_trainings_is_compared_with_the_interval_of_present_trainings(
    project, capsys
):
    """Three seeds give an interval; with another learning rate it overlaps, or the claim fails."""
    project.params(experiment(1, 2, 3))
    project.run("ppo", 3)
    assert main(["claims", "write", "ppo"]) == 0
    written = yaml.safe_load((project.root / CLAIMS).read_text())
    first, last = written["ppo_iqm"]["interval"]
    assert checked(capsys, 0)["ppo_iqm"]["answer"] == "identical"
    project.params(experiment(1, 2, 3, learning_rate=0.002))
    project.run("ppo", 1, 2, 3)
    outcomes = report.results.outcomes(project.root, load_params(project.root / "params.yaml"))
    (task,) = compare(one for one in outcomes if one.experiment == "ppo")
    low, high = task.standings[0].interval
    overlaps = low <= last * (1 + 1e-5) and high >= first * (1 - 1e-5)
    found = checked(capsys, 0 if overlaps else 1)
    assert found["ppo_iqm"]["answer"] == ("reproduced" if overlaps else "not")
    for shift, answer in ((0.0, "reproduced"), (2.0, "not")):  # in widths of the present interval
        middle = (low + high) / 2 + shift * (high - low)
        width = (high - low) / 2
        written["ppo_iqm"] |= {"value": middle, "interval": [middle - width, middle + width]}
        (project.root / CLAIMS).write_text(yaml.safe_dump(written))
        found = checked(capsys, 1 if answer == "not" else 0)
        assert found["ppo_iqm"]["answer"] == answer
        head, line = found["ppo_iqm"]["cause"][:2]
        assert head == "first cause, with seed 1: parameters of train"
        assert line.endswith("hyperparameters.learning_rate: 0.003, 0.002")


@pytest.mark.slow
def test_portable_mode_is_named_as_the_cause_of_a_difference(project, capsys):
    project.params(experiment(1, 2), deterministic="portable")
    for seed in ("1", "2"):
        for stage in ("train", "export", "evaluate"):
            # A process of its own, because the libraries read the setting when they are loaded.
            python("-m", "pipeline.dag", stage, "ppo", "--seed", seed, cwd=project.root)
    found = checked(capsys, 0)
    assert verdicts(found) == CHANGED
    assert found["ppo_mean"]["cause"][:2] == [
        "first cause, with seed 1: parameters of train",
        '  runtime.deterministic: absent, "portable"',
    ]


@pytest.mark.slow
def test_another_machine_is_named_as_the_cause_of_a_difference(project, capsys):
    recorded = json.loads((project.root / LOCK).read_text())
    for shared in recorded[claims._FORMAT].values():
        if "processor" in shared:
            shared["processor"] = "x86_64 another"
    # The digest of one file, as if the other processor had made other numbers.
    (path,) = (path for path in recorded["runs"]["ppo"]["1"]["files"] if "episodes" in path)
    recorded["runs"]["ppo"]["1"]["files"][path] = "0"
    (project.root / LOCK).write_text(json.dumps(recorded))
    found = checked(capsys, 0)
    assert found["other_iqm"]["answer"] == "identical"
    head, line = found["ppo_iqm"]["cause"]
    assert head == "first cause, with seed 1: machine of train"
    assert line.startswith('  processor: "x86_64 another", "')


# Files like those of the stages ---------------------------------------------------------------


def results(root: Path, name: str, *scores: float, first: int = 1) -> None:
    for seed, score in enumerate(scores, start=first):
        metrics = {"Ball": {"mean_return": score}}
        left(root, "evaluate", f"{name}/seed{seed}", metrics=metrics)


@pytest.fixture
def small(here: Path) -> Path:
    seeds = {"seeds": [1, 2, 3, 4, 5]}
    params_of(here, a=seeds, b=seeds)
    results(here, "a", 10.0, 11.0, 12.0, 13.0, 14.0)
    results(here, "b", 1.0, 2.0, 3.0, 4.0, 5.0)
    return here


@pytest.fixture
def claim(small: Path) -> Callable[..., Path]:
    """Write one claim about the experiment `a`."""

    def write(**keys: object) -> Path:
        entry = {"experiment": "a"} | keys
        (small / CLAIMS).write_text(yaml.safe_dump({"one": entry}))
        return small / CLAIMS

    return write


def test_claims_write_makes_claims_about_each_iqm_and_each_clear_difference(small, capsys, printed):
    told = printed("claims", "write")
    assert told.startswith("Wrote a_iqm, b_iqm, a_better_than_b to claims.yaml, and digests")
    written = yaml.safe_load((small / CLAIMS).read_text())
    params = load_params("params.yaml")
    (task,) = compare(report.results.outcomes(small, params))
    interval = [float(f"{end:.6g}") for end in task.standings[0].interval]
    value = {"metric": "iqm", "value": 12.0, "interval": interval}
    assert written["a_iqm"] == {"experiment": "a"} | value
    better = {"experiment": "a", "better_than": "b", "probability": 0.75}
    assert written["a_better_than_b"] == better
    assert set(verdicts(checked(capsys, 0)).values()) == {"identical"}
    out = printed("claims", "check")
    assert "identical   a_better_than_b: P(a > b) at least 0.75; here 1, 5 and 5 seeds\n" in out
    assert out.endswith("\n\n3 identical\n")


def test_claims_write_keeps_entries_and_comments_that_were_written_by_hand(small, capsys):
    own = (
        "# mine\nb_small:  # by hand\n  experiment: b\n  metric: mean\n  value: 3\n  tolerance: 1\n"
    )
    (small / CLAIMS).write_text(own)
    assert main(["claims", "write", "a"]) == 0
    text = (small / CLAIMS).read_text()
    assert text.startswith(own)
    assert [*load_claims(small)] == ["b_small", "a_iqm"]
    assert main(["claims", "write", "a"]) == 0
    assert (small / CLAIMS).read_text() == text
    assert verdicts(checked(capsys, 0)) == {"b_small": "reproduced", "a_iqm": "identical"}


def test_claims_write_keeps_the_records_of_other_experiments(small, capsys):
    assert main(["claims", "write", "a"]) == 0
    assert main(["claims", "write", "b"]) == 0
    assert verdicts(checked(capsys, 0)) == {"a_iqm": "identical", "b_iqm": "identical"}


def test_claims_write_prints_which_claims_are_left_out(small, capsys, printed):
    params_of(small, a={"seeds": [1, 2]}, b={"seeds": [1, 2]}, none={"seeds": [7]})
    told = printed("claims", "write")
    assert "a_iqm: 2 seeds give no interval, so the claim holds only for this value" in told
    assert "No claim a_better_than_b was written: the seeds show no clear difference." in told
    assert "Left out: none has seeds without results; run `pipeline run none`." in told
    assert yaml.safe_load((small / CLAIMS).read_text())["a_iqm"]["tolerance"] == 0
    assert set(verdicts(checked(capsys, 0)).values()) == {"identical"}
    left(small, "evaluate", "a/seed1", metrics={"Ball": {"mean_return": 10.001}})
    assert verdicts(checked(capsys, 1))["a_iqm"] == "not"


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        ({"metric": "iqm", "value": 9.0, "interval": [8.0, 10.3]}, "not"),
        ({"metric": "iqm", "value": 9.0, "interval": [8.0, 10.4]}, "reproduced"),
        ({"metric": "iqm", "value": 15.0, "interval": [13.7, 16.0]}, "not"),
        ({"metric": "iqm", "value": 15.0, "interval": [13.6, 16.0]}, "reproduced"),
        ({"metric": "iqm", "value": 12.5, "tolerance": 0.5}, "reproduced"),
        ({"metric": "iqm", "value": 12.5, "tolerance": 0.49}, "not"),
        # Student's t of 4 degrees of freedom: 12 - 2.776 * 1.581 / sqrt(5) = 10.037
        ({"metric": "mean", "value": 9.0, "interval": [8.0, 10.04]}, "reproduced"),
        ({"metric": "mean", "value": 9.0, "interval": [8.0, 10.03]}, "not"),
        ({"better_than": "b", "probability": 1.0}, "reproduced"),
        ({"experiment": "b", "better_than": "a", "probability": 0.1}, "not"),
    ],
)
def test_claim_is_judged_by_its_interval_tolerance_or_probability(keys, answer, claim, capsys):
    claim(**keys)
    found = checked(capsys, 1 if answer == "not" else 0)
    assert verdicts(found) == {"one": answer}
    about = keys.get("experiment", "a")
    assert found["one"]["cause"] == [
        f"claims.lock has no record of {about}: `pipeline claims write {about}` makes one"
    ]
    assert found["one"]["here"] == "0, 5 and 5 seeds" or about == "a"


def test_edited_claim_is_not_reproduced_although_the_result_files_are_unchanged(small, capsys):
    assert main(["claims", "write", "a"]) == 0
    text = (small / CLAIMS).read_text()
    (small / CLAIMS).write_text(text.replace("value: 12.0", "value: 99.0").replace("- 1", "- 91"))
    found = checked(capsys, 1)["a_iqm"]
    assert found["answer"] == "not"
    assert found["cause"] == [
        "the result files are those of claims.lock, so the claim itself was changed"
    ]


def test_claims_check_prints_a_failed_claim_and_exits_with_code_1(small, claim, capsys):
    claim(metric="iqm", value=99, tolerance=1)
    assert main(["claims", "check"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("not         one: iqm of a: 99 +/- 1.0; here 12 (")
    assert err == "error: not reproduced: 1 of 1 claims\n"


def test_claim_without_results_is_not_reproduced_and_names_the_command(small, claim, capsys):
    claim(metric="iqm", value=12, tolerance=1)
    shutil.rmtree(small / "results/evaluate/a/seed4")
    found = checked(capsys, 1)["one"]
    assert found["here"] == "a has seeds without results; run `pipeline run a`"
    assert found["cause"] == []
    left(small, "train", "a/seed4", progress="Ball,100,12.0\n")
    # the end of a learning curve is not taken for an evaluation
    assert checked(capsys, 1)["one"]["here"] == "a has seeds without results; run `pipeline run a`"


def test_claim_about_an_unknown_experiment_is_not_reproduced(small, claim, capsys):
    claim(experiment="gone", metric="iqm", value=12, tolerance=1)
    assert checked(capsys, 1)["one"]["here"] == "params.yaml has no experiment gone"


def test_claims_check_names_a_changed_result_file_if_no_record_explains_the_change(small, capsys):
    assert main(["claims", "write", "a"]) == 0
    left(small, "evaluate", "a/seed2", metrics={"Ball": {"mean_return": 11.0, "note": 1.0}})
    found = checked(capsys, 0)["a_iqm"]
    assert found["answer"] == "reproduced"
    path = "results/evaluate/a/seed2/metrics.json"
    assert found["cause"][0].startswith(f"no record of a policy differs, but {path} does")


def test_another_number_of_seeds_is_named_as_the_cause_of_a_difference(small, capsys):
    assert main(["claims", "write", "a"]) == 0
    params_of(small, a={"seeds": [1, 2, 3, 4]})
    assert checked(capsys, 0)["a_iqm"]["cause"] == ["first cause: number of seeds: 5, 4"]


def test_claim_about_an_experiment_with_several_behaviors_must_name_one(small, claim, capsys):
    for seed in range(1, 6):
        both = {name: {"mean_return": 10.0 + seed} for name in ("Ball", "Bat")}
        left(small, "evaluate", f"a/seed{seed}", metrics=both)
    claim(metric="iqm", value=12, tolerance=9)
    with pytest.raises(SettingsError, match=r"claims.yaml: one.behavior: needs one of Ball, Bat"):
        claims.answers(small, load_params("params.yaml"))
    claim(metric="iqm", value=13, tolerance=0, behavior="Bat")
    assert verdicts(checked(capsys, 0)) == {"one": "reproduced"}
    assert main(["claims", "write", "a"]) == 0
    assert {"a_iqm_Ball", "a_iqm_Bat"} < {*load_claims(small)}


VALUE = {"metric": "iqm", "value": 12}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "experiment: needs the keys .*; or better_than, probability; has none of them"),
        (VALUE, "experiment: needs the keys .*; has metric, value"),
        ({**VALUE, "interval": [1, 2], "tolerance": 1}, "has interval, metric, tolerance, value"),
        ({**VALUE, "interval": [13, 11]}, "interval: write the lower end first"),
        ({**VALUE, "interval": [13]}, "interval: needs 2 values, got 1"),
        ({**VALUE, "tolerance": -1}, "tolerance: must be at least 0, got -1"),
        ({"better_than": "b"}, "experiment: needs .*; has better_than"),
        ({"better_than": "b", "probability": 2}, "probability: must be at most 1, got 2"),
        ({"better": "b"}, "unknown key 'better'"),
    ],
)
def test_error_for_a_mistake_in_claims_yaml_names_file_line_and_key(keys, message, claim, refused):
    claim(**keys)
    line = refused("claims", "check")
    assert re.search(message, line), line
    assert re.search(r"claims.yaml:\d+: one", line)


def test_claims_commands_refuse_a_broken_claims_lock_and_missing_files(small, claim, refused):
    assert "has no claim; `pipeline claims write` makes some" in refused("claims", "check")
    claim(**VALUE, tolerance=1)
    for content in ("{", "[]", "{}", '{"runs": {}, "shared, format 2": {}}', '{"runs": []}'):
        (small / LOCK).write_text(content)
        assert "claims.lock: cannot be read" in refused("claims", "check")
        assert "`pipeline claims write`" in refused("claims", "check")
    assert refused("claims", "write", "aa") == "params.yaml has no experiment aa"
    shutil.rmtree(small / "results/evaluate/a/seed1")
    assert "a has seeds without results; run `pipeline run a`" in refused("claims", "write", "a")
    shutil.rmtree(small / "results")
    assert "no experiment has results of every seed" in refused("claims", "write")
    (small / "params.yaml").unlink()
    assert "Parameter file could not be found" in refused("claims", "check")


def test_claims_lock_reads_back_equal_and_stores_shared_values_once(small):
    shared = {"versions": {"numpy": "2"}, "sources": {"a.py": "1"}, "machine": {}}
    record = {"stage": "train", "seed": 1, "parameters": {"x": 1}, "inputs": {}, **shared}
    seeds = {
        str(seed): {"files": {"f": "d"}, "history": [record | {"seed": seed}]} for seed in (1, 2)
    }
    text = claims.lock_text({"a": seeds})
    (small / LOCK).write_text(text)
    assert claims.read_lock(small) == {"a": seeds}
    assert text.count('"numpy"') == 1


def test_report_shows_whether_claims_are_reproduced_and_depends_on_claims_yaml(small, monkeypatch):
    monkeypatch.setenv("PIPELINE_PROJECT", str(small))
    assert main(["claims", "write", "a"]) == 0
    params = load_params("params.yaml")
    (section,) = report._claims(small, params)
    assert section.rows[0][0] == "a_iqm"
    assert section.rows[0][3] == "identical"
    (small / "out").mkdir()
    tasks = compare(report.results.outcomes(small, params))
    report.write_pages(tasks, (small / "out").joinpath, small, params)
    for page in ("report.md", "report.html"):
        text = (small / "out" / page).read_text()
        assert "Claims" in text
        assert "identical" in text
    sources.note(small, "report", checkout())
    noted = (small / sources.CODE / "report.txt").read_text()
    assert "  claims.yaml\n" in noted
    assert "  claims.lock\n" in noted
    (small / "dvc.yaml").touch()  # so that the code is that of the package
    assert engines._edited_sources(small) == set()
    (small / CLAIMS).write_text((small / CLAIMS).read_text() + "# edited\n")
    assert engines._edited_sources(small) == {"claims.yaml"}
