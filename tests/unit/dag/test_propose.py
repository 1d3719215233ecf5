from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from small_project import left, params_of

from pipeline.dag.stages.propose import before, propose
from pipeline.dag.stages.train import Pruner
from pipeline.errors import StageError
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import write_plan
from pipeline.settings.project.sweeps import proposal_file
from pipeline.tracking import names

RATE = "behaviors.Ball.hyperparameters.learning_rate"
SWEEP = f"""
sweeps:
  rates:
    experiment: base
    method: optuna
    parameters:
      {RATE}: {{min: 1e-5, max: 1e-2, scale: log}}
    runs: 6
    seed: 0
    startup: 2
    prune_after: 200
    seeds: [1, 2]
"""


@pytest.fixture
def root(tmp_path) -> Path:
    """A project whose first trials have been evaluated."""
    params = params_of(tmp_path, "base", sections=SWEEP)
    (tmp_path / "build/env/ball").mkdir(parents=True)
    write_plan(params, tmp_path / "workflow/runs.yaml")
    for trial in range(1, 6):
        evaluated(tmp_path, f"rates/{trial:03}", score=trial)
    return tmp_path


def evaluated(root: Path, trial: str, *, score: float) -> None:
    for seed in (1, 2):
        run = f"{trial}/seed{seed}"
        left(root, "evaluate", run, metrics={"Ball": {"mean_return": score + seed}})
        left(root, "train", run, progress=f"Ball,100,1\nBall,200,{score}\n")


def proposed(root: Path, trial: str) -> dict:
    propose(trial, root)
    return json.loads((root / proposal_file(trial)).read_text())


def test_each_proposal_file_contains_the_scores_of_all_earlier_trials(root):
    second, third = proposed(root, "rates/002"), proposed(root, "rates/003")
    params = load_params(root / "params.yaml")
    assert second["values"] == params.sweeps["rates"].drawn(1), "in `startup`"
    first = {"score": 2.5, "values": params.sweeps["rates"].trials()["001"]}
    assert first.items() <= second["told"]["001"].items()
    assert second["waiting"] == {"002": second["values"]}
    assert list(third["told"]) == ["001", "002"]
    assert third["told"]["002"]["values"] == second["values"]
    assert 1e-5 <= third["values"][RATE] <= 1e-2
    assert before(params, "rates/002") == Path("build/env/ball")
    assert before(params, "rates/003") == proposal_file("rates/002")
    ball = params.run_settings("rates/003").behaviors["Ball"]
    assert ball.hyperparameters.learning_rate == third["values"][RATE]
    # two finished curves are too few for a median; of four curves, it is 1.5 at step 200
    assert (second["prune_below"], third["prune_below"]) == ([], [[200, 1.5]])


def test_equal_results_of_earlier_trials_give_proposal_files_with_equal_bytes(root: Path):
    for trial in ("rates/002", "rates/003", "rates/004"):
        proposed(root, trial)
    first = (root / proposal_file("rates/004")).read_bytes()
    propose("rates/004", root)
    assert (root / proposal_file("rates/004")).read_bytes() == first
    evaluated(root, "rates/003", score=-99)
    propose("rates/004", root)
    assert (root / proposal_file("rates/004")).read_bytes() != first


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        ("rates/001", "no proposed trial sweeps.rates.001; it has 002"),
        ("rats/002", "params.yaml has no sweeps.rats"),
    ],
)
def test_trial_that_the_sweep_does_not_propose_is_refused(trial: str, said: str, root: Path):
    with pytest.raises(StageError) as caught:
        propose(trial, root)
    assert said in str(caught.value)


def test_proposal_file_with_invalid_content_is_refused(root: Path):
    path = root / proposal_file("rates/002")
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    with pytest.raises(
        StageError, match=r"002\.json: is not a proposal of this version; delete the file"
    ):
        propose("rates/003", root)


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
