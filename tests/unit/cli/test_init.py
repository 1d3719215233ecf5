import re
import time
from pathlib import Path

import pytest
import yaml

from pipeline.cli.init import Behavior, dvc_yaml, template, trainer_of
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.settings import load_run_settings
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import check_plan
from pipeline.simulators import registry

ROOT = Path(__file__).resolve().parents[3]
VECTOR, IMAGE = ObservationSpec.vector(8), ObservationSpec.visual(3, 64, 64)
STEER, CHOOSE = ActionSpec(2, ()), ActionSpec(0, (5,))


def behavior(*observations: ObservationSpec, actions: ActionSpec = STEER, n_agents=12, **more):
    return Behavior(spec=BehaviorSpec(list(observations), actions), n_agents=n_agents, **more)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (behavior(VECTOR), {"trainer_type": "ppo", "vis_encode_type": "simple"}),
        (behavior(VECTOR), {"trainer_type": "ppo", "hidden_units": 64}),
        (behavior(IMAGE, actions=CHOOSE), {"vis_encode_type": "nature_cnn", "normalize": False}),
        (behavior(ObservationSpec.visual(1, 20, 30)), {"vis_encode_type": "simple"}),
        (behavior(ObservationSpec.visual(4, 7, 7)), {"vis_encode_type": "match3"}),
        (behavior(ObservationSpec.entities(9, 5), IMAGE), {"normalize": True}),
        (behavior(VECTOR, in_groups=True), {"trainer_type": "poca"}),
        (behavior(VECTOR, n_teams=2), {"learning_rate_schedule": "constant"}),
        (behavior(VECTOR, n_agents=1), {"buffer_size": 2048, "batch_size": 128}),
        (behavior(VECTOR, n_agents=1000), {"buffer_size": 16384}),
        (behavior(VECTOR), {"trainer_type": "sac", "steps_per_update": 12, "init_entcoef": 0.5}),
        (behavior(VECTOR), {"trainer_type": "sac", "buffer_size": 200_000}),
        (behavior(IMAGE), {"trainer_type": "sac", "buffer_size": 2**28 // (3 * 64 * 64)}),
        (behavior(VECTOR, actions=CHOOSE), {"trainer_type": "sac", "init_entcoef": 0.05}),
        (behavior(VECTOR, in_groups=True), {"trainer_type": "sac"}),
        (behavior(VECTOR, n_agents=1, exchange_ms=14.0), {"trainer_type": "xqc", "tau": 0.05}),
        (behavior(VECTOR, n_agents=1, exchange_ms=0.1), {"trainer_type": "ppo"}),
        (behavior(VECTOR, n_agents=1), {"trainer_type": "ppo"}),
        (behavior(VECTOR, n_agents=2, exchange_ms=14.0), {"trainer_type": "ppo"}),
        (behavior(IMAGE, n_agents=1, exchange_ms=14.0), {"trainer_type": "ppo"}),
        (behavior(VECTOR, actions=CHOOSE, n_agents=1, exchange_ms=14.0), {"trainer_type": "ppo"}),
    ],
)
def test_init_chooses_trainer_settings_that_fit_observations_and_actions(given, expected):
    trainer = "sac" if expected.get("trainer_type") == "sac" else None
    settings = load_run_settings(None, overrides={"behaviors": {"B": trainer_of(given, trainer)}})
    chosen = settings.behaviors["B"]
    for key, value in expected.items():
        parts = chosen, chosen.hyperparameters, chosen.network_settings
        assert next(getattr(part, key) for part in parts if hasattr(part, key)) == value
    assert (chosen.self_play is not None) == (given.n_teams > 1)


@pytest.mark.parametrize("name", ["balance_ball", "grid_world"])
def test_init_writes_valid_xqc_settings(name, here, printed):
    printed("init", "own", "--env", name, "--trainer", "xqc")
    (behavior_settings,) = load_run_settings(f"own/config/{name}.yaml").behaviors.values()
    ours = load_run_settings(ROOT / "config/xqc/3DBall.yaml").behaviors["3DBall"]
    network = behavior_settings.network_settings
    assert (network.hidden_units, network.num_layers) == (256, 2)
    h = behavior_settings.hyperparameters
    for key in ("batch_size", "buffer_init_steps", "learning_rate", "tau", "critic"):
        assert getattr(h, key) == getattr(ours.hyperparameters, key)
    assert list(behavior_settings.contrary_sizes()) == []


def test_init_chooses_xqc_for_one_agent_in_a_slow_environment(here, monkeypatch, printed):
    class Slow:
        def __init__(self):
            self._simulator = registry.make("balance_ball", seed=1, n_agents=1)

        def __getattr__(self, name):
            return getattr(self._simulator, name)

        def step(self, actions):
            time.sleep(0.003)
            return self._simulator.step(actions)

    monkeypatch.setattr("pipeline.api.make_env", lambda *_, **__: InProcessEnvironment(Slow()))
    out = printed("init", "own", "--env", "balance_ball")
    assert re.search(r"3DBall with 1 agents, .*2 continuous, \d+\.\d ms for a step\.", out)
    assert list(load_params("own/params.yaml").experiments) == ["balance_ball_xqc"]


def test_init_sets_one_environment_copy_for_xqc(here, printed):
    printed("init", "own", "--gymnasium", "Pendulum-v1", "--trainer", "xqc")
    params = load_params("own/params.yaml")
    (environment,) = params.environments.values()
    assert environment.copies == 1
    (behavior_settings,) = params.run_settings("pendulum_v1_xqc").behaviors.values()
    assert behavior_settings.hyperparameters.steps_per_update == 1


