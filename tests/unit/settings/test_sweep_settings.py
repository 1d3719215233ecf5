"""Sweeps and subsets of `params.yaml`."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from pipeline.errors import SettingsError
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import check_settings, plan, write_plan
from pipeline.settings.project.sweeps import Axis, BestParams, Interval, SweepParams
from pipeline.settings.reader import ContradictionError

FILE = """\
environments:
  ball:
    source: builtin
    name: balance_ball
experiments:
  base:
    environment: ball
    trainer: t.yaml
    overrides:
      behaviors:
        Ball:
          hyperparameters: {batch_size: 10}
          max_steps: 1000
    seeds: [1, 2]
    stages: [train, export, evaluate]
    evaluation: {episodes: 2, seed: 9}
sweeps:
  rates:
    experiment: base
    method: grid
    parameters:
      behaviors.Ball.hyperparameters.learning_rate: [1e-4, 1e-3]
      behaviors.Ball.max_steps: [500, 1000, 2000]
    seeds: [1]
    best:
      seeds: [7, 8]
subsets:
  smoke: [base-1, rates]
"""
RATE = "behaviors.Ball.hyperparameters.learning_rate"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "t.yaml").write_text("behaviors: {Ball: {trainer_type: ppo}}\n")
    (tmp_path / "params.yaml").write_text(FILE)
    return tmp_path


def random_sweep(*, runs: int = 4, seed: int = 0, **axes: Axis) -> dict[str, dict]:
    keys = {"experiment": "base", "method": "random", "seeds": (1,)}
    return SweepParams(**keys, parameters=axes, runs=runs, seed=seed).trials()


def test_a_plan_makes_the_trials_of_a_sweep_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the time of a plan grows with the square of the number of trials."""
    text = FILE.replace("grid", "random").replace("best:\n", "runs: 30\n    seed: 1\n    best:\n")
    (folder / "params.yaml").write_text(text)
    draw, drawn = SweepParams.drawn, []
    monkeypatch.setattr(SweepParams, "drawn", lambda *key: drawn.append(key[1]) or draw(*key))
    params = load_params(folder / "params.yaml")
    check_settings(params)
    assert len(plan(params)["runs"]["train_from_scratch"]) == 32
    assert drawn == [*range(30)]


def test_grid_sweep_has_every_combination_once(folder: Path):
    trials = load_params(folder / "params.yaml").sweeps["rates"].trials()
    assert [tuple(trial.values()) for trial in trials.values()] == [
        (rate, steps) for rate in (1e-4, 1e-3) for steps in (500, 1000, 2000)
    ]


def test_list_sweep_has_one_trial_per_configuration_and_refuses_repeated_seeds_for_the_best():
    changes = ({"a.b": 1}, {"a.c": 2})
    common = {"experiment": "e", "method": "list", "configurations": changes, "seeds": (1,)}
    assert SweepParams(**common).trials() == {"001": {"a.b": 1}, "002": {"a.c": 2}}
    with pytest.raises(ContradictionError, match="best"):
        SweepParams(**common, best=BestParams(seeds=(5, 5)))


LOG = Axis(interval=Interval(min=1e-5, max=1e-2, scale="log"))


def test_longer_random_sweep_begins_with_the_trials_of_a_shorter_random_sweep():
    longer = random_sweep(runs=12, rate=LOG)
    assert list(longer.items())[:5] == list(random_sweep(runs=5, rate=LOG).items())


def test_additional_parameter_of_a_sweep_does_not_change_values_of_other_parameters():
    both = random_sweep(rate=LOG, size=Axis(values=(1, 2, 3)))
    rates = {number: {"rate": trial["rate"]} for number, trial in both.items()}
    assert rates == random_sweep(rate=LOG)


def test_logarithmic_interval_of_a_sweep_gives_values_of_every_order_of_magnitude():
    drawn = [trial["rate"] for trial in random_sweep(runs=200, rate=LOG).values()]
    for low in (1e-5, 1e-4, 1e-3):
        assert 40 <= sum(low <= rate < 10 * low for rate in drawn) <= 95


@settings(max_examples=50)
@given(
    low=st.floats(1e-6, 10),
    width=st.floats(1e-3, 1e6),
    seed=st.integers(0, 99),
    whole=st.booleans(),
)
def test_values_drawn_for_a_random_sweep_lie_in_the_given_interval(low, width, seed, whole):
    low, high = (low, low + 1.0 + width) if whole else (low, low + width)
    axis = Axis(interval=Interval(min=low, max=high, integer=whole))
    for trial in random_sweep(seed=seed, x=axis).values():
        assert low <= trial["x"] <= high
        assert isinstance(trial["x"], int if whole else float)


