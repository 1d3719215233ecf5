from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from small_project import left, params_of

from pipeline.cli import compare
from pipeline.cli.run import targets
from pipeline.settings.project.params import Params


def curve_of(returns: list[float]) -> str:
    rows = [f"Walker,{1000 * k},{value}\n" for k, value in enumerate(returns, start=1)]
    return f"Walker,500,\n{''.join(rows)}"


def dag(root: Path, experiment: str, seed: int, returns: list[float], evaluated: float) -> Path:
    """Write the files of the stages train and evaluate; return the run's folder."""
    run = f"{experiment}/seed{seed}"
    left(root, "evaluate", run, metrics={"Walker": {"mean_return": evaluated}})
    left(root, ".work/train", run, stage={"duration_s": 30.0, "resumed": False})
    return left(root, "train", run, progress=curve_of(returns))


def learned(root: Path, name: str, seed: int, rate: float = 3e-4, returns=None) -> Path:
    """Write the files of a run of `pipeline learn`; return its folder."""
    run = left(
        root, "", name, progress=curve_of([1.0, 2.0, 3.0 + seed] if returns is None else returns)
    )
    left(root, name, "run_logs", seconds={"total": 60.0 + seed})
    (run / "configuration.yaml").write_text(
        "behaviors:\n  Walker:\n    trainer_type: ppo\n"
        f"    hyperparameters: {{learning_rate: {rate}}}\n"
        f"env_settings: {{seed: {seed}, env_path: builds/walker}}\n"
        f"checkpoint_settings: {{run_id: {name}}}\n"
    )
    return run


def rows(text: str) -> dict[str, dict[str, str]]:
    return {row["experiment"]: row for row in csv.DictReader(io.StringIO(text))}


def test_experiments_of_the_dag_are_compared_by_the_returns_of_their_evaluations(tmp_path, printed):
    for seed in range(3):
        run = dag(tmp_path, "a", seed, [0.0, 1.0, 5.0], evaluated=10.0 + seed)
        numbers = {"steps": 3000} | ({"interrupted_at_step": 1200} if seed else {})
        (run / "metrics.json").write_text(json.dumps({"Walker": numbers}))
        dag(tmp_path, "b", seed, [0.0, 9.0, 9.0], evaluated=20.0 + seed)
    train = tmp_path / "results/train"
    text = printed("compare", train / "a", train / "b")
    assert "Returns are of the exported policies" in text
    assert "a, b: 3 seeds are few: in more than 5 % of cases" in text
    assert "a, seed 1, 2: interrupted and not resumed exactly, so a repeated" in text
    assert "30.0 s" in text
    table = rows(printed("compare", train / "a", train / "b", "--csv"))
    assert (table["a"]["iqm"], table["b"]["iqm"], table["a"]["seeds"]) == ("11", "21", "3")
    assert (table["a"]["steps_to_target"], table["b"]["steps_to_target"]) == ("", "2000")


def test_compare_accepts_the_folder_of_any_stage_and_counts_each_seed_once(tmp_path, printed):
    run = dag(tmp_path, "a", 1, [0.0, 1.0], evaluated=10.0)
    dag(tmp_path, "a", 2, [0.0, 1.0], evaluated=30.0)
    evaluated = tmp_path / "results/evaluate/a/seed1"
    for names in ([run], [evaluated], [run, evaluated]):
        table = rows(printed("compare", *names, "--csv"))
        assert (table["a"]["seeds"], table["a"]["mean"]) == ("1", "10")


def test_compare_counts_a_run_only_once_for_each_behavior_although_it_is_given_twice(tmp_path):
    run = dag(tmp_path, "a", 1, [0.0, 1.0], evaluated=10.0)
    dag(tmp_path, "a", 2, [0.0, 1.0], evaluated=30.0)
    dag(tmp_path, "b", 1, [0.0, 1.0], evaluated=50.0)
    metrics = {"Walker": {"mean_return": 10.0}, "Jumper": {"mean_return": 7.0}}
    left(tmp_path, "evaluate", "a/seed1", metrics=metrics)
    found = compare.outcomes_of([run, run.parent, run.parent.parent / "b"])
    assert [(x.experiment, x.behavior, x.seed, x.evaluated) for x in found] == [
        ("a", "Jumper", 1, 7.0),
        ("a", "Walker", 1, 10.0),
        ("a", "Walker", 2, 30.0),
        ("b", "Walker", 1, 50.0),
    ]


