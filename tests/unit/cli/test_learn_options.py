"""Every option that `mlagents-learn` has or had is accepted, and changes its setting."""

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal

from pipeline.cli import learn_settings
from pipeline.cli import main as cli
from pipeline.cli.learn_settings import OPTIONS, Plan, plan_of
from pipeline.errors import SettingsError
from pipeline.settings.project.experiments import SINKS

CONFIG = """\
default_settings: {trainer_type: ppo}
behaviors:
  Rover: {max_steps: 1000}
  Drone: {max_steps: 2000}
env_settings: {env_path: Game, num_envs: 4, seed: 7, base_port: 6000}
engine_settings: {time_scale: 10, no_graphics: false}
checkpoint_settings: {run_id: from-the-file}
"""

PRESENT: dict[str, tuple[list[str], str, Any]] = {
    "--env": (["Other"], "env_settings.env_path", "Other"),
    "--resume": ([], "checkpoint_settings.resume", True),
    "--force": ([], "checkpoint_settings.force", True),
    "--run-id": (["007"], "checkpoint_settings.run_id", "007"),
    "--initialize-from": (["old"], "checkpoint_settings.initialize_from", "old"),
    "--inference": ([], "checkpoint_settings.inference", True),
    "--deterministic": ([], "behaviors.Rover.network_settings.deterministic", True),
    "--seed": (["12"], "env_settings.seed", 12),
    "--base-port": (["7000"], "env_settings.base_port", 7000),
    "--num-envs": (["1"], "env_settings.num_envs", 1),
    "--num-areas": (["3"], "env_settings.num_areas", 3),
    "--env-args": (["--level", "7", "--seed"], "env_settings.env_args", ("--level", "7", "--seed")),
    "--max-lifetime-restarts": (["-1"], "env_settings.max_lifetime_restarts", -1),
    "--restarts-rate-limit-n": (["5"], "env_settings.restarts_rate_limit_n", 5),
    "--restarts-rate-limit-period-s": (["9"], "env_settings.restarts_rate_limit_period_s", 9),
    "--timeout-wait": (["30"], "env_settings.timeout_wait", 30),
    "--results-dir": (["out"], "checkpoint_settings.results_dir", "out"),
    "--debug": ([], "debug", True),
    "--width": (["100"], "engine_settings.width", 100),
    "--height": (["50"], "engine_settings.height", 50),
    "--quality-level": (["0"], "engine_settings.quality_level", 0),
    "--time-scale": (["1.5"], "engine_settings.time_scale", 1.5),
    "--target-frame-rate": (["30"], "engine_settings.target_frame_rate", 30),
    "--capture-frame-rate": (["0"], "engine_settings.capture_frame_rate", 0),
    "--no-graphics": ([], "engine_settings.no_graphics", True),
    "--no-graphics-monitor": ([], "engine_settings.no_graphics_monitor", True),
    "--torch-device": (["cuda:0"], "torch_settings.device", "cuda:0"),
    "--torch-compile": ([], "torch_settings.compile", True),
    "--threads": (["4"], "torch_settings.threads", 4),
}
RETIRED: dict[str, tuple[list[str], str | None, Any]] = {
    "--load": ([], "checkpoint_settings.resume", True),
    "--train": ([], "checkpoint_settings.train_model", True),
    "--torch": ([], None, None),
    "--tensorflow": ([], None, None),
    "--keep-checkpoints": (["9"], "behaviors.Drone.keep_checkpoints", 9),
    "--save-freq": (["300"], "behaviors.Drone.checkpoint_interval", 300),
    "--slow": ([], "engine_settings.time_scale", 1.0),
    "--cpu": ([], "torch_settings.device", "cpu"),
    "--multi-gpu": ([], None, None),
    "--docker-target-name": (["vol"], "env_settings.env_path", "/vol/Game"),
    "--lesson": (["2"], None, None),
    "--worker-id": (["2"], None, None),
    "--curriculum": (["lessons.yaml"], None, None),
    "--sampler": (["sampler.yaml"], None, None),
}
"""By option: its values, the setting that it changes, and the setting's expected value."""
OURS = {
    "--attach",
    "--learners",
    "--num-runs",  # an option of mlagents-learn 0.5 to 0.12, removed there without a replacement
    "--portable",
    "--track",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def parsed(*arguments: str) -> argparse.Namespace:
    return cli.parser_for(["learn"]).parse_args(["learn", *arguments])


def plan(*arguments: str | Path) -> Plan:
    return plan_of(parsed(*map(str, arguments)))


def at(value: Any, key: str) -> Any:
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def test_learn_has_exactly_the_options_of_all_mlagents_releases_and_our_own():
    listed = {option.flag for option in OPTIONS}
    assert listed | {"--debug"} == PRESENT.keys() | RETIRED.keys() | OURS
    assert {option.flag for option in OPTIONS if option.note} == RETIRED.keys()


@pytest.mark.parametrize("flag", PRESENT)
def test_current_option_overrides_the_configuration_file_without_a_warning(flag, config, caplog):
    values, key, expected = PRESENT[flag]
    before = at(plan(config).settings, key)
    caplog.clear()
    after = at(plan(config, flag, *values).settings, key)
    assert after == expected != before
    assert not [r for r in caplog.records if "retired" in r.message]


@pytest.mark.parametrize("flag", RETIRED)
def test_retired_option_still_works_and_logs_its_replacement(flag, config, caplog, monkeypatch):
    values, key, expected = RETIRED[flag]
    real = learn_settings.load_run_settings

    def load(path, *, curriculum=None, sampler=None, **more):
        return real(config, **more)  # whatever path --docker-target-name gives

    monkeypatch.setattr(learn_settings, "load_run_settings", load)
    with caplog.at_level(logging.WARNING):
        settings = plan(config, flag, *values).settings
    notes = [r.message for r in caplog.records if "retired" in r.message]
    assert len(notes) == 1
    assert notes[0].startswith(f"{flag} is retired: ")
    assert "\n" not in notes[0]
    if key is not None:
        assert at(settings, key) == expected


def test_learners_and_lesson_are_used_and_num_runs_is_refused_with_torchrun(config, monkeypatch):
    assert (plan(config).learners, plan(config).starting_lesson) == (1, None)
    given = plan(config, "--learners", "3", "--lesson", "2")
    assert (given.learners, given.starting_lesson) == (3, 2)
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    message = refusal(SettingsError, plan, config, "--num-runs", "2")
    assert message.startswith("--num-runs: 2 runs cannot be trained by")


def test_option_track_accepts_names_separated_by_commas_and_may_be_repeated(config):
    assert plan(config).track is None
    sinks = plan(config, "--track", "jsonl,tensorboard", "--track", "jsonl").track
    assert sinks == ("jsonl", "tensorboard")
    assert refusal(SettingsError, plan, config, "--track", "tensorbord").startswith(
        "--track: 'tensorbord' is not allowed; did you mean 'tensorboard'? Allowed: "
        f"{', '.join(SINKS.ours)}. Packages with an entry point in 'pipeline.sinks' add "
    )
    assert list(SINKS.ours) == ["jsonl", "mlflow", "stats_writers", "tensorboard", "wandb"]


@pytest.mark.parametrize(
    ("option", "key", "expected"),
    [
        (["--keep-checkpoints", "33"], "keep_checkpoints", 33),
        (["--save-freq", "33"], "checkpoint_interval", 33),
        (["--deterministic"], "network_settings.deterministic", True),
    ],
)
def test_options_for_all_behaviors_apply_to_unlisted_behaviors(option, key, expected, config):
    settings = plan(config, *option).settings
    for name in ("Rover", "Drone", "Unlisted"):
        assert at(settings.for_behavior(name), key) == expected
    assert settings.for_behavior("Drone").max_steps == 2000
    built_in = plan(*option).settings
    assert not built_in.behaviors
    assert built_in.for_behavior("Any").trainer_type == "ppo"
    assert at(built_in.for_behavior("Any"), key) == expected


def test_option_docker_target_name_puts_relative_paths_below_its_volume(config, monkeypatch):
    seen: dict[str, Any] = {}
    real = learn_settings.load_run_settings

    def load(path, *, curriculum, sampler, **more):
        seen.update(path=path, curriculum=curriculum, sampler=sampler)
        return real(config, **more)

    monkeypatch.setattr(learn_settings, "load_run_settings", load)
    arguments = ["c.yaml", "--curriculum", "l.yaml", "--sampler", "/abs/s.yaml"]
    settings = plan(*arguments, "--docker-target-name", "vol").settings
    assert seen == {
        "path": Path("/vol/c.yaml"),
        "curriculum": Path("/vol/l.yaml"),
        "sampler": Path("/abs/s.yaml"),
    }
    assert settings.checkpoint_settings.results_dir == "/vol/results"


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ("FILE", 6000),
        ("FILE --base-port 5005", 5005),
        ("FILE --worker-id 3", 6003),
        ("FILE --base-port 7000 --worker-id 3", 7003),
        ("FILE --attach 3 --base-port 7000", 7000),
        ("--env Game", None),
        ("--env Game --worker-id 0", 5005),
        ("--attach 1 --base-port 7000", 7000),
        ("--num-envs 2 --base-port 7000", 7000),
        ("--num-envs 2", None),
        ("--base-port 7000", None),  # the Editor has its own
    ],
)
def test_system_chooses_free_ports_unless_a_port_is_given(words, port, config, caplog):
    assert plan(*words.replace("FILE", str(config)).split()).base_port == port
    assert ("--base-port is ignored" in caplog.text) == (words == "--base-port 7000")