def test_best_trial_of_a_sweep_is_unknown_before_the_sweep_has_ended(folder: Path):
    params = load_params(folder / "params.yaml")
    with pytest.raises(SettingsError, match=r"best\.json.* is missing: .*dvc repro sweep@rates"):
        params.run_settings("rates_best")
    best = folder / "results/sweep/rates/best.json"
    best.parent.mkdir(parents=True)
    best.write_text('{"values": {"behaviors.Ball.max_steps": 500}}')
    assert params.run_settings("rates_best").behaviors["Ball"].max_steps == 500


def test_video_of_an_environment_from_a_unity_project_is_refused(folder: Path):
    text = FILE.replace("source: builtin", "source: unity")
    text = text.replace("name: balance_ball", "project: U")
    (folder / "params.yaml").write_text(text.replace("seed: 9}", "seed: 9, video: true}"))
    with pytest.raises(SettingsError, match=r"base\.evaluation\.video: videos of a Unity player"):
        load_params(folder / "params.yaml")


def test_experiment_whose_run_has_the_same_name_as_a_run_of_a_sweep_trial_is_refused(folder: Path):
    file = folder / "params.yaml"
    twin = FILE[FILE.index("  base:\n") : FILE.index("sweeps:")].replace("base:", "rates-001:")
    file.write_text(FILE.replace("sweeps:\n", twin + "sweeps:\n"))
    expected = "'rates-001-1' has the name of a run of 'rates/001'; rename"
    with pytest.raises(SettingsError, match=expected):
        plan(load_params(file))


ADAPTIVE = FILE.replace(
    "method: grid", "method: optuna\n    runs: 6\n    seed: 3\n    parallel: 2\n    startup: 3"
).replace("[1e-4, 1e-3]", "{min: 1e-5, max: 1e-2, scale: log}")


def adaptive(folder: Path, text: str = ADAPTIVE) -> SweepParams:
    (folder / "params.yaml").write_text(text)
    return load_params(folder / "params.yaml").sweeps["rates"]


def searched(sweep: SweepParams, n: int) -> list[tuple[dict, float]]:
    """Return values and scores of `n` successive trials; the best learning rate is 1e-3."""
    results: dict[str, tuple[dict, float]] = {}
    for number in range(1, n + 1):
        values = sweep.propose(number, results, ())
        results[f"{number:03}"] = (values, -abs(math.log10(values[RATE]) + 3))
    return list(results.values())


def test_sweep_with_parallel_2_proposes_trial_n_after_the_result_of_trial_n_minus_2(folder):
    sweep = adaptive(folder)
    assert sweep.proposed() == {"003": "001", "004": "002", "005": "003", "006": "004"}
    trials = sweep.trials()
    assert list(trials) == ["001", "002", "003", "004", "005", "006"]
    assert [bool(values) for values in trials.values()] == [True, True, *[False] * 4]
    random = replace(sweep, method="random", parallel=None, startup=None)
    assert [trials["001"], trials["002"]] == [random.trials()["001"], random.trials()["002"]]
    assert sweep.propose(3, {}, ()) == random.trials()["003"], "the last of `startup`"


def test_equal_results_of_earlier_trials_give_equal_proposals_for_the_next_trial(folder: Path):
    sweep = adaptive(folder)
    history = searched(sweep, 12)
    assert history == searched(sweep, 12)
    assert history != searched(replace(sweep, seed=4), 12)
    assert all(1e-5 <= values[RATE] <= 1e-2 for values, _ in history)
    assert {values["behaviors.Ball.max_steps"] for values, _ in history} <= {500, 1000, 2000}
    waiting = [values for values, _ in history[-2:]]
    results = {str(n): result for n, result in enumerate(history[:-2])}
    assert sweep.propose(12, results, waiting) == sweep.propose(12, results, waiting)
    broken = results | {"99": (history[0][0], math.nan)}
    assert sweep.propose(12, broken, ())[RATE] > 0, "a score that is no number counts for nothing"


def test_proposed_trials_of_a_sweep_reach_better_scores_than_random_trials(folder: Path):
    def later(startup: int) -> float:
        sweeps = [replace(adaptive(folder), startup=startup, seed=seed) for seed in range(4)]
        return fmean(score for sweep in sweeps for _, score in searched(sweep, 20)[10:])

    assert later(startup=5) > 0.7 * later(startup=20), "nearer to the best, in decades"


def test_plan_has_an_entry_for_each_proposal(folder: Path):
    params = load_params(adaptive(folder) and folder / "params.yaml")
    proposals = plan(params)["runs"]["proposals"]
    assert list(proposals) == ["rates-003", "rates-004", "rates-005", "rates-006"]
    assert proposals["rates-004"]["told"] == "rates/002"
    sweep = params.sweeps["rates"]
    assert replace(sweep, behavior="Foe").search() != sweep.search(), "whose score counts"
    longer = adaptive(folder, ADAPTIVE.replace("runs: 6", "runs: 9"))
    assert longer.search() == params.sweeps["rates"].search()
    params = load_params(folder / "params.yaml")
    more = plan(params)["runs"]["proposals"]
    assert {key: more[key] for key in proposals} == proposals, "a longer sweep repeats nothing"
    with pytest.raises(SettingsError, match=r"003\.json.* missing: .*dvc repro propose@rates-003"):
        params.run_settings("rates/003")


