"""The public names of `import pipeline`: documented, quick to import, and working."""

import inspect
import json
import pydoc
import re
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from beacons import Beacon, Lighthouse
from interpreter import python

import pipeline
from pipeline.seeding import derive

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/python.md"
PUBLIC = [name for name in pipeline.__all__ if name != "__version__"]
SETTINGS = {
    "behaviors": {
        "3DBall": {
            "trainer_type": "ppo",
            "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
            "network_settings": {"hidden_units": 8, "num_layers": 1},
            "max_steps": 1024,
            "summary_freq": 256,
            "checkpoint_interval": 512,
        }
    }
}


def train(folder: Path, **options: object):
    return pipeline.train("balance_ball", SETTINGS, seed=1, run_dir=folder, **options)


def line_of(name: str) -> str:
    """Return the expected row of a name in docs/reference/python.md."""
    first = inspect.getdoc(getattr(pipeline, name)).splitlines()[0]
    return f"| `{name}` | {first} |"


def test_python_page_lists_every_public_name_with_its_docstring():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = rows[rows.index(line_of(PUBLIC[0])) :]
    assert listed == [line_of(name) for name in PUBLIC]


def test_examples_of_the_python_page_use_every_public_name_and_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text().partition("\n## An example of each name\n")[2]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"\bpipeline\.(\w+)", "".join(blocks)))
    assert set(PUBLIC) <= used
    names: dict[str, object] = {"__name__": "examples"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102  # our own page


def test_help_of_train_fits_on_one_screen():
    assert len(pydoc.render_doc(pipeline.train).splitlines()) <= 60


@pytest.mark.slow
def test_type_checker_knows_every_public_name_and_refuses_other_names(tmp_path: Path):
    lines = [f"reveal_type(pipeline.{name})" for name in PUBLIC]
    lines += ["policy = pipeline.load_policy('x.onnx')", "policy.observe", "pipeline.trian"]
    (tmp_path / "script.py").write_text("\n".join(["import pipeline", *lines]))
    checked = python(
        *("-m", "mypy", "--strict", "script.py"), cwd=tmp_path, check=False, timeout=600,
        MYPYPATH=str(ROOT / "src"),
    )  # fmt: skip
    notes = [line for line in checked.stdout.splitlines() if "Revealed type is" in line]
    assert len(notes) == len(PUBLIC)
    assert not [line for line in notes if 'is "Any"' in line or "**kwargs: Any" in line]
    errors = [line for line in checked.stdout.splitlines() if " error: " in line]
    assert len(errors) == 2
    assert all("has no attribute" in line for line in errors)


def members() -> list[tuple[str, str]]:
    pairs = []
    for name in PUBLIC:
        cls = getattr(pipeline, name)
        if inspect.isclass(cls):
            pairs += [(name, attribute) for attribute in vars(cls) if not attribute.startswith("_")]
    return pairs


@pytest.mark.parametrize(("name", "member"), members())
def test_every_public_method_has_a_docstring(name: str, member: str):
    value = inspect.getattr_static(getattr(pipeline, name), member)
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if inspect.isfunction(value) or isinstance(value, property):
        assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_imported_and_is_in_the_result_of_dir(name: str):
    assert getattr(pipeline, name).__name__ == name
    assert name in dir(pipeline)


def test_unknown_name_in_the_package_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = pipeline.trian  # type: ignore[attr-defined]


class Told(pipeline.Callback):
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_start(self, behavior, settings):  # noqa: ARG002
        self.seen.append(("start", settings["max_steps"]))

    def on_summary(self, behavior, values, step):  # noqa: ARG002
        self.seen.append(("summary", step))

    def on_update(self, behavior, update):  # noqa: ARG002
        self.seen.append(("update", update.step))

    def on_checkpoint(self, behavior, path, step):  # noqa: ARG002
        assert path.is_file()
        self.seen.append(("checkpoint", step))

    def on_end(self, result):
        self.seen.append(("end", result.behaviors["3DBall"].steps))


def test_callbacks_get_every_event_and_the_training_result_contains_learning_curves(tmp_path: Path):
    callback = Told()
    result = train(tmp_path, callbacks=[callback])
    steps = result.behaviors["3DBall"].steps
    events = [event for event, _ in callback.seen]
    assert events[0] == "start"
    assert callback.seen[-1] == ("end", steps)
    assert events.count("summary") == 4
    assert events.count("update") == result.behaviors["3DBall"].n_updates
    assert events.count("checkpoint") == 2
    curve = result.curves["3DBall"]["Environment/Cumulative Reward"]
    assert [step for step, _ in curve] == [256, 512, 768, 1024]
    assert np.isfinite([value for _, value in result.curves["3DBall"]["Losses/Policy Loss"]]).all()


def test_train_accepts_metric_sinks_as_names_or_objects_and_gives_them_the_results(tmp_path: Path):
    class Ended(pipeline.Sink):
        results: dict = {}  # noqa: RUF012  # of the only one

        def on_end(self, result):
            self.results.update(result.numbers())

    ended = Ended()
    result = train(tmp_path, sinks=["jsonl", ended]).behaviors["3DBall"]
    with (tmp_path / "metrics.jsonl").open() as lines:
        assert [json.loads(line)["step"] for line in lines] == [256, 512, 768, 1024]
    numbers = {"steps": result.steps, "updates": result.n_updates}
    numbers |= {"episodes": result.n_episodes, "mean_reward": result.mean_reward}
    assert ended.results == {"3DBall": numbers}
    with pytest.raises(pipeline.PipelineError, match="sinks: 'jsnl' is not allowed"):
        train(tmp_path / "other", sinks=["jsnl"])


def test_training_stopped_by_a_callback_ends_normally_with_an_exportable_policy(tmp_path: Path):
    class Enough(Told):
        def on_summary(self, behavior, values, step):
            super().on_summary(behavior, values, step)
            self.stop = step >= 512

    callback = Enough()
    result = train(tmp_path, callbacks=[callback])
    assert 512 <= result.behaviors["3DBall"].steps < 1024
    assert callback.seen[-1][0] == "end"
    checkpoint = result.behaviors["3DBall"].checkpoint
    assert pipeline.export_policy(checkpoint, tmp_path / "onnx").is_file()


def test_error_in_a_callback_is_raised_after_the_run_is_saved(tmp_path: Path):
    class Broken(Told):
        def on_summary(self, behavior, values, step):  # noqa: ARG002
            raise ZeroDivisionError("mine")

    callback = Broken()
    with pytest.raises(ZeroDivisionError, match="mine"):
        train(tmp_path, callbacks=[callback])
    assert "end" not in [event for event, _ in callback.seen]
    assert (tmp_path / "3DBall/checkpoint.pt").is_file()
    resumed = train(tmp_path, resume=True)
    assert resumed.behaviors["3DBall"].steps >= 1024


def test_callbacks_are_refused_with_several_learners(tmp_path: Path):
    with pytest.raises(pipeline.PipelineError, match="with several learners, a callback cannot"):
        train(tmp_path, callbacks=[Told()], learners=2)


def test_checkpoint_and_onnx_policy_choose_equal_actions_and_get_equal_returns(tmp_path: Path):
    result = train(tmp_path)
    checkpoint = result.behaviors["3DBall"].checkpoint
    model = pipeline.export_policy(checkpoint, tmp_path / "onnx")
    assert model == tmp_path / "onnx/3DBall.onnx"
    first, second = pipeline.load_policy(checkpoint), pipeline.load_policy(model)
    assert first.behavior == second.behavior == "3DBall"
    env = pipeline.make_env("balance_ball", seed=4, n_agents=5)
    env.reset()
    ((decision, _),) = [env.get_steps(name) for name in env.behavior_specs]
    action, onnx_action = first.act(decision.obs), second.act(decision.obs[0])
    assert action.continuous.shape == (5, 2)
    assert np.array_equal(action.continuous, onnx_action.continuous)
    env.close()
    played = [pipeline.evaluate(p, "balance_ball", episodes=3, seed=2) for p in (first, model)]
    assert len(played[0]) == 3
    assert played[0] == played[1]


class Wider(Beacon):
    """The same environment with another action space."""

    action_space = gymnasium.spaces.Discrete(4)


def test_policy_can_be_evaluated_in_an_equal_behavior_of_another_name(tmp_path: Path, caplog):
    settings = {"default_settings": {"max_steps": 64, "network_settings": {"hidden_units": 8}}}
    result = pipeline.train(Beacon(), settings, seed=1, run_dir=tmp_path)
    checkpoint = result.behaviors["Beacon"].checkpoint
    Beacon.begun.clear()
    caplog.set_level("INFO")
    played = pipeline.evaluate(checkpoint, Lighthouse(), episodes=3, seed=5)
    assert [(one.behavior, one.length) for one in played] == [("Lighthouse?team=0", 3)] * 3
    assert "The policy of Beacon plays the behavior Lighthouse, which has the same" in caplog.text
    with pytest.raises(pipeline.PipelineError, match="this policy is for the behavior Beacon; the"):
        pipeline.evaluate(checkpoint, Wider(), episodes=1)
    first_three, env = Beacon.begun[:3], Lighthouse()
    # As docs/reference/python.md says.
    for seed in (derive(5, "gymnasium", 0), None, None):
        env.reset(seed=seed)
    assert Beacon.begun[-3:] == first_three


def test_make_env_accepts_every_form_of_an_environment(here, monkeypatch):
    (here / "mine_of_api.py").write_text(
        "import gymnasium\ndef pole():\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.syspath_prepend(str(here))
    ball_env = pipeline.make_env("balance_ball", n_agents=2)
    forms = ["gymnasium:CartPole-v1", "mine_of_api:pole", gymnasium.make("CartPole-v1"), ball_env]
    for form in forms:
        env = pipeline.make_env(form, seed=1)
        env.reset()
        assert len(env.behavior_specs) == 1
        env.close()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("no_module_of_mine:function", "there is no no_module_of_mine.py in the current folder"),
        ("json:nothing", "has no function or class 'nothing'"),
        ("gymnasium:CartPol-v1", "CartPole-v1"),
        ("no_such_program", "no_such_program"),
        (3, "an object of type int is not an environment"),
    ],
)
def test_make_env_refuses_an_unknown_environment_in_one_line(form, said):
    with pytest.raises(pipeline.PipelineError, match=said) as refused:
        pipeline.make_env(form)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_documented_python_loop_plays_a_trained_policy(tmp_path: Path):
    section = PAGE.read_text().partition("## Acting in a loop")[2].partition("\n## ")[0]
    camping, script = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "camping.py").write_text(camping)
    (tmp_path / "script.py").write_text(script)
    own = (ROOT / "examples/environments/own.yaml").read_text()
    (tmp_path / "own.yaml").write_text(own.replace("max_steps: 50000", "max_steps: 1024"))
    (command,) = re.findall(r"`pipeline (learn .*?)`", section)
    python("-m", "pipeline", *command.split(), cwd=tmp_path, timeout=600)
    printed = python(tmp_path / "script.py", cwd=tmp_path, timeout=600)
    totals = [float(line) for line in printed.stdout.splitlines()]
    assert len(totals) == 3
    assert all(0 < total < 50 for total in totals)  # at most 1 for each of 50 steps


