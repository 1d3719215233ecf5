"""`pipeline evaluate`: the arguments that it passes on, and what it prints."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.dag.stages import evaluate
from pipeline.envs import named_env
from pipeline.evaluation import episodes
from pipeline.evaluation.episodes import Episode
from pipeline.export import policy


def episode(index: int, behavior: str, value: float, length: int) -> Episode:
    numbers = {"index": index, "agent": 0, "length": length, "interrupted": False}
    return Episode(behavior=behavior, episode_return=value, **numbers)


@pytest.mark.parametrize("n", [0, -3])
def test_evaluate_refuses_fewer_than_one_episode_before_the_environment_is_built(n, refused):
    words = "evaluate", "A.onnx", "--env", "balance_ball", "--episodes", n
    assert refused(*words) == f"--episodes: must be at least 1, got {n}."


def test_evaluate_refuses_a_policy_of_another_behavior_and_names_both(monkeypatch, refused):
    def play(policies, *_, **options):
        env = SimpleNamespace(reset=lambda: None, behavior_specs={"Acrobot-v1?team=0": None})
        return episodes.evaluate(env, policies, episodes=1, seed=1)

    other = SimpleNamespace(has_deterministic_actions=True, reset=lambda _: None)
    monkeypatch.setattr(policy, "OnnxPolicy", lambda _: other)
    monkeypatch.setattr(named_env, "executable_of", Path)
    monkeypatch.setattr(evaluate, "play", play)
    assert refused("evaluate", "CartPole-v1.onnx", "--env", "gymnasium:Acrobot-v1") == (
        "gymnasium:Acrobot-v1: this policy is for the behavior CartPole-v1; the environment "
        "has Acrobot-v1, with other observations or actions (`pipeline onnx check --env` says "
        "which); give a policy of that behavior, or the environment of this policy"
    )
    error = "game: these policies are for the behaviors A, B; the environment has A"
    assert error in refused("evaluate", "A.onnx", "B.onnx", "--env", "game")


def test_evaluate_prints_a_line_for_each_seed_of_an_experiment_and_the_mean_over_seeds(
    tmp_path, monkeypatch, printed, refused
):
    for seed in (2, 10, 1):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}/A.onnx").touch()

    def play(policies, *_, **options):
        value = float(policies["A"].path.parent.name.removeprefix("seed"))
        return [episode(0, "A", value, 4)]

    made = []
    loaded = partial(SimpleNamespace, has_deterministic_actions=True)
    monkeypatch.setattr(policy, "OnnxPolicy", lambda path: loaded(path=path))
    monkeypatch.setattr(named_env, "executable_of", lambda name: made.append(name) or Path(name))
    monkeypatch.setattr(evaluate, "play", play)
    words = ["evaluate", tmp_path, "--env", "game"]
    *lines, _ = printed(*words).splitlines()
    assert lines == [
        "seed1, A: 1 episodes, mean return 1.000 (1.000 to 1.000), mean length 4.0",
        "seed2, A: 1 episodes, mean return 2.000 (2.000 to 2.000), mean length 4.0",
        "seed10, A: 1 episodes, mean return 10.000 (10.000 to 10.000), mean length 4.0",
        "A: 3 seeds, mean return 4.333 (means of seeds 1.000 to 10.000)",
    ]
    assert refused(*words, "--video", "a.gif") == (
        f"--video: films one policy, but {tmp_path} has 3 seeds; give the folder of one seed, such "
        f"as {tmp_path}/seed1"
    )
    assert made == ["game"]


@pytest.mark.parametrize(("kind", "told"), [("best", (2, 9.0)), (None, (0, 2.0))])
def test_evaluate_uses_all_its_options_and_prints_the_returns_of_every_behavior(
    kind, told, monkeypatch, printed
):
    seen = {}
    played = [
        episode(k, name, value, 3 + k)
        for name, values in (("A?team=0", (2.0, 1.0, 9.0)), ("B", (50.0,)))
        for k, value in enumerate(values)
    ]

    def play(policies, build, **options):
        seen.update(options, policies=policies, program=build.file, args=build.args)
        return played

    loaded = SimpleNamespace(has_deterministic_actions=True)
    monkeypatch.setattr(policy, "OnnxPolicy", lambda _: loaded)
    monkeypatch.setattr(named_env, "executable_of", lambda name: Path(f"{name}.x86_64"))
    monkeypatch.setattr(evaluate, "play", play)
    options = ["--episodes", "3", "--seed", "12", "--video", "a.gif"]
    options += ["--video-episode", kind] if kind else []
    words = ["evaluate", "dir/A.onnx", "--env", "game", *options, "--env-args", "--level", "7"]
    first, second, _, film = printed(*words).splitlines()
    assert seen == {
        "policies": {"A": loaded},
        "program": Path("game.x86_64"),
        "args": ("--level", "7"),
        "episodes": 3,
        "seed": 12,
        "deterministic": True,
        "videos": {kind or "median": Path("a.gif")},
    }
    mean = "A: 3 episodes, mean return 4.000 (1.000 to 9.000), mean length 4.0"
    assert (first, second.partition(",")[0]) == (mean, "B: 1 episodes")
    number, value = told
    assert f"number {number}, return {value:.3f}, {3 + number} steps" in film
