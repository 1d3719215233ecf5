"""Settings of one experiment, stage, trial or behavior do not depend on the others."""

import itertools
import json
from dataclasses import replace

import pytest
import yaml

from pipeline.errors import SettingsError
from pipeline.plugins import Group
from pipeline.settings import load_run_settings, parse_yaml, to_mapping
from pipeline.settings.project.params import Params, load_params
from pipeline.settings.project.plan import plan
from pipeline.settings.project.sweeps import Axis, Interval
from pipeline.settings.trainer.run_file import demonstrations, structure
from pipeline.settings.trainer.schema import (
    HYPERPARAMETERS,
    RunSettings,
    SACSettings,
)

RATE, STEPS = "behaviors.Ball.hyperparameters.learning_rate", "behaviors.Ball.max_steps"
FILE = yaml.safe_load(f"""
environments: {{ball: {{source: builtin, name: balance_ball}}}}
demonstrations: {{expert: {{environment: ball, episodes: 5, seed: 1}}}}
experiments:
  cloned:
    environment: ball
    trainer: t.yaml
    overrides: {{{STEPS}: 700}}
    demonstrations: expert
    pretrain: {{epochs: 1, batch_size: 2, learning_rate: 0.1}}
    seeds: [3]
    stages: [pretrain, train, export, evaluate]
    evaluation: {{episodes: 2, seed: 9, video: true}}
    learners: 2
    resources: {{threads: 4}}
  base:
    environment: ball
    trainer: u.yaml
    overrides: {{behaviors: {{Ball: {{max_steps: 800}}}}}}
    seeds: [1, 2]
    stages: [train, export, evaluate]
    evaluation: {{episodes: 2, seed: 9, video: true}}
    resources: {{threads: 3}}
sweeps:
  grid:
    experiment: base
    method: grid
    parameters: {{{STEPS}: [900], {RATE}: [0.1, 0.2]}}
    seeds: [5]
    best: {{seeds: [7]}}
  search:
    experiment: base
    method: optuna
    parameters: {{{RATE}: {{min: 0.1, max: 0.9}}, {STEPS}: [500, 600]}}
    runs: 3
    seed: 4
    startup: 1
    seeds: [6]
    metric: min_return
    goal: minimize
""")


def described(folder, **sections) -> Params:
    """Return the parameters of FILE, with some sections replaced."""
    for name, trainer in (("t", "sac"), ("u", "ppo")):
        (folder / f"{name}.yaml").write_text(f"behaviors: {{Ball: {{trainer_type: {trainer}}}}}\n")
    (folder / "params.yaml").write_text(yaml.safe_dump(FILE | sections, sort_keys=False))
    return load_params(folder / "params.yaml")


@pytest.fixture
def params(tmp_path) -> Params:
    return described(tmp_path)