def test_init_with_demonstrations_adds_the_pretrain_stage(here, monkeypatch, refused, printed):
    words = ["own", "--env", "balance_ball", "--demo"]
    assert "--demo: no.demo does not exist" in refused("init", *words, "no.demo")
    Path("played.demo").write_bytes(b"")
    printed("init", *words, "played.demo")
    params = load_params("own/params.yaml")
    assert params.demonstrations["balance_ball_demo"].file == "../played.demo"
    (experiment,) = params.experiments.values()
    assert experiment.stages == ("pretrain", "train", "export", "evaluate")
    assert experiment.demonstrations == "balance_ball_demo"
    assert experiment.pretrain is not None
    monkeypatch.chdir(here / "own")
    printed("plan")


def test_project_dvc_yaml_equals_repository_dvc_yaml_without_source_folders():
    text = dvc_yaml((ROOT / "dvc.yaml").read_text())
    ours, theirs = yaml.safe_load((ROOT / "dvc.yaml").read_text()), yaml.safe_load(text)
    assert "workflow/scripts" not in text
    assert "src/pipeline" not in text
    check = theirs["stages"].pop("check")
    assert check["always_changed"] is True
    assert check["deps"] == ["config", "workflow/runs.yaml"]
    del ours["stages"]["check"]
    expected = yaml.safe_dump(ours).replace("workflow/scripts/", "-m pipeline.dag ")
    assert expected.replace(".py ", " ").replace("report.py", "report") == yaml.safe_dump(theirs)


def test_snakefile_of_a_project_imports_only_the_function_checkout():
    lines = [line for line in template("Snakefile").splitlines() if "import" in line]
    assert lines == ["from pipeline.dag.project import checkout"]
    assert template("Snakefile").count("checkout()") == 1


def steps(settings) -> int:
    return sum(behavior.max_steps for behavior in settings.behaviors.values())


@pytest.mark.parametrize(
    "words",
    [["--env", "balance_ball"], ["--env", "cart_env:make"], ["--pettingzoo", "mpe2.simple_tag_v3"]],
)
def test_project_made_by_init_has_a_valid_plan(words, here, monkeypatch, printed):
    own = here / "own"
    own.mkdir()
    (own / "cart_env.py").write_text(
        "import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n"
    )
    (own / ".gitignore").write_text("mine\n")
    (own / "README.md").write_text("mine\n")
    printed("init", "own", *words)
    params = load_params(own / "params.yaml")
    monkeypatch.chdir(own)
    check_plan(params)
    (name,) = params.experiments
    assert steps(params.run_settings(name)) >= 300_000
    text = Path("params.yaml").read_text()
    tried = re.sub(r"(overrides:) \{\}\n +# Does .*\n", r"\1\n", text).replace("    #   ", "      ")
    Path("params.yaml").write_text(tried)
    n_steps = steps(load_params().run_settings(name))
    planned = printed("plan").splitlines()[-1]
    assert planned == f"To train in all: 1 experiment, 3 runs, {3 * n_steps:,} steps."
    assert n_steps <= 8192
    head, second = tried.split("  # A second experiment, ")
    second = re.sub("^  # ", "  ", second.partition("  #\n")[2], flags=re.MULTILINE)
    Path("params.yaml").write_text(head + second)
    page = (ROOT / "docs/tutorials/unity.md").read_text()
    assert (f"experiments:\n{second}```" in page) == ("balance_ball" in words)
    params = load_params()
    rates = [
        {trainer.hyperparameters.learning_rate for trainer in settings.behaviors.values()}
        for settings in map(params.run_settings, params.experiments)
    ]
    (rate,), (lower,) = rates
    assert lower == pytest.approx(rate / 3, rel=0.2)
    planned = printed("plan").splitlines()[-1]
    assert planned.startswith("To train in all: 2 experiments, 6 runs, ")
    assert Path(".gitignore").read_text().startswith("mine\n\n__pycache__")
    assert Path("README.md").read_text() == "mine\n"
    assert str(here) not in Path("params.yaml").read_text()
    assert Path(".git").is_dir()


def test_init_says_that_the_default_environment_is_an_example(here, printed):
    text = "balance_ball is an example; give your own environment by --env"
    assert text in printed("init", "example")
    assert "example" not in printed("init", "asked", "--env", "balance_ball")


def test_init_names_the_environment_of_a_unity_build_after_the_project_folder(here, fake, printed):
    program = fake()
    assert "Echo with" in printed("init", "game", "--unity", program.name)
    ((name, environment),) = load_params(here / "game/params.yaml").environments.items()
    assert (name, environment.path) == ("game", "../fake")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["there", "--env", "balance_ball"], "there: has params.yaml already"),
        (["file"], "file: is a file"),
        (["new", "--gymnasium", "CartPole-v9"], "CartPole-v9"),
        (["new", "--env", "nothing_so"], "nothing_so"),
        (["new", "--unity", "no/build"], "no/build"),
        (["new", "--unity", "project"], "project: is a Unity project; build it in the Editor"),
        (["new", "--env", "a", "--unity", "b"], "not allowed with argument"),
    ],
)
def test_init_refuses_invalid_arguments_and_leaves_no_files(words, said, here, refused):
    (here / "there").mkdir()
    (here / "there/params.yaml").write_text("mine\n")
    (here / "file").write_text("")
    (here / "project/ProjectSettings").mkdir(parents=True)
    assert said in refused("init", *words)
    assert not (here / "new").exists()
    assert [path.name for path in (here / "there").iterdir()] == ["params.yaml"]