def test_option_attach_sets_the_number_of_players_and_ignores_a_configured_executable(config):
    env = plan(config, "--attach", "3", "--base-port", "7000").settings.env_settings
    assert (env.num_envs, env.env_path) == (3, None)


def test_option_num_runs_gives_each_run_a_numbered_id_and_the_next_seed(config, tmp_path):
    plan_of_three = plan(config, "--num-runs", "3", "--results-dir", tmp_path, "--run-id", "x")
    runs = [plan_of_three.run(number) for number in range(plan_of_three.n_runs)]
    assert [run.checkpoint_settings.run_id for run in runs] == ["x-0", "x-1", "x-2"]
    assert [run.env_settings.seed for run in runs] == [7, 8, 9]
    drawn = plan(config, "--num-runs", "2", "--seed", "-1").run(1)
    assert drawn.env_settings.seed == -1
    single = plan(config, "--num-runs", "1", "--run-id", "x").run(0)
    assert single.checkpoint_settings.run_id == "x"


def test_options_num_runs_and_resume_together_resume_only_existing_runs(config, tmp_path):
    (tmp_path / "x-0").mkdir()
    words = "--num-runs", "2", "--results-dir", tmp_path, "--run-id", "x", "--resume"
    several = plan(config, *words)
    assert [several.run(k).checkpoint_settings.resume for k in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("file", "options", "decided"),
    [
        ("resume: true, initialize_from: a", [], (True, False, None)),
        ("resume: true", ["--initialize-from", "b"], (False, False, "b")),
        ("initialize_from: a", ["--resume"], (True, False, None)),
        ("initialize_from: a", ["--load"], (True, False, None)),
        ("run_id: x", ["--resume", "--initialize-from", "b"], (True, False, None)),
        ("load_model: true, initialize_from: a", [], (True, False, None)),
        ("resume: true", ["--force"], (False, True, None)),
        ("load_model: true", ["--force"], (False, True, None)),
        ("force: true", ["--resume"], (True, False, None)),
    ],
)
def test_command_line_overrides_the_configuration_file_and_resume_overrides_initialize_from(
    tmp_path, caplog, file, options, decided
):
    path = tmp_path / "config.yaml"
    path.write_text(f"checkpoint_settings: {{{file}}}\n")
    settings = plan(path, *options).settings.checkpoint_settings
    assert (settings.resume, settings.force, settings.initialize_from) == decided
    is_both = "initialize" in file + str(options)
    assert ("exclude each other" in caplog.text) == is_both


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-envs", "0"], "--num-envs: must be at least 1, got 0"),
        (["--num-envs", "many"], "--num-envs: needs a whole number, got 'many'"),
        (["--num-envs", "1.5"], "--num-envs: needs a whole number, got 1.5"),
        (["--time-scale", "nan"], "--time-scale: needs a number, got nan"),
        (["--base-port", "70000"], "--base-port: must be at most 65535, got 70000"),
        (["--base-port", "65534"], "--base-port: 4 environments from port 65534 on need"),
        (["--keep-checkpoints", "x"], "--keep-checkpoints: needs a whole number, got 'x'"),
        (["--save-freq", "0"], "--save-freq: must be at least 1, got 0"),
        (["--lesson", "-1"], "--lesson: must be at least 0, got -1"),
        (["--num-runs", "0"], "--num-runs: must be at least 1, got 0"),
        (["--num-runs", "2", "--attach", "1"], "--num-runs: 2 runs need an executable"),
        (["--num-runs", "2", "--learners", "2"], "--num-runs: 2 runs cannot be trained by"),
        (["--learners", "0"], "--learners: must be at least 1, got 0"),
        (["--worker-id", "x"], "--worker-id: needs a whole number, got 'x'"),
        (["--resume", "--force"], "--resume and --force contradict each other"),
        (["--load", "--force"], "--load and --force contradict each other"),
        (["--inference", "--force"], "--inference and --force contradict each other"),
        (["--cpu", "--torch-device", "cuda"], "--cpu and --torch-device cuda contradict"),
        (["--slow", "--time-scale", "5"], "--slow and --time-scale 5 contradict each other"),
        (["--attach", "0"], "--attach: must be at least 1, got 0"),
        (["--attach", "2", "--env", "Game"], "--attach and --env contradict each other"),
        (["--attach", "2", "--num-envs", "3"], "--attach 2 and --num-envs 3 contradict each other"),
    ],
)
def test_error_names_the_option_with_the_wrong_value(config, options, message):
    assert refusal(SettingsError, plan, config, *options).startswith(message)