def test_plan_has_an_entry_for_each_stage_of_each_run_with_its_dependencies(params, monkeypatch):
    """Threads, plug-ins and sweep values are dependencies of pretrain and train only."""
    packages = {"cloned": {"a": "1"}, "base": {}, "grid/002": {"b": "2"}}
    monkeypatch.setattr(Params, "plugins", lambda _self, name: packages.get(name, {}))

    def run(name: str, seed: int, **more: object) -> dict[str, object]:
        base, trainer = ("cloned", "t.yaml") if name == "cloned" else ("base", "u.yaml")
        common = {"experiment": name, "base": base, "seed": seed, "environment": "ball"}
        return common | {"trainer": trainer} | more

    tables = plan(params)["runs"]
    cloned = run("cloned", 3, demonstrations="expert")
    learning = cloned | {"plugins": {"a": "1"}, "threads": 4}
    (pretrained,) = tables["pretrain"].values()
    assert pretrained.pop("network")
    assert pretrained == learning
    assert tables["train_pretrained"] == {"cloned-3": learning | {"learners": 2}}
    first = tables["train_from_scratch"]["search-001-6"]
    assert first.keys() >= {"values", "threads"}
    trials = {number: {STEPS: 900, RATE: rate} for number, rate in (("001", 0.1), ("002", 0.2))}
    plain, plugged = ({"values": values, "threads": 3} for values in trials.values())
    trained = {
        "grid-001-5": run("grid/001", 5, **plain),
        "grid-002-5": run("grid/002", 5, **plugged, plugins={"b": "2"}),
        "search-001-6": first,
        **{f"base-{seed}": run("base", seed, threads=3) for seed in (1, 2)},
    }
    assert tables["train_from_scratch"] == trained
    assert list(tables["train_from_scratch"]) == list(trained), "trials, and then experiments"
    chosen = {
        f"search-{n}-6": run(f"search/{n}", 6, threads=3, chosen=f"results/propose/search/{n}.json")
        for n in ("002", "003")
    }
    best = run("grid_best", 7)
    chosen["grid_best-7"] = best | {"threads": 3, "chosen": "results/sweep/grid/best.json"}
    assert tables["train_chosen"] == chosen
    plain = {
        **{f"grid-{n}-5": run(f"grid/{n}", 5) for n in ("001", "002")},
        **{f"search-{n}-6": run(f"search/{n}", 6) for n in ("001", "002", "003")},
    }
    filmed = {"cloned-3": cloned, "grid_best-7": best}
    filmed |= {f"base-{seed}": run("base", seed) for seed in (1, 2)}
    assert tables["evaluate"] == plain
    assert tables["evaluate_video"] == filmed
    assert tables["export"] == plain | filmed
    assert tables["demonstrations"] == {"expert": {"environment": "ball"}}
    assert tables["file_demonstrations"] == {}
    grid = {"experiment": "base", "metric": "mean_return", "goal": "maximize", "seeds": [5]}
    assert tables["sweeps"]["grid"] == grid | {"trials": trials}
    search = tables["sweeps"]["search"]
    assert [search[key] for key in ("metric", "goal", "seeds")] == ["min_return", "minimize", [6]]
    for number, (told, before) in enumerate(
        [("001", "build/env/ball"), ("002", "results/propose/search/002.json")], start=2
    ):
        entry = tables["proposals"][f"search-00{number}"]
        assert entry.pop("search")
        names = {"trial": f"search/00{number}", "told": f"search/{told}"}
        assert entry == names | {"before": before, "seeds": [6]}


def test_settings_of_a_run_do_not_depend_on_which_runs_were_read_earlier(params: Params) -> None:
    steps = {"cloned": 700, "base": 800, "grid/001": 900, "grid/002": 900, "grid_best": 800}
    rates = {"cloned": 3e-4, "base": 3e-4, "grid/001": 0.1, "grid/002": 0.2, "grid_best": 0.6}
    chosen = params.path.parent / "results/sweep/grid/best.json"
    chosen.parent.mkdir(parents=True)
    chosen.write_text(json.dumps({"values": {RATE: 0.6}}))
    for order in itertools.permutations(steps, 3):
        for name in order:
            ball = params.run_settings(name).behaviors["Ball"]
            assert ball.max_steps == steps[name]
            assert ball.hyperparameters.learning_rate == rates[name]
            assert ball.trainer_type == ("sac" if name == "cloned" else "ppo")
    for value in (0.5, 0.25):
        ball = params.trial_settings("grid", {RATE: value}).behaviors["Ball"]
        assert (ball.trainer_type, ball.max_steps) == ("ppo", 800)
        assert ball.hyperparameters.learning_rate == value
    first = params.sweeps["search"].trials()["001"]
    ball = params.run_settings("search/001").behaviors["Ball"]
    assert (ball.hyperparameters.learning_rate, ball.max_steps) == (first[RATE], first[STEPS])


def test_recorded_plugin_versions_of_a_run_follow_from_its_settings_with_overrides(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(HYPERPARAMETERS), "has_plugins", True)
    monkeypatch.setattr(RunSettings, "plugins", lambda self: self.behaviors["Ball"].max_steps)
    steps = {"cloned": 700, "base": 800, "grid_best": 800}
    assert {name: params.plugins(name) for name in params.experiments} == steps