def test_sweep_with_pruning_is_refused_for_several_learners(folder: Path):
    text = ADAPTIVE.replace("    seed: 3", "    seed: 3\n    prune_after: 100")
    text = text.replace("    seeds: [1, 2]", "    seeds: [1, 2]\n    learners: 2")
    with pytest.raises(SettingsError, match=r"rates\.prune_after: needs an experiment with one "):
        adaptive(folder, text)


@pytest.mark.parametrize(
    "method", ["grid", "random, runs: 9, seed: 1", "optuna, runs: 3, seed: 1", "list"]
)
def test_wrong_value_of_a_sweep_is_reported_at_the_line_of_the_value(method, folder):
    """The second trial of a list is checked before the sweep starts, too."""
    file, key = folder / "params.yaml", "behaviors.Ball.max_steps"
    lines = f"parameters:\n      {key}:\n      - 5\n      - many\n"
    if method == "list":
        lines = f"configurations:\n    - {key}: 5\n    - {key}: many\n"
    head = f"  rates:\n    experiment: base\n    seeds: [1]\n    method: {method}\n    {lines}"
    text = FILE.partition("  rates:")[0] + head.replace(", ", "\n    ")
    file.write_text(text.replace("many", "6"))
    check_settings(load_params(file))
    file.write_text(text)
    assert refusal(SettingsError, check_settings, load_params(file)) == (
        f"{file}:{text.count(chr(10))}: {key}: needs a whole number, got 'many'"
    )


# --- reports of Optuna users: unusable values were found only after hours -----------------------


def search(folder: Path, key: str, values: str, other: str = "max_steps: [50, 60]") -> Params:
    head = ADAPTIVE.partition(f"      {RATE}")[0]
    keys = f"      behaviors.Ball.{key}: {values}\n      behaviors.Ball.{other}\n"
    (folder / "params.yaml").write_text(f"{head}{keys}    seeds: [2]\n")
    return load_params(folder / "params.yaml")


UNUSABLE = {
    "a value of a list": ("network_settings.normalize", "[true, maybe]", "got 'maybe'"),
    "a misspelt value": ("network_settings.vis_encode_type", "[simple, natur]", "'natur' is not"),
    "a range from below": ("hyperparameters.beta", "{min: -0.001, max: 0.01}", "got -0.001"),
    "a range to above": ("hyperparameters.lambd", "{min: 0.9, max: 1.2}", "at most 1, got 1.2"),
    "fractions": ("network_settings.hidden_units", "{min: 32, max: 256}", "number, got 170.432"),
    "a key that is not there": ("hyperparameters.batch", "[1, 2]", "unknown key 'batch'"),
}


@pytest.mark.parametrize("wrong", UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_sweep_value_is_refused_before_the_first_trial(folder: Path, wrong):
    key, values, said = wrong
    params = search(folder, key, values)
    message = refusal(SettingsError, check_settings, params)
    line = ADAPTIVE.partition(RATE)[0].count("\n") + 1
    assert message.startswith(f"{params.path}:{line}: behaviors.Ball")
    assert key.rpartition(".")[2] in message
    assert said in message


def test_sweep_values_of_two_keys_that_contradict_each_other_are_refused(folder: Path):
    """Each value is allowed together with another value of the other key."""
    key, other = "network_settings.memory.sequence_length", "hyperparameters.batch_size:"
    check_settings(search(folder, key, "[16, 32]", f"{other} [32, 512]"))
    check_settings(search(folder, key, "[16, 256]", f"{other} [256, 512]"))
    params = search(folder, key, "[16, 256]", f"{other} [32, 512]")
    message = refusal(SettingsError, check_settings, params)
    assert "batch_size when using memory, got 256 with batch_size 32" in message


def test_sweep_with_only_allowed_values_is_accepted(folder: Path):
    for key, values in (
        ("hyperparameters.learning_rate", "{min: 1e-5, max: 1e-2, scale: log}"),
        ("network_settings.hidden_units", "{min: 32, max: 256, integer: true}"),
        ("network_settings.normalize", "[true, false]"),
        ("network_settings", "[{hidden_units: 4}, {num_layers: 3}]"),
    ):
        check_settings(search(folder, key, values))


def test_plan_refuses_a_swept_key_that_does_not_exist(folder: Path):
    file = folder / "params.yaml"
    file.write_text(FILE.replace("Ball.max_steps", "Ball.max_stepz"))
    with pytest.raises(SettingsError, match=r"params\.yaml:23: .*max_stepz.*did you mean"):
        write_plan(load_params(file), folder / "runs.yaml")