def test_mistake_is_reported_at_its_line_or_at_the_option_that_contains_it(config):
    config.write_text("env_settings:\n  num_envs: 0\n")
    message = refusal(SettingsError, plan, config, "--seed=1")
    assert "config.yaml:2: env_settings.num_envs: m" in message
    config.write_text("behaviors: {A: {even_checkpoints: true}}\n")
    message = refusal(SettingsError, plan, config, "--keep-checkpoints=0")
    assert message.startswith("--keep-checkpoints: with even_checkpoints")


@pytest.mark.parametrize(
    ("short", "dest"),
    [("--w", "width"), ("--c", "capture_frame_rate"), ("--torch-d", "torch_device")],
)
def test_abbreviated_option_means_a_current_option_rather_than_a_retired_option(short, dest):
    assert vars(parsed(short, "5"))[dest] in (5, "5")
    assert vars(parsed("--sl"))["slow"] is True


OF_BEHAVIORS = {
    "--max-steps": "max_steps",
    "--epsilon=1": "hyperparameters.epsilon",
    "--swap-steps": "self_play.swap_steps",
    "--sumary-freq": "summary_freq",
    "--batchsize": "hyperparameters.batch_size",
    "--tau": "hyperparameters.tau",
    "--total-timesteps": "max_steps",
    "--algo": "trainer_type",
    "--num_layers": "network_settings.num_layers",
}
ADVICE = {
    **{option: f"{key} is a key of CONFIG, under a behavior's name; "
       for option, key in OF_BEHAVIORS.items()},
    "--trak": "did you mean --track? ",
    "--evn": "did you mean --env? ",
    "--determnistic": "did you mean --deterministic? ",
    "--lr": "",
    "--sinks": "",
    "--mlflow": "give --track mlflow; ",
    "--config=a.yaml": "CONFIG is given without an option; ",
    "--option=visual=always": "`pipeline env build ENV -o FILE` takes --arg and --option; then "
    "give --env FILE; ",
    "--listen": "it was removed; players on other machines connect through ssh: `ssh -N -L "
    "5004:localhost:5004 TRAINER` on the player's machine (docs/reference/learn.md); ",
}  # fmt: skip


