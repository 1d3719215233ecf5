"""Reports of users who compare experiments, some of them trained again."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import field_environments
import numpy as np
import pytest
from guessers import MARGIN, guesser
from repositories import commit, git
from small_project import left, params_of
from test_unity_users import Player, connected

from pipeline.cli import card
from pipeline.cli.main import main
from pipeline.dag import run_context
from pipeline.dag.reporting.results import outcomes, trials_of
from pipeline.dag.stages import evaluate, report
from pipeline.dag.stages.sweep import score_of
from pipeline.envs.executable import Build
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.errors import SettingsError, StageError
from pipeline.evaluation import tables
from pipeline.evaluation.comparison import compare
from pipeline.settings.project.params import Params
from pipeline.settings.project.plan import RUNS_FILE, write_plan
from pipeline.settings.project.sweeps import SweepParams
from pipeline.simulators.bridges.module_bridge import around
from pipeline.tracking.run_metadata import POLICY_DIGEST as DIGEST
from pipeline.tracking.run_metadata import dvc_digest
from pipeline.wire.codec.generated import messages as m


def trained(root: Path, experiment: str, seed: int, policy: str, end: float) -> Path:
    """Write the files of the stage `train`; return the policy's path."""
    curve = f"Walker,1000,0.0\nWalker,2000,{end}\n"
    run = f"{experiment}/seed{seed}"
    return left(root, "train", run, policy=policy, progress=curve) / "policy.pt"


def exported(root: Path, experiment: str, seed: int) -> None:
    """Write the files of the stage `export`."""
    run = f"{experiment}/seed{seed}"
    policy = root / f"results/train/{run}/policy.pt"
    digest = {"Walker": {DIGEST: dvc_digest(policy)}}
    folder = left(root, "export", run, export=digest)
    (folder / "Walker.onnx").write_bytes(policy.read_bytes())