BEHAVIORS = yaml.safe_load("""
Sac: {trainer_type: sac, hyperparameters: {tau: 0.5}}
Memory:
  network_settings: {memory: {memory_size: 8}, conditioning_type: hyper}
  hyperparameters: {batch_size: 99}
Signals:
  reward_signals:
    extrinsic: null
    curiosity: {network_settings: {conditioning_type: hyper, num_layers: 1}}
    rnd: {encoding_size: 17}
Plain: {max_steps: 4}
""")
DEFAULTS = yaml.safe_load("""
trainer_type: ppo
hyperparameters: {learning_rate: 0.01, beta: 0.5, batch_size: 77}
network_settings: {hidden_units: 24}
reward_signals: {extrinsic: {gamma: 0.7}, curiosity: {strength: 0.3}}
max_steps: 9
""")


def test_settings_that_a_behavior_inherits_do_not_depend_on_the_other_behaviors() -> None:
    def read(*names: str) -> RunSettings:
        behaviors = {name: BEHAVIORS[name] for name in names}
        overrides = {"default_settings": DEFAULTS, "behaviors": behaviors}
        return load_run_settings(None, overrides=overrides)

    alone = {name: read(name).behaviors[name] for name in BEHAVIORS}
    defaults = read().default_settings
    for order in itertools.permutations(BEHAVIORS):
        together = read(*order)
        assert together.behaviors == alone
        assert together.default_settings == defaults == together.for_behavior("Other")
    assert alone["Sac"].hyperparameters == SACSettings(tau=0.5, learning_rate=0.01, batch_size=77)
    assert alone["Sac"].max_steps == 9
    assert alone["Memory"].hyperparameters.batch_size == 99
    assert [alone["Memory"].hyperparameters.beta, defaults.hyperparameters.beta] == [0.5, 0.5]
    signals = alone["Signals"].reward_signals
    assert list(signals) == ["curiosity", "rnd"]
    assert signals["curiosity"].strength == 0.3
    networks = [signals[name].network_settings for name in signals]
    assert [networks[0].num_layers, networks[1].hidden_units] == [1, 17]
    assert alone["Plain"].reward_signals == defaults.reward_signals


def test_optuna_study_gets_every_trial_with_values_score_and_state(params, monkeypatch):
    optuna = pytest.importorskip("optuna")
    told, seeds = [], []

    class Study:
        def __init__(self, *, direction: str, sampler: object) -> None:
            assert sampler is None, "what the patched one gives"
            told.append(direction)

        def add_trial(self, trial: optuna.trial.FrozenTrial) -> None:
            told.append((trial.params[RATE], trial.params[STEPS], trial.state.name, trial.value))

        def ask(self, space: dict) -> object:
            drawn = {RATE: 0.25, STEPS: 1}
            return optuna.trial.create_trial(params=drawn, distributions=space, value=0.0)

    monkeypatch.setattr(optuna, "create_study", Study)
    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda **options: seeds.append(options))
    results = {"001": ({RATE: 0.3, STEPS: 600}, 7.0)}
    results["002"] = ({RATE: 0.5, STEPS: 500}, float("nan"))
    waiting = [{RATE: 0.6, STEPS: 500}, {RATE: 0.7, STEPS: 600}]
    sweep = params.sweeps["search"]
    assert [sweep.propose(n, results, waiting) for n in (5, 6)] == [{RATE: 0.25, STEPS: 600}] * 2
    trials = [(0.3, 1, "COMPLETE", 7.0), (0.5, 0, "FAIL", None)]
    trials += [(0.6, 0, "RUNNING", None), (0.7, 1, "RUNNING", None)]
    assert told == ["minimize", *trials] * 2
    replace(sweep, seed=9).propose(5, results, waiting)
    assert len({options["seed"] for options in seeds}) == 3, "of each seed and trial its own"


def test_random_sweep_draws_different_values_for_each_key_trial_and_seed(params: Params) -> None:
    axes = {key: Axis(interval=Interval(min=0, max=1)) for key in ("a", "b")}
    search = params.sweeps["search"]
    sweep = replace(search, method="random", parameters=axes, runs=9, startup=None)
    trials = [*sweep.trials().values(), *replace(sweep, seed=5).trials().values()]
    assert len({value for values in trials for value in values.values()}) == 2 * 2 * 9