def test_sweep_trials_are_compared_with_other_experiments_in_order_of_rank(tmp_path, printed):
    for experiment, evaluated in (("rates/001", 1.0), ("rates/002", 2.0), ("rates_best", 3.0)):
        dag(tmp_path, experiment, 1, [0.0, 1.0], evaluated=evaluated)
    train = tmp_path / "results/train"
    table = rows(printed("compare", *sorted(train.iterdir()), "--csv"))
    scores = {name: row["iqm"] for name, row in table.items()}
    assert scores == {"rates/001": "1", "rates/002": "2", "rates_best": "3"}
    table = tmp_path / "results/sweep/rates/trials.csv"
    table.parent.mkdir(parents=True)
    for ranks, order in (("1,1\n2,2\n", ["rates/001", "rates/002"]), ("2,1\n1,2\n", None)):
        table.write_text(f"trial,rank\n{ranks}")
        listed = list(rows(printed("compare", train / "rates", "--csv")))
        assert listed == (order or ["rates/002", "rates/001"])
    for path in (train / "rates/002", train / "rates/002/seed1"):
        assert list(rows(printed("compare", path, "--csv"))) == ["rates/002"]


def test_learn_runs_that_differ_only_in_the_seed_are_one_experiment(tmp_path, printed):
    runs = [learned(tmp_path, f"walk-seed{seed}", seed) for seed in (1, 2)]
    runs += [learned(tmp_path, "faster", 1, rate=1e-3)]
    value = json.loads(printed("compare", *runs, "--json"))
    experiments = {entry["experiment"]: entry for entry in value["experiments"]}
    assert experiments.keys() == {"walk", "faster"}
    assert (experiments["walk"]["seeds"], experiments["walk"]["mean"]) == (2, 4.5)
    assert (experiments["walk"]["training_s"], experiments["walk"]["score"]) == (61.5, "training")
    assert (experiments["walk"]["environment"], experiments["walk"]["iqm_low"]) == ("walker", None)
    (pair,) = value["improvements"]
    assert (pair["better"], pair["probability"]) == ("walk", 0.75)
    text = "walk: 2 seeds are too few for an interval; run 5 or more."
    assert text in printed("compare", *runs)


def test_runs_with_different_settings_are_separate_experiments_with_any_names(tmp_path, printed):
    runs = [learned(tmp_path, name, seed) for name, seed in (("walk-1", 1), ("walk-2", 2))]
    # Runs named like the common start above: in this folder, in another one, and in the DAG.
    runs += [learned(tmp_path, "walk", 1, rate=1e-3)]
    runs += [learned(tmp_path / "other", "walk", 1, rate=1e-4)]
    table = rows(printed("compare", *runs, "--csv"))
    assert sorted((name, row["seeds"]) for name, row in table.items()) == [
        (str(tmp_path / "other/results/walk"), "1"),
        (str(tmp_path / "results/walk"), "1"),
        ("walk", "2"),
    ]
    text = printed("compare", *runs)
    assert f"{runs[2]}, against walk: learning_rate 0.001 instead of 0.0003\n" in text
    assert text.endswith(f"only their seeds differ:\n{runs[0]}, {runs[1]}\n")
    trial = dag(tmp_path, "walk", 1, [0.0, 1.0], evaluated=10.0)
    assert len(rows(printed("compare", trial, *runs, "--csv"))) == 4


def test_run_with_other_initial_weights_is_a_separate_experiment(tmp_path, printed):
    runs = [learned(tmp_path, f"walk-{seed}", seed) for seed in (1, 2, 3)]
    written = runs[2] / "configuration.yaml"
    written.write_text(written.read_text().replace("{run_id: ", "{initialize_from: old, run_id: "))
    table = rows(printed("compare", *runs, "--csv"))
    assert {name: row["seeds"] for name, row in table.items()} == {"walk": "2", "walk-3": "1"}


def test_option_fraction_of_compare_sets_the_target_return(tmp_path, printed):
    run = learned(tmp_path, "one", 1)
    table = rows(printed("compare", run, "--csv", "--fraction", "0.3"))
    assert (table["one"]["target"], table["one"]["steps_to_target"]) == ("1.9", "2000")


def with_text(run: Path, file: str, text: str) -> Path:
    """Write a text into a file of a run; return the run."""
    (run / file).write_text(text)
    return run


