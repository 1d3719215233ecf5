"""Sweeps, reports and attempts of several trials, seeds, behaviors and experiments."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from small_project import left, params_of

from pipeline.dag.stages import report
from pipeline.dag.stages.propose import before, propose
from pipeline.dag.stages.sweep import rank_named
from pipeline.dag.stages.train import Pruner
from pipeline.errors import StageError
from pipeline.evaluation.comparison import Outcome, compare
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import write_plan
from pipeline.settings.project.sweeps import SweepParams, proposal_file
from pipeline.tracking import names
from pipeline.tracking.run_metadata import POLICY_DIGEST, dvc_digest

RATE = "behaviors.Foe.hyperparameters.learning_rate"
SWEEPS = f"""
environments:
  ball: {{source: builtin, name: balance_ball}}
  duel: {{source: builtin, name: pong}}
sweeps:
  first: {{experiment: plain, method: list, configurations: [{{{RATE}: 0.1}}], seeds: [1]}}
  rates:
    experiment: base
    method: optuna
    behavior: Foe
    parameters: {{{RATE}: {{min: 1e-5, max: 1e-2, scale: log}}}}
    runs: 4
    parallel: 2
    seed: 0
    startup: 3
    prune_after: 200
    seeds: [1, 2]
"""
FILMED = {"seeds": [1, 2], "evaluation": {"episodes": 2, "seed": 9, "video": True}}
EXPERIMENTS = {
    "plain": {"seeds": [1, 2]},
    "base": FILMED | {"overrides": {"behaviors.Foe.max_steps": 7, "behaviors.Ball.max_steps": 9}},
    "other": FILMED | {"overrides": {RATE: 0.5}},
}


SCORES = {"001": 5.0, "002": 2.0, "003": 3.0, "004": 2.0}


def test_sweep_ranks_all_trials_by_the_mean_score_over_the_seeds(root: Path):
    for trial in ("rates/003", "rates/004"):
        propose(trial, root)
    rank_named("rates", root)
    made = root / "results/sweep/rates"
    values = {
        number: json.loads((root / proposal_file(f"rates/{number}")).read_text())["values"][RATE]
        for number in ("003", "004")
    }
    drawn = load_params(root / "params.yaml").sweeps["rates"].trials()
    values |= {number: drawn[number][RATE] for number in ("001", "002")}
    best = json.loads((made / "best.json").read_text())
    assert best == {"trial": "rates/001", "values": {RATE: values["001"]}}
    assert json.loads((made / "metrics.json").read_text()) == {"mean_return": 7.0, "trials": 4}
    with (made / "trials.csv").open(newline="") as file:
        rows = [(r["trial"], r["rank"], r["score"], float(r[RATE])) for r in csv.DictReader(file)]
    assert rows == [
        ("1", "1", "7.0", values["001"]),
        ("3", "2", "5.0", values["003"]),
        ("2", "3", "4.0", values["002"]),
        ("4", "4", "4.0", values["004"]),
    ]
    facts = json.loads((root / "results/.work/sweep/rates/stage.json").read_text())
    seen = [f"results/evaluate/rates/{n}/seed{s}/metrics.json" for n in SCORES for s in (1, 2)]
    proposed = [f"results/propose/rates/{n}.json" for n in ("003", "004")]
    assert sorted(facts["inputs"]) == sorted([*seen, *proposed])
    written = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(written.replace("prune_after: 200", "goal: minimize"))
    write_plan(load_params(root / "params.yaml"), root / "workflow/runs.yaml")
    rank_named("rates", root)
    best = json.loads((made / "best.json").read_text())
    assert best == {"trial": "rates/002", "values": {RATE: values["002"]}}
    assert json.loads((made / "metrics.json").read_text()) == {"mean_return": 4.0, "trials": 4}
    with (made / "trials.csv").open(newline="") as file:
        ranked = [(row["trial"], row["score"]) for row in csv.DictReader(file)]
    assert ranked == [("2", "4.0"), ("4", "4.0"), ("3", "5.0"), ("1", "7.0")]


def test_proposal_records_the_scores_of_finished_trials_and_lists_running_trials(
    root: Path, params: Params, monkeypatch
):
    journals, asked, search = [], [], SweepParams.propose

    def noting(sweep, number, told, waiting):
        asked.append((number, [score for _, score in told.values()], list(waiting)))
        return search(sweep, number, told, waiting)

    monkeypatch.setattr(SweepParams, "propose", noting)
    for trial in ("rates/003", "rates/004"):
        propose(trial, root)
        journals.append(json.loads((root / proposal_file(trial)).read_text()))
    third, fourth = journals
    assert (list(third["told"]), sorted(third["waiting"])) == (["001"], ["002", "003"])
    assert (list(fourth["told"]), sorted(fourth["waiting"])) == (["001", "002"], ["003", "004"])
    assert fourth["told"]["002"]["score"] == 4.0
    # curves of the sweep's behavior, for each seed
    assert fourth["told"]["002"]["curves"] == [[[100, 2.0], [200, 3.0]], [[100, 6.0], [200, 8.0]]]
    assert fourth["waiting"]["003"] == third["values"]
    waiting = [third["waiting"]["002"], fourth["waiting"]["003"]]
    assert asked == [(3, [7.0], waiting[:1]), (4, [7.0, 4.0], waiting[1:])]
    assert third["values"] == params.sweeps["rates"].drawn(2), "in `startup`"
    assert 1e-5 <= fourth["values"][RATE] <= 1e-2
    foe = params.run_settings("rates/004").behaviors["Foe"]
    assert foe.hyperparameters.learning_rate == fourth["values"][RATE]
    # Two curves are too few for a median.
    assert (third["prune_below"], fourth["prune_below"]) == ([], [[200, 7.0]])
    assert before(params, "rates/003") == Path("build/env/ball")
    assert before(params, "rates/004") == proposal_file("rates/003")
    facts = json.loads((root / "results/.work/propose/rates/004/stage.json").read_text())
    assert sorted(facts["inputs"]) == [
        *(f"results/evaluate/rates/002/seed{seed}/metrics.json" for seed in (1, 2)),
        "results/propose/rates/003.json",
        *(f"results/train/rates/002/seed{seed}/progress.csv" for seed in (1, 2)),
    ]


def test_equal_results_of_earlier_trials_give_proposal_files_with_equal_bytes(root: Path):
    def proposed() -> bytes:
        propose("rates/004", root)
        return (root / proposal_file("rates/004")).read_bytes()

    propose("rates/003", root)
    first = proposed()
    assert proposed() == first
    evaluated(root, "rates/002", 1, score=-99)
    assert proposed() != first


@pytest.mark.parametrize(
    ("trial", "content", "said"),
    [
        ("rates/001", None, "no proposed trial sweeps.rates.001; it has 003"),
        ("rats/002", None, "params.yaml has no sweeps.rats"),
        ("rates/004", "[]", "003.json: is not a proposal of this version; delete the file"),
    ],
)
def test_trial_that_the_sweep_does_not_propose_and_an_invalid_proposal_file_are_refused(
    trial: str, content: str | None, said: str, root: Path
):
    if content is not None:
        path = root / proposal_file("rates/003")
        path.parent.mkdir(parents=True)
        path.write_text(content)
    with pytest.raises(StageError) as caught:
        propose(trial, root)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("behavior", "step", "reward", "ends"),
    [
        ("Ball?team=0", 100, 4.9, True),
        ("Ball?team=0", 100, 5.0, False),
        ("Ball?team=0", 150, 0.0, False),
        ("Ball?team=0", 100, None, False),
        ("Other", 100, 0.0, False),
    ],
)
def test_trial_is_stopped_if_its_mean_reward_at_a_step_is_below_the_median_of_earlier_trials(
    behavior, step, reward, ends
):
    pruner = Pruner({100: 5.0, 200: math.inf}, "Ball")
    pruner.on_summary(behavior, {} if reward is None else {names.REWARD: reward}, step)
    assert pruner.stop is ends


def test_ranking_of_a_sweep_refuses_an_evaluation_that_was_made_with_an_earlier_policy(root: Path):
    for trial in ("rates/003", "rates/004"):
        propose(trial, root)
    (root / "results/train/rates/002/seed2/policy.pt").write_text("another")
    with pytest.raises(StageError, match=r"rates/002/seed2.*was trained again with seed 2"):
        rank_named("rates", root)


def outcomes(scores: dict[str, dict[str, list[float]]], **more: object) -> list[Outcome]:
    """Outcomes in the environment `ball`, by experiment and behavior, for seeds from 1 on."""
    return [
        Outcome(
            experiment=name,
            environment="ball",
            behavior=behavior,
            seed=seed,
            evaluated=score,
            **more,
        )
        for name, behaviors in scores.items()
        for behavior, returns in behaviors.items()
        for seed, score in enumerate(returns, start=1)
    ]


def evaluated(root, trial: str, seed: int, score: float) -> None:
    run = f"{trial}/seed{seed}"
    curve = f"Ball,100,{-score}\nFoe,100,{score}\nFoe,200,{score + seed}\n"
    folder = left(root, "train", run, policy=f"{trial} {seed}", progress=curve)
    digest = {POLICY_DIGEST: dvc_digest(folder / "policy.pt")}
    metrics = {"Ball": {"mean_return": -score, **digest}, "Foe": {"mean_return": score, **digest}}
    left(root, "evaluate", run, metrics=metrics)


@pytest.fixture
def root(tmp_path) -> Path:
    """A project with a sweep whose trials have been evaluated with both seeds."""
    both = "Foe: {trainer_type: ppo}, Ball"
    params = params_of(tmp_path, behavior=both, sections=SWEEPS, **EXPERIMENTS)
    (tmp_path / "build/env/ball").mkdir(parents=True)
    write_plan(params, tmp_path / "workflow/runs.yaml")
    for number, score in SCORES.items():
        for seed in (1, 2):
            evaluated(tmp_path, f"rates/{number}", seed, score + 4 * (seed - 1))
    return tmp_path


@pytest.fixture
def params(root) -> Params:
    return load_params(root / "params.yaml")


def test_report_lists_the_differences_between_experiments_for_each_behavior(params: Params):
    both = {"Ball": [1.0, 3.0], "Foe": [2.0, 6.0]}
    tasks = compare(outcomes({"plain": both, "base": both, "other": both}))
    setups = {task.behavior: dict(report._setups(task, params, {})) for task in tasks}
    ends = {
        behavior: [text.partition("against plain: ")[2] for text in texts.values()]
        for behavior, texts in setups.items()
    }
    assert ends == {
        "Ball": ["", "max_steps 9 instead of 500000", "the same"],
        "Foe": [
            "",
            "max_steps 7 instead of 500000",
            "learning_rate 0.5 instead of 0.0003",
        ],
    }
    assert all(
        text.startswith("PPO (t.yaml), ") for texts in setups.values() for text in texts.values()
    )
    summary = report._summary(tasks)
    assert {
        name: {b: v["mean_return"] for b, v in entry.items()} for name, entry in summary.items()
    } == {name: {"Ball": 2.0, "Foe": 4.0} for name in ("plain", "base", "other")}


def test_a_report_reads_the_results_of_every_seed_and_of_every_sweep(params: Params):
    files = ("train/{}/metrics.json", "train/{}/progress.csv")
    files += ("evaluate/{}/metrics.json", "evaluate/{}/episodes.csv")
    runs = [f"{name}/seed{seed}" for name in EXPERIMENTS for seed in (1, 2)]
    expected = [file.format(run) for run in runs for file in files]
    expected += [f"evaluate/{run}/median.gif" for run in runs if not run.startswith("plain")]
    trials = ["first/001/seed1", *(f"rates/{number}/seed{s}" for number in SCORES for s in (1, 2))]
    expected += [f"evaluate/{trial}/metrics.json" for trial in trials]
    read = [path.as_posix().removeprefix("results/") for path in report.inputs(params)]
    assert sorted(read) == sorted(expected)


def test_report_shows_the_video_of_the_seed_with_the_median_score(
    root: Path, params: Params, tmp_path: Path
):
    for name in ("base", "other"):
        for seed in (1, 2, 3):
            film = root / f"results/evaluate/{name}/seed{seed}/median.gif"
            film.parent.mkdir(parents=True, exist_ok=True)
            film.write_text(f"{name} {seed}")
    scores = {"plain": {"Foe": [0.0] * 3}, "base": {"Foe": [9.0, 1.0, 5.0]}}
    found = outcomes(scores) + outcomes({"other": {"Foe": [4.0, 2.0, 3.0]}})
    others = [
        Outcome(experiment="pong", environment="duel", behavior="A", seed=1, evaluated=1.0),
        *outcomes({"base": {"Zoo": [1.0, 2.0, 3.0]}}),
    ]
    tasks = compare([*found, *others])
    folder = tmp_path / "figures"
    folder.mkdir()
    films = {
        (task.environment, task.behavior): report._films(task, tasks, root, params, folder)
        for task in tasks
        if task.environment == "ball"
    }
    assert films["ball", "Zoo"] == [], "another behavior of the same episodes"
    texts = [(folder / film.file).read_text() for film in films["ball", "Foe"]]
    assert texts == ["base 3", "other 3"]