def test_demonstration_paths_of_reward_signals_and_behavioral_cloning_are_listed_in_order() -> None:
    gail = {"demo_path": ["a.demo", {"path": "b.demo", "weight": 2}]}
    trainer = {
        "reward_signals": {"extrinsic": {}, "rnd": {}, "gail": gail},
        "behavioral_cloning": {"demo_path": "c.demo"},
    }
    settings = load_run_settings(None, overrides={"behaviors": {"B": trainer}})
    assert list(demonstrations(settings.behaviors["B"])) == [
        ("reward_signals.gail.demo_path[0]", "a.demo"),
        ("reward_signals.gail.demo_path[1]", "b.demo"),
        ("behavioral_cloning.demo_path[0]", "c.demo"),
    ]


def test_checked_samples_of_a_sweep_with_many_combinations_vary_one_key_at_a_time(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.settings.project.sweeps._MOST_COMBINATIONS", 5)
    axes = {"a": Axis(values=(1, 2)), "b": Axis(values=(3, 4, 5))}
    samples = list(replace(params.sweeps["search"], parameters=axes).samples())
    pairs = [(values["a"], values["b"]) for values in samples]
    assert pairs == [(1, 3), (2, 3), (1, 3), (1, 4), (1, 5)]


def test_method_network_settings_returns_only_trainer_types_and_network_sections(params):
    networks, folder = "network_settings: {hidden_units: 24}", params.path.parent
    defaults = f"default_settings: {{trainer_type: poca, {networks}, max_steps: 9}}\n"
    ball = "{trainer_type: sac, network_settings: {num_layers: 1}}"
    (folder / "t.yaml").write_text(f"{defaults}behaviors: {{Ball: {ball}}}\n")
    (folder / "u.yaml").write_text(f"behaviors: {{Ball: {{{networks}}}}}\n")
    reduced, others = params.network_settings("cloned"), params.network_settings("base")
    ball, default = reduced.behaviors["Ball"], reduced.for_behavior("Other")
    assert (ball.trainer_type, default.trainer_type) == ("sac", "poca")
    assert (ball.network_settings.hidden_units, ball.network_settings.num_layers) == (24, 1)
    assert (default.network_settings.hidden_units, default.network_settings.num_layers) == (24, 2)
    assert ball.max_steps == default.max_steps == 500_000
    assert (others.behaviors["Ball"].trainer_type, others.default_settings) == ("ppo", None)
    with pytest.raises(SettingsError, match="The behavior name Other has not been specified"):
        others.for_behavior("Other")


def test_canonical_form_of_params_yaml_leaves_out_the_best_of_a_sweep(params: Params) -> None:
    """Its values are not known yet; notations of values are in tests/field/test_snakemake_users."""
    assert params.in_one_spelling()["experiments"].keys() == {"cloned", "base"}


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("base", [("base", 1), ("base", 2)]),
        ("base-3", []),
        ("to-and-fro-3", [("to-and-fro", 3)]),
        ("grid", [("grid/001", 5), ("grid/002", 5), ("grid_best", 7)]),
        ("search", [(f"search/00{number}", 6) for number in (1, 2, 3)]),
        ("few", [("base", 2), ("to-and-fro", 3), ("base", 1), ("grid_best", 7)]),
        ("swept", [("base", 1), ("grid/001", 5), ("grid/002", 5), ("grid_best", 7)]),
    ],
)
def test_runs_named_by_an_experiment_a_sweep_or_a_subset_are_listed_only_once(name, runs, tmp_path):
    experiments = {"to-and-fro" if k == "cloned" else k: v for k, v in FILE["experiments"].items()}
    few = ["base-2", "to-and-fro-3", "base", "grid_best"]
    subsets = {"few": few, "swept": ["base-1", "grid"]}
    params = described(tmp_path, experiments=experiments, subsets=subsets)
    assert params.runs_of(name) == runs


