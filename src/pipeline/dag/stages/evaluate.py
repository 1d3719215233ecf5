"""The `evaluate` stage: play episodes with the exported policy, and write their returns."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import files
from pipeline.dag import run_context
from pipeline.dag.attempt import Job, attempt_at, read_map
from pipeline.envs import executable
from pipeline.errors import StageError
from pipeline.evaluation.episodes import Episode, write_episodes
from pipeline.evaluation.plots import plot_returns
from pipeline.evaluation.statistics import summarize
from pipeline.export.policy import OnnxPolicy
from pipeline.tracking import mlflow_run, run_metadata

OUTPUTS = ("returns.png", "episodes.csv", "metrics.json")
VIDEOS = {"median": "median.gif", "best": "best.gif"}
"""Files that the stage writes in addition if `video` is true."""


def job_of(run: run_context.Run) -> Job:
    """Return the stage's job for a run."""
    evaluation = run.experiment.evaluation
    if evaluation is None:
        raise StageError(
            f"params.yaml: experiments.{run.name} has no section 'evaluation'; add the section to "
            "run this stage"
        )
    return Job(
        stage="evaluate",
        instance=run.instance,
        # Optional keys are included only if they are set: with its default, a new key would change
        # the fingerprint of every earlier evaluation.
        params={"episodes": evaluation.episodes, "seed": evaluation.seed}
        | ({"video": True} if evaluation.video else {})
        | ({"stochastic": True} if evaluation.stochastic else {}),
        inputs=(executable.folder_of(run.experiment.environment), run.folder("export")),
        outputs=tuple(
            run.folder("evaluate") / name
            for name in (*OUTPUTS, *(VIDEOS.values() if evaluation.video else ()))
        ),
    )


def evaluate(run: run_context.Run) -> None:
    """Play the episodes, and write the episodes, their statistics and a histogram."""
    job = job_of(run)
    with (
        attempt_at(job, run.root, lambda: job_of(run.reread())) as attempt,
        run_context.recorded(run, attempt) as record,
    ):
        build = executable.load(run.root / executable.folder_of(run.experiment.environment))
        # The files are sorted, because the order of a folder's files differs between file systems.
        models = sorted((run.root / job.inputs[1]).glob("*.onnx"))
        policies = {path.stem: OnnxPolicy(path) for path in models}
        deterministic = can_be_deterministic(policies) and not job.params.get("stochastic")
        videos = VIDEOS if run.experiment.filmed else {}
        played = play(
            policies,
            build,
            deterministic=deterministic,
            episodes=job.params["episodes"],
            seed=job.params["seed"],
            log_folder=attempt.run,
            videos={kind: attempt.out(name) for kind, name in videos.items()},
        )
        metrics = metrics_of(played)
        write_episodes(attempt.out("episodes.csv"), played)
        facts = {} if deterministic else {run_metadata.STOCHASTIC: True}
        files.write_json(attempt.out("metrics.json"), _with_policy(metrics, run, facts))
        title = f"{run.name}, seed {run.seed}"
        returns = [episode.episode_return for episode in played]
        plot_returns(attempt.out("returns.png"), returns, title=title)
        if record is not None:
            tell(record, run, attempt.out("metrics.json").parent)


# The section `runtime` has no effect: ONNX Runtime always runs on one thread of the CPU.
main = partial(run_context.main, __doc__, evaluate, short=True, has_runtime=False)


def _with_policy(
    metrics: Mapping[str, Mapping[str, Any]], run: run_context.Run, facts: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return each behavior's metrics, with `facts` and the digest of the exported policy added."""
    exported = read_map(run.root / run.folder("export") / "export.json")
    return {
        # Exports of earlier versions have no digest.
        name: {
            **values,
            **facts,
            run_metadata.POLICY_DIGEST: exported.get(name, {}).get(run_metadata.POLICY_DIGEST),
        }
        for name, values in metrics.items()
    }


def tell(record: mlflow_run.MlflowRun, run: run_context.Run, folder: Path) -> None:
    """Write the files of an evaluation to MLflow, and the score of the policy.

    With self-play there is no score, because the mean return depends on the opponents.
    """
    metrics = {
        # `isinstance` would take truth values, which are no metrics, for integers.
        behavior: {name: value for name, value in values.items() if type(value) in (int, float)}
        for behavior, values in read_map(folder / "metrics.json").items()
    }
    exported = read_map(run.root / run.folder("export") / "export.json").values()
    behaviors = run.params.run_settings(run.name).behaviors
    scores = {
        name: values["mean_return"]
        for name, values in metrics.items()
        if name in behaviors and behaviors[name].self_play is None
    }
    job = job_of(run)
    record.settings(job.params)
    record.results(run_metadata.flat(metrics))
    record.artifacts([folder / path.name for path in job.outputs])
    step = max((report.get("step", 0) for report in exported), default=0)
    record.picture(folder / "returns.png", step=step)
    record.made(folder / "metrics.json")
    record.score(
        scores,
        environment=run.experiment.environment,
        build=run.root / executable.folder_of(run.experiment.environment),
        params=job.params,
    )


def can_be_deterministic(policies: Mapping[str, OnnxPolicy]) -> bool:
    """Return whether all models have outputs for deterministic actions.

    Models for the Unity package 1.x have no such outputs.
    """
    return all(policy.has_deterministic_actions for policy in policies.values())


def play(
    policies: Mapping[str, OnnxPolicy],
    build: executable.Build,
    *,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    log_folder: Path | None = None,
    videos: Mapping[str, Path] | None = None,
) -> list[Episode]:
    """Return `episodes` episodes of each behavior, played in a build with the behavior's policy.

    `seed` is the seed of the environment and of stochastic actions. `videos` has the video files to
    write: `median` for the episode with the median return, `best` for the best episode.

    Raises:
        PipelineError: A model cannot be run, or the environment cannot be started or fails.
    """
    from pipeline.envs.unity import UnityEnvironment
    from pipeline.evaluation import video
    from pipeline.evaluation.episodes import evaluate as play_episodes

    if videos:
        # The check comes first, so that environments without pictures are refused at once.
        video.check(build.file, videos.values())
    with UnityEnvironment(
        build.file,
        seed=seed,
        additional_args=build.args,
        log_folder=None if log_folder is None else log_folder.resolve(),
        no_graphics=True,
    ) as env:
        played = play_episodes(
            env, policies, episodes=episodes, seed=seed, deterministic=deterministic
        )
    if videos:
        # The episodes to film are known only after all episodes, so they are played a second time.
        chosen = video.choose(played)
        episodes_by_file = {path: chosen[kind] for kind, path in videos.items()}
        video.film(
            build.file,
            build.args,
            policies,
            played,
            episodes_by_file,
            seed=seed,
            deterministic=deterministic,
        )
    return played


def metrics_of(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return statistics of each behavior's episodes, over the episodes of all its teams."""
    by_behavior: dict[str, list[Episode]] = {}
    for episode in episodes:
        # Teams of a behavior, `Name?team=0` and `Name?team=1`, have the same policy.
        by_behavior.setdefault(episode.behavior.split("?", maxsplit=1)[0], []).append(episode)
    metrics = {}
    for behavior, played in by_behavior.items():
        summary = summarize([ep.episode_return for ep in played])
        metrics[behavior] = {
            "episodes": summary.n,
            "mean_return": summary.mean,
            "std_return": summary.std,
            "ci_low": summary.ci_low,
            "ci_high": summary.ci_high,
            "median_return": summary.median,
            "min_return": summary.minimum,
            "max_return": summary.maximum,
            "mean_length": sum(ep.length for ep in played) / len(played),
        }
    return metrics