@pytest.mark.parametrize(("option", "advice"), ADVICE.items())
def test_unknown_option_is_refused_and_a_similar_one_or_a_setting_proposed(refused, option, advice):
    error = f"unrecognized arguments: {option.partition('=')[0]}; {advice}"
    help_command = "`pipeline learn --help` lists the options"
    assert refused("learn", option, "3") == f"{error}{help_command}"


def said_by(capsys, word: str) -> str:
    """Return the output of an option that ends the command while it is parsed."""
    with pytest.raises(SystemExit, match="0"):
        parsed(word)
    out, error = capsys.readouterr()
    assert not error
    return out


def test_learn_refuses_an_ambiguous_option_and_prints_version_and_help(capsys, refused):
    assert refused("learn", "--re").startswith("ambiguous option: --re could match")
    assert said_by(capsys, "--version").startswith("pipeline ")
    text = " ".join(said_by(capsys, "--help").split())
    for words in (
        "wins over the configuration file",
        "results/<run-id>/",
        "pipeline learn config/ppo/3DBall.yaml",
        "press Play in the Unity Editor",
        "retired:",
        *PRESENT,
        *RETIRED,
        *OURS,
    ):
        assert words in text


def test_reference_page_lists_every_option_of_learn():
    text = (Path(__file__).parents[3] / "docs/reference/learn.md").read_text()
    assert [flag for flag in (*PRESENT, *RETIRED, *OURS) if f"`{flag}" not in text] == []


def test_inference_with_untrained_networks_logs_a_warning(config, caplog):
    plan(config, "--inference")
    assert "The networks are untrained" in caplog.text
    caplog.clear()
    plan(config, "--inference", "--resume")
    plan(config, "--inference", "--initialize-from", "old")
    assert "untrained" not in caplog.text


def test_learn_options_after_the_option_env_args_cause_a_warning(capsys):
    words = ["learn", "--env", "Game", "--env-args", "--level", "7", "--run-id", "a"]
    cli.parser_for(words).parse_args(words)
    assert capsys.readouterr().err == (
        "[WARNING] --run-id comes after --env-args, so it is passed to the executable; to give it "
        "to `pipeline learn`, put it before --env-args\n"
    )