def test_recorded_plugins_are_the_trainers_signals_and_encoders_of_behaviors_and_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def versions(group: Group, *names: str) -> dict[str, str]:
        return {f"{name} of {group.name.partition('.')[2]}": "1" for name in names}

    monkeypatch.setattr(Group, "versions", versions)
    settings = read_text("""
behaviors:
  A:
    trainer_type: ppo
    network_settings: {vis_encode_type: resnet}
    reward_signals: {extrinsic: {}, rnd: {network_settings: {vis_encode_type: nature_cnn}}}
  B: {trainer_type: sac, reward_signals: {extrinsic: null, curiosity: {}}}
default_settings: {trainer_type: poca, network_settings: {vis_encode_type: match3}}
""")
    used = {
        "algorithms": ("ppo", "sac", "poca"),
        "encoders": ("match3", "nature_cnn", "resnet", "simple"),
        "reward_signals": ("extrinsic", "rnd", "curiosity"),
    }
    assert list(settings.plugins()) == sorted(
        f"{name} of {group}" for group, names in used.items() for name in names
    )


def test_line_of_a_setting_is_searched_in_the_behavior_and_then_in_default_settings() -> None:
    places = {"default_settings.init_path": "f:1", "behaviors.A.init_path": "f:2"}
    places |= {"env_settings.env_path": "f:3", "default_settings.env_path": "f:4"}
    settings = RunSettings(places=places)
    for key, place in {
        "behaviors.A.init_path": "f:2",
        "behaviors.B.init_path": "f:1",
        "behaviors.B.demo_path": None,
        "env_settings.env_path": "f:3",
        "torch_settings.B.init_path": None,
    }.items():
        assert settings.place_of(key) == place


def test_behavior_that_gets_default_settings_is_not_added_to_the_listed_behaviors() -> None:
    settings = read_text("default_settings: {max_steps: 5}\nbehaviors: {A: {max_steps: 6}}")
    before = to_mapping(settings)
    for name, steps in {"B?team=1": 5, "A?team=0": 6, "C": 5, "B": 5}.items():
        assert settings.for_behavior(name).max_steps == steps
    assert to_mapping(settings) == before


def read_text(text: str) -> RunSettings:
    return structure(parse_yaml(text, source="f"))


def test_mistakes_in_several_reward_signals_are_reported_together() -> None:
    signals = "{extrinsic: {gamma: 7}, gial: {}}"
    with pytest.raises(SettingsError, match=r"gamma: must be at most 1.*\n.*'gial'") as caught:
        read_text(f"behaviors: {{A: {{reward_signals: {signals}}}}}")
    assert len(caught.value.parts) == 2


def test_parsed_document_with_deprecated_keys_can_be_converted_to_settings_twice(caplog) -> None:
    old = "framework: x, network_settings: {conditioning_type: none}"
    signals = "reward_signals: {curiosity: {encoding_size: 9}}"
    document = parse_yaml(f"behaviors: {{A: {{{old}, {signals}}}}}", source="f")
    first, n_told = structure(document), len(caplog.messages)
    assert structure(document) == first
    assert first.behaviors["A"].reward_signals["curiosity"].network_settings.hidden_units == 9
    assert (n_told, len(caplog.messages)) == (3, 6)


def test_reward_signal_removed_with_null_stays_removed_when_settings_are_written_and_read() -> None:
    defaults = "default_settings: {trainer_type: ppo, reward_signals: {extrinsic: {}, rnd: {}}}\n"
    loaded = read_text(f"{defaults}behaviors: {{A: {{reward_signals: {{rnd: null}}}}, B: {{}}}}")
    written = to_mapping(loaded)
    signals = written["behaviors"]["A"]["reward_signals"]
    assert (list(signals), signals["rnd"]) == (["extrinsic", "rnd"], None)
    assert load_run_settings(None, overrides=written) == loaded


def test_deprecated_key_in_default_settings_is_warned_about_once(caplog) -> None:
    defaults = {"trainer_type": "ppo", "framework": "tensorflow", "max_steps": 7}
    overrides = {"default_settings": defaults, "behaviors": {"A": {}, "B": {}}}
    loaded = load_run_settings(None, overrides=overrides)
    assert [loaded.behaviors[name].max_steps for name in "AB"] == [7, 7]
    assert len(caplog.messages) == 1, "once, where it is written"