@pytest.mark.slow
def test_example_notebook_runs_to_its_end(tmp_path: Path):
    short = {"NOTEBOOK_FOLDER": str(tmp_path), "NOTEBOOK_STEPS": "15000", "MPLBACKEND": "agg"}
    completed = python(ROOT / "examples/notebook.py", cwd=tmp_path, timeout=1000, **short)
    assert "12 agents ask for a decision" in completed.stdout
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert (tmp_path / "onnx/3DBall.onnx").is_file()


@pytest.mark.slow
def test_example_own_parts_is_stopped_by_its_callback_then_plays_and_continues(tmp_path: Path):
    shutil.copytree(ROOT / "examples/own_parts", tmp_path / "own")
    completed = python("notebook.py", cwd=tmp_path / "own", timeout=1000, MPLBACKEND="agg")
    (trained, mean), (total,), (continued,) = (
        map(float, line.split()) for line in completed.stdout.splitlines()
    )
    assert trained < 80_000  # the callback ended the run
    assert mean > -12
    assert -30 < total < 0
    assert continued >= 80_000
    assert (tmp_path / "own/curve.png").stat().st_size > 0
    files = [tmp_path / "own" / name for name in ("notebook.py", "parts.py")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith(("#", '"""')) for line in lines) <= 60