def evaluated(root: Path, experiment: str, seed: int, mean: float) -> None:
    """Write the files of the stage `evaluate` for the exported policy."""
    run = f"{experiment}/seed{seed}"
    digest = json.loads((root / "results/export" / run / "export.json").read_text())["Walker"]
    metrics = {"Walker": {"mean_return": mean, "ci_low": None} | digest}
    (left(root, "evaluate", run, metrics=metrics) / "episodes.csv").write_text("index\n")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two experiments with two seeds, each trained, exported and evaluated."""
    for experiment, mean in (("a", 10.0), ("b", 20.0)):
        for seed in (1, 2):
            trained(tmp_path, experiment, seed, f"{experiment}{seed}", mean / 10)
            exported(tmp_path, experiment, seed)
            evaluated(tmp_path, experiment, seed, mean + seed)
    return tmp_path


def compared(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    runs = [str(root / "results/train" / name) for name in ("a", "b")]
    assert main(["compare", *runs, *options]) == 0
    return capsys.readouterr().out


def means(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    rows = csv.DictReader(io.StringIO(compared(root, capsys, "--csv")))
    return {row["experiment"]: (row["score"], row["mean"]) for row in rows}


def test_compare_leaves_out_an_evaluation_that_was_made_with_an_earlier_policy(project, capsys):
    assert means(project, capsys) == {"a": ("evaluated", "11.5"), "b": ("evaluated", "21.5")}
    trained(project, "a", 1, "longer", end=7.0)
    exported(project, "a", 1)
    # Returns in training for both, because they are not compared with returns of evaluations.
    assert means(project, capsys) == {"a": ("training", "4"), "b": ("training", "2")}
    text = compared(project, capsys)
    assert "not every run was evaluated" in text
    told = "trained again since its evaluation, which does not count; evaluate it again."
    assert [line for line in text.splitlines() if told in line] == [f"a, seed 1: {told}"]
    evaluated(project, "a", 1, 31.0)
    assert means(project, capsys) == {"a": ("evaluated", "21.5"), "b": ("evaluated", "21.5")}
    assert told not in compared(project, capsys)


def test_evaluation_is_compared_if_its_policy_is_restored_or_absent_or_has_no_recorded_digest(
    project, capsys
):
    """`dvc checkout` restores the policy, a clone has none, and older files have no digest."""
    before = means(project, capsys)
    policy = trained(project, "a", 1, "other", end=1.0)
    assert means(project, capsys) != before
    evaluated(project, "a", 1, 31.0)  # without an export, so of the earlier policy
    assert means(project, capsys)["a"][0] == "training"
    evaluated(project, "a", 1, 11.0)
    policy.write_text("a1")
    assert means(project, capsys) == before
    for policy in (project / "results/train").rglob("policy.pt"):
        policy.unlink()
    assert means(project, capsys) == before
    for path in (project / "results/evaluate").rglob("metrics.json"):
        numbers = json.loads(path.read_text())
        del numbers["Walker"][DIGEST]
        path.write_text(json.dumps(numbers))
    assert means(project, capsys) == before


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["mean_return", "ci_high"])
def test_metrics_file_with_a_value_that_is_not_finite_is_refused(value, name, project, refused):
    path = project / "results/evaluate/a/seed1/metrics.json"
    path.write_text(json.dumps({"Walker": {"mean_return": 1.0, name: 5}}).replace("5", value))
    message = refused("compare", project / "results/train/a", project / "results/train/b")
    assert f"{path}: cannot be read as an evaluation" in message
    assert f"{name} is {float(value)}" in message
    with pytest.raises(StageError, match=f"{name} is "):
        score_of(path, sweep("a"))


def sweep(experiment: str) -> SweepParams:
    return SweepParams(experiment=experiment, method="list", configurations=({},), seeds=(1, 2))


def evaluated_runs(
    root: Path, experiment: str, scores: Sequence[float], steps: int, last: int = 2000
) -> None:
    """Runs of the stages, each trained for `steps`; the last episode ended in step `last`."""
    for seed, score in enumerate(scores, start=1):
        curve, trained_for = f"Walker,1000,0.0\nWalker,{last},{score}\n", {"steps": steps + seed}
        files = {"policy": "policy", "progress": curve, "metrics": {"Walker": trained_for}}
        left(root, "train", f"{experiment}/seed{seed}", **files)
        exported(root, experiment, seed)
        evaluated(root, experiment, seed, score)


PPO, SAC = (2.0, 6.0, 4.5), (8.0, 13.9, 9.5)


def test_compare_warns_of_few_seeds_and_unequal_training_steps(tmp_path, capsys):
    """PPO with 12,000 steps and SAC with 8,000: the conclusion and its reservations."""
    evaluated_runs(tmp_path, "a", PPO, steps=12_000)
    evaluated_runs(tmp_path, "b", SAC, steps=8_000)
    text = compared(tmp_path, capsys)
    lines = text.splitlines()
    assert lines[1] == (
        "b (10.47) did better than a (4.167) on these seeds, which may be luck: experiments that "
        "are equally good would be apart as clearly in 10 % of cases. Run more seeds. The "
        "experiments' trained steps differ, so this is no comparison of equal budgets."
    )
    row = next(line for line in lines if line.startswith("b   "))
    assert re.split("  +", row)[6] == "8,003"
    pair = next(line for line in lines if re.match("b +a ", line))
    assert re.split("  +", pair) == ["b", "a", "9 of 9 pairs", "no overlap", "10 %"]
    assert "a difference of means below 7.974 would not be seen; here it is 6.3 (t-test" in text
    assert "Trained steps differ: a 12,003, b 8,003. Train all equally long" in text
    found = json.loads(compared(tmp_path, capsys, "--json"))
    assert [row["trained_steps"] for row in found["experiments"]] == [12_002, 8_002]
    (pair,) = found["improvements"]
    assert (pair["probability"], pair["low"], pair["high"]) == (1.0, None, None)
    assert pair["chance"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (
            range(5),
            range(10, 15),
            "b (12) does better than a (2): experiments that are equally good would be apart as "
            "clearly in 0.79 % of cases.",
        ),
        (range(5), range(5), "a (2) and b do equally well."),
        # Regression: trials with one seed each, 15.7 and -0.7, were said to do equally well.
        (
            [15.7],
            [-0.7],
            "a (15.7) is above b (-0.7), but so few seeds cannot show a difference. Run more "
            "seeds.",
        ),
    ],
    ids=["no overlap", "equal", "one seed"],
)
def test_second_line_of_compare_states_the_conclusion_for_equal_budgets(
    a, b, said, tmp_path, capsys
):
    evaluated_runs(tmp_path, "a", a, steps=8_000, last=5_000)
    evaluated_runs(tmp_path, "b", b, steps=8_000, last=8_000)
    text = compared(tmp_path, capsys)
    assert text.splitlines()[1] == said
    # The curves end at different steps, since few episodes end; training was equally long.
    assert "rained steps differ" not in text
    assert "Probability" not in text or len(a) > 1


def test_best_of_three_experiments_is_compared_with_each_of_the_two_others(tmp_path):
    evaluated_runs(tmp_path, "a", range(5), steps=8_000)
    evaluated_runs(tmp_path, "b", range(10, 15), steps=8_000)
    evaluated_runs(tmp_path, "c", [9.5, 10.5, 11.5, 12.5, 13.5], steps=8_000)
    (task,) = compare(
        found
        for name in "abc"
        for seed in range(1, 6)
        for found in trials_of(tmp_path / "results", name, seed, environment="walk")
    )
    shown, not_shown = tables.conclusion(task).removesuffix(" Run more seeds.").split(". ")
    assert shown.startswith("b (12) does better than a (2): ")
    assert not_shown.startswith("b (12) did better than c (11.5) on these seeds, ")
    (note,) = [note for note in tables.notes(task) if "t-test" in note]
    assert "here it is 0.5 to 10 (" in note


def test_compare_reports_different_training_lengths_of_learn_runs(tmp_path, capsys):
    for name, steps, rate in (("long", 12_000, 1e-3), ("short", 8_000, 1e-4)):
        run = tmp_path / name
        (run / "run_logs").mkdir(parents=True)
        (run / "progress.csv").write_text("behavior,step,reward\nWalker,5000,1\n")
        checkpoint = {"final_checkpoint": {"steps": steps}}
        (run / "run_logs/training_status.json").write_text(json.dumps({"Walker": checkpoint}))
        hyper = f"{{trainer_type: ppo, hyperparameters: {{learning_rate: {rate}}}}}"
        (run / "configuration.yaml").write_text(f"behaviors: {{Walker: {hyper}}}\n")
    assert main(["compare", str(tmp_path / "long"), str(tmp_path / "short")]) == 0
    assert "Trained steps differ: long 12,000, short 8,000." in capsys.readouterr().out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in which environments of `field_environments` are played in this process."""

    def opened(build: Path, *, seed: int, **_: object) -> contextlib.closing[InProcessEnvironment]:
        made = getattr(field_environments, build.name)()
        return contextlib.closing(InProcessEnvironment(around([made], seed=seed)))

    monkeypatch.setattr("pipeline.envs.unity.UnityEnvironment", opened)
    monkeypatch.setattr("pipeline.envs.named_env.executable_of", Path)
    monkeypatch.setattr(
        "pipeline.envs.executable.load",
        lambda _: Build(file=Path("Guess"), args=(), simulator=None),
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judged(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, float], str]:
    """Return the printed mean return of each behavior, and the last line."""
    assert main(["evaluate", *words]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    return {
        row.partition(":")[0]: float(re.search(r"mean return (\S+)", row)[1]) for row in rows
    }, last


DRAWN = pytest.approx(10 / (1 + np.exp(-MARGIN)), abs=0.4)
"""Mean return of `Guess` where the right choice is drawn with its probability; 10 for the best."""


def test_evaluate_prints_whether_actions_are_deterministic_or_stochastic(here, capsys):
    guesser(here / "Guess.onnx")
    words = ("Guess.onnx", "--env", "Guess")
    returns, last = judged(capsys, *words)
    assert returns == {"Guess": 10.0}
    assert last.startswith(
        "Actions: deterministic, the most probable actions; --stochastic draws them"
    )
    drawn, last = judged(capsys, *words, "--stochastic")
    assert drawn == {"Guess": DRAWN}
    assert last == "Actions: stochastic, drawn at random as in training"
    assert judged(capsys, *words, "--stochastic") == (drawn, last)
    assert judged(capsys, *words, "--stochastic", "--seed", "3")[0] != drawn


@pytest.mark.parametrize("age", [{"version": 2}, {"deterministic": False}], ids=["1.x", "early 2"])
def test_model_without_deterministic_actions_is_evaluated_stochastically(age, here, capsys):
    guesser(here / "Guess.onnx", **age)
    returns, last = judged(capsys, "Guess.onnx", "--env", "Guess")
    assert returns == {"Guess": DRAWN}
    assert last.startswith(
        "Actions: stochastic, drawn at random as in training; Guess has no deterministic actions"
    )


@pytest.mark.parametrize("models", [["a.onnx", "b.onnx"], ["."]], ids=["two files", "a folder"])
def test_evaluate_plays_both_policies_of_a_game_with_two_behaviors(models, here, capsys):
    guesser(here / "a.onnx")
    guesser(here / "b.onnx", deterministic=False)
    (here / "a").mkdir()
    guesser(here / "a" / "a-500.onnx")
    returns, last = judged(capsys, *models, "--env", "TwoBehaviors", "--episodes", "50")
    assert returns == {name: pytest.approx(5 / (1 + np.exp(-MARGIN)), abs=0.4) for name in "ab"}
    assert "; b has no deterministic actions" in last


def test_announced_behavior_that_has_no_agents_yet_is_not_reported_as_ignored(caplog):
    message = m.UnityMessageProto(header={"status": 200})
    for name in ("a?team=0", "b?team=0"):
        message.unity_output.rl_initialization_output.brain_parameters.add(brain_name=name)
        message.unity_output.rl_output.agentInfos[name].SetInParent()
    message.unity_output.rl_output.agentInfos["never announced"].SetInParent()
    with connected(Player(message)) as env:
        assert not env.behavior_specs
    assert "ignored" not in caplog.text


def test_evaluate_refuses_two_policies_of_a_behavior_and_an_empty_folder(here, refused):
    for folder in ("first", "second", "empty"):
        (here / folder).mkdir()
    first, second = (guesser(here / name / "a.onnx") for name in ("first", "second"))
    told = refused("evaluate", first, second, "--env", "TwoBehaviors")
    assert f"{second}: is a second policy of the behavior a, after {first}" in told
    assert "is a folder without .onnx files" in refused("evaluate", "empty", "--env", "Guess")


def guessing(root: Path, stochastic: dict[str, dict]) -> Params:
    """Make a project with evaluated policies for `Guess`; return its parameters."""
    evaluation = {"episodes": 100, "seed": 4}
    experiments = {name: {"evaluation": evaluation | more} for name, more in stochastic.items()}
    sections = (
        "{runtime: {torch_threads: 1, device: cpu}, track: [], "
        "environments: {ball: {source: path, path: there}}}"
    )
    params = params_of(root, behavior="Guess", sections=sections, **experiments)
    (root / "build/env/ball").mkdir(parents=True)
    for name in stochastic:
        trained(root, name, 1, "policy", end=1.0)
        exported(root, name, 1)
        (root / f"results/export/{name}/seed1/Walker.onnx").unlink()
        guesser(root / f"results/export/{name}/seed1/Guess.onnx")
        evaluate.evaluate(run_context.Run(root=root, params=params, name=name, seed=1))
    return params


def test_stage_evaluate_samples_actions_if_stochastic_is_set_and_the_report_says_so(here):
    params = guessing(here, {"best": {}, "drawn": {"stochastic": True}})
    best, drawn = (
        json.loads((here / f"results/evaluate/{name}/seed1/metrics.json").read_text())["Guess"]
        for name in ("best", "drawn")
    )
    assert (best["mean_return"], drawn["mean_return"]) == (10.0, DRAWN)
    # Without the setting, neither the metrics nor the stage's parameters contain it.
    assert {*drawn} - {*best} == {"stochastic"}
    assert drawn["stochastic"] is True
    jobs = [
        evaluate.job_of(run_context.Run(root=here, params=params, name=name, seed=1)).params
        for name in ("best", "drawn")
    ]
    assert jobs == [{"episodes": 100, "seed": 4}, {"episodes": 100, "seed": 4, "stochastic": True}]
    (task,) = (task for task in compare(outcomes(here, params)) if task.behavior == "Guess")
    how = "with stochastic actions of drawn, and deterministic ones of the others."
    assert tables.notes(task)[0] == f"Returns are of the exported policies, {how}"
    assert any("give `evaluation.stochastic` the same" in one for one in tables.cautions(task))


THREE = {"environment": "walk", "seeds": [1, 2, 3]}
WALK = "environments: {walk: {source: builtin, name: balance_ball, args: []}}"
OTHERS = {
    "behaviors.Walker.hyperparameters.learning_rate": 0.001,
    "behaviors.Walker.network_settings": {"hidden_units": 64, "memory": {"sequence_length": 8}},
}


@pytest.fixture
def reported(tmp_path) -> Path:
    """The folder of the report of three experiments."""
    for name in ("ppo", "sac"):
        (tmp_path / f"{name}.yaml").write_text(
            f"behaviors: {{Walker: {{trainer_type: {name}, max_steps: 8000}}}}\n"
        )
    base = THREE | {"trainer": "ppo.yaml"}
    fast, sac = base | {"overrides": OTHERS}, THREE | {"trainer": "sac.yaml"}
    params = params_of(tmp_path, sections=WALK, base=base, fast=fast, sac=sac)
    for experiment, scores, steps in (("base", PPO, 8000), ("fast", PPO, 8000), ("sac", SAC, 6000)):
        evaluated_runs(tmp_path, experiment, scores, steps)
    (tmp_path / "workflow").mkdir()
    write_plan(params, tmp_path / RUNS_FILE)
    report.report(tmp_path)
    return tmp_path / "results/report"


def test_report_begins_with_conclusion_and_differences_between_experiments(reported, capsys):
    markdown = (reported / "report.md").read_text().splitlines()
    assert markdown[0] == "# 3 experiments in walk"
    assert markdown[2].startswith(
        "**walk: Walker**: sac (10.47) did better than base (4.167), fast (4.167) on these seeds, "
    )
    assert markdown[2].endswith("so this is no comparison of equal budgets.")
    setups = [line for line in markdown if line.startswith("- **")][:3]
    assert setups[:2] == [
        "- **base**: PPO (ppo.yaml), 8,003 steps, seeds 1, 2, 3",
        "- **fast**: PPO (ppo.yaml), 8,003 steps, seeds 1, 2, 3; against base: learning_rate 0.001 "
        "instead of 0.0003, network_settings.hidden_units 64 instead of 128, with "
        "network_settings.memory",
    ]
    assert setups[2].startswith("- **sac**: SAC (sac.yaml), 6,003 steps, seeds 1, 2, 3; against ")
    runs = [str(reported.parent / "train" / name) for name in ("base", "fast")]
    assert main(["compare", *runs]) == 0
    differences = setups[1].partition("; against base: ")[2]
    assert f"fast, against base: {differences}\n" in capsys.readouterr().out
    table = next(k for k, line in enumerate(markdown) if line.startswith("| Experiment"))
    meaning = markdown.index("<details><summary>What the words and columns mean</summary>")
    assert markdown.index(setups[2]) < table < meaning


def test_html_report_has_folded_definitions_at_its_end(reported):
    page = (reported / "report.html").read_text()
    assert "<title>3 experiments in walk</title>" in page
    at = [
        page.index(text) for text in ('class="conclusion">', "<h2>", "<li><b>base</b>", "<table>")
    ]
    assert at == sorted(at)
    assert page.index("<details><summary>") > page.rindex("</table>")
    assert "<details open" not in page


def test_report_has_the_same_bytes_after_another_commit(reported):
    root = reported.parents[1]

    def made() -> dict[str, bytes]:
        paths = (path for path in reported.rglob("*") if path.is_file())
        return {path.relative_to(reported).as_posix(): path.read_bytes() for path in paths}

    first = made()
    shutil.rmtree(reported)
    shutil.rmtree(root / "results/.work", ignore_errors=True)
    git(root, "init", "-q")
    commit(root, "results")
    report.report(root)
    assert made() == first
    assert b"git log -1 dvc.lock" in first["report.html"]


def test_report_leaves_out_a_video_that_shows_an_earlier_policy(project):
    filmed = {"seeds": [1, 2], "evaluation": {"episodes": 4, "seed": 1, "video": True}}
    params = params_of(project, behavior="Walker", a=filmed)
    for seed in (1, 2):
        (project / f"results/evaluate/a/seed{seed}/median.gif").write_bytes(b"film %d" % seed)

    def films() -> list[bytes]:
        tasks = compare(outcomes(project, params))
        shown = report._films(tasks[0], tasks, project, params, project)
        return [(project / figure.file).read_bytes() for figure in shown]

    assert films() == [b"film 1"]
    trained(project, "a", 1, "other", end=1.0)
    assert films() == [b"film 2"]
    trained(project, "a", 2, "another", end=1.0)
    assert films() == []


def test_model_card_leaves_out_a_score_that_was_measured_with_an_earlier_policy(
    project, monkeypatch
):
    monkeypatch.chdir(project)
    assert card._of_dag("a", 1, "walk", []).metrics["Walker"]["mean_return"] == 11.0
    trained(project, "a", 1, "other", end=1.0)
    stale = r"was exported from an earlier policy .* `dvc repro export@a-1`"
    with pytest.raises(SettingsError, match=stale):
        card._of_dag("a", 1, "walk", [])
    exported(project, "a", 1)
    assert card._of_dag("a", 1, "walk", []).metrics == {}