NOT_EVALUATED = "../../../evaluate/a/seed1/metrics.json"
MISTAKES = {
    "no folder": (lambda root: [root / "absent"], "does not exist"),
    "another folder": (lambda root: [root], "is not the folder of a run"),
    "a broken curve": (
        lambda root: [with_text(learned(root, "x", 1), "progress.csv", "nothing\nof the kind\n")],
        "cannot be read as a learning curve",
    ),
    "a broken evaluation": (
        lambda root: [with_text(dag(root, "a", 1, [0.0], 1.0), NOT_EVALUATED, '{"Walker": {}}')],
        "cannot be read as an evaluation",
    ),
    "no episode": (lambda root: [learned(root, "empty", 1, returns=[])], "no episode has ended"),
    "a repetition": (
        lambda root: [learned(root, "x", 1), learned(root, "y", 1)],
        "a repeated seed is not a further sample",
    ),
    "a fraction": (lambda root: [learned(root, "x", 1), "--fraction", 2], "--fraction: 2.0"),
}


@pytest.mark.parametrize(("make", "told"), MISTAKES.values(), ids=MISTAKES)
def test_compare_reports_a_mistake_in_one_line(make, told, tmp_path, refused):
    assert told in refused("compare", *make(tmp_path))


def test_compare_without_arguments_shows_every_experiment_of_params_yaml(here, printed, refused):
    params_of(here, behavior="Walker", a={"seeds": [1, 2, 3]})
    assert "run them first (`pipeline run`)" in refused("compare")
    for seed in (1, 2, 3, 4):
        dag(here, "a", seed, [0.0, 1.0, 5.0], evaluated=10.0 + seed)
    dag(here, "no_longer_there", 1, [0.0, 9.0], evaluated=99.0)
    text = printed("compare")
    table = text.partition("\n\n")[2]
    assert table.split("\n\n")[0].splitlines()[1].split()[:5] == ["a", "3", "12", "11", "to"]
    assert "no_longer_there" not in text
    assert "results/report/report.html" not in text
    left(here, "report", "")
    Path("results/report/report.html").touch()
    assert "results/report/report.html" in printed("compare")
    assert set(rows(printed("compare", "--csv"))) == {"a"}


def test_compare_prints_best_trial_of_a_ranked_sweep(here, printed):
    params = write_swept(here)
    ranked, trained = "results/sweep/rates/best.json", "results/train/rates/001/seed1/policy.pt"
    whole = [file for name in ("rates", "all") for file in targets(params, [name]).values()]
    assert whole.count(ranked) == 2
    assert [*targets(params, ["rates"], stage="train").values()] == [trained]
    dag(here, "first", 1, [0.0, 1.0], evaluated=1.0)
    assert "rates" not in printed("compare")
    best = {"trial": "rates/001", "values": {"behaviors.Ball.max_steps": 9}}
    left(here, "sweep", "rates", best=best, metrics={"mean_return": 87.25, "trials": 1})
    (line,) = [line for line in printed("compare").splitlines() if line.startswith("Sweep:")]
    assert line.split(maxsplit=1)[1] == (
        "rates/001 is the best of 1 trials, with mean_return 87.25 (max_steps 9); all: "
        "results/sweep/rates/trials.csv, `pipeline compare results/train/rates`"
    )
    assert "Sweep:" in compare.answer(here, [("rates/001", 1), ("first", 1)])
    assert "Sweep:" not in compare.answer(here, [("first", 1)])


ENVIRONMENTS = """
environments:
  ball: {source: builtin, name: balance_ball}
  duel: {source: builtin, name: pong}
"""
SWEPT = """
sweeps:
  rates: {experiment: second, method: list, seeds: [1],
    configurations: [{behaviors.Ball.max_steps: 9}]}
subsets: {all: [first, rates]}
"""


def write_swept(root: Path) -> Params:
    """Two experiments, and a sweep of the second."""
    return params_of(root, "first", sections=ENVIRONMENTS + SWEPT, second={"environment": "duel"})


def test_trial_of_a_sweep_has_the_environment_of_the_swept_experiment(tmp_path):
    write_swept(tmp_path)
    results = tmp_path / "results"
    environments = [compare._environment_of(results, name) for name in ("rates/001", "first")]
    assert environments == ["duel", "ball"]


def test_learn_runs_that_differ_only_in_the_seed_and_the_port_are_one_experiment(tmp_path):
    runs = [tmp_path / f"run{number}" for number in (1, 2)]
    for number, folder in enumerate(runs, start=1):
        folder.mkdir()
        text = f"env_settings: {{seed: {number}, base_port: {6000 + number}, env_path: a/game}}\n"
        (folder / "configuration.yaml").write_text(f"behaviors: {{Ball: {{}}}}\n{text}")
    (members,) = compare._experiments(runs, ()).values()
    assert members == {1: (runs[0], "game"), 2: (runs[1], "game")}


def test_each_compared_outcome_has_the_steps_seconds_and_seed_of_its_own_run_and_behavior(tmp_path):
    runs = [learned(tmp_path, f"walk-{seed}", seed) for seed in (1, 2)]
    runs += [learned(tmp_path, f"fast_seed{seed}", seed, rate=1e-3) for seed in (3, 4)]
    runs += [learned(tmp_path, "alone", 1, rate=1e-2)]
    for number, run in enumerate(runs):
        with (run / "progress.csv").open("a") as file:
            file.write("Jumper,1000,5.0\n")
        status = {
            name: {"final_checkpoint": {"steps": 100 * number + k}}
            for k, name in enumerate(("Jumper", "Walker"))
        }
        (run / "run_logs/training_status.json").write_text(json.dumps(status))
    found = compare.outcomes_of(runs)
    assert [(x.experiment, x.behavior, x.seed, x.steps, x.seconds) for x in found] == [
        (name, behavior, seed, 100 * number + k, 60.0 + seed)
        for number, (name, seed) in enumerate(
            (("walk", 1), ("walk", 2), ("fast", 3), ("fast", 4), ("alone", 1))
        )
        for k, behavior in ((1, "Walker"), (0, "Jumper"))
    ]
    (told,) = compare._seeds(compare._experiments(runs, ()))
    assert told.splitlines()[1:] == [f"{runs[0]}, {runs[1]}", f"{runs[2]}, {runs[3]}"]


def test_compare_as_text_csv_and_json_has_rows_for_every_behavior(tmp_path, printed):
    runs = [dag(tmp_path, name, 1, [0.0, 1.0], evaluated=10.0) for name in "ab"]
    for name, jumped in (("a", 7.0), ("b", 8.0)):
        values = {"Walker": {"mean_return": 1.0}, "Jumper": {"mean_return": jumped}}
        left(tmp_path, "evaluate", f"{name}/seed1", metrics=values)
    text = printed("compare", *runs)
    assert text.index("Jumper") < text.index("Walker")
    means = [("Jumper", "7"), ("Jumper", "8"), ("Walker", "1"), ("Walker", "1")]
    table = csv.DictReader(io.StringIO(printed("compare", *runs, "--csv")))
    assert sorted((row["behavior"], row["mean"]) for row in table) == means
    value = json.loads(printed("compare", *runs, "--json"))
    assert sorted((e["behavior"], f"{e['mean']:g}") for e in value["experiments"]) == means
    assert len(value["improvements"]) == 2


def test_experiment_of_a_second_project_is_shown_with_its_path_if_its_name_is_taken(tmp_path):
    runs = [
        dag(tmp_path / project, name, seed, [0.0, 1.0], evaluated=seed)
        for project in ("here", "there")
        for name in "ab"
        for seed in (1, 2)
    ]
    found = [(outcome.experiment, outcome.seed) for outcome in compare.outcomes_of(runs)]
    there = tmp_path / "there/results"
    names = ("a", "b", str(there / "a"), str(there / "b"))
    assert found == [(name, seed) for name in names for seed in (1, 2)]


def test_compare_of_chosen_runs_prints_one_table_per_environment_and_each_run_once(tmp_path):
    two = {"seeds": [1, 2]}
    duel = two | {"environment": "duel"}
    params_of(tmp_path, behavior="Walker", sections=ENVIRONMENTS, a=two, b=duel)
    assert compare.answer(tmp_path, [("a", 1)]) == "", "nothing is there yet"
    for name in "ab":
        for seed in (1, 2):
            dag(tmp_path, name, seed, [0.0, 1.0], evaluated=10.0 * seed)
    text = compare.answer(tmp_path, [("b", 2), ("a", 1), ("b", 2), ("a", 2)])
    lines = text.splitlines()
    names = [line.partition(": ")[0] for line in lines if line.endswith(": Walker")]
    tables = [line.split()[:3] for line in lines if line.endswith("30.0 s")]
    found = dict(zip(names, tables, strict=True))
    assert found == {"duel": ["b", "1", "20"], "ball": ["a", "2", "15"]}
