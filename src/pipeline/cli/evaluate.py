"""`pipeline evaluate`: play episodes with ONNX policies in any environment."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cli.parser import Parser, option
from pipeline.errors import SettingsError, StageError
from pipeline.export.policy import OnnxPolicy


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline evaluate`."""
    parser.add_argument(
        "models",
        nargs="+",
        type=Path,
        metavar="MODEL",
        help="an .onnx file, named like its behavior; several files or the folder of a run, for an "
        "environment with several behaviors; or results/export/EXPERIMENT, for all its seeds",
    )
    text = (
        "the path of an executable, an environment of params.yaml, balance_ball, gymnasium:ID, "
        "pettingzoo:ID or module:function"
    )
    option(parser, "--env NAME", text, required=True)
    option(parser, "--episodes N", "number of episodes", default=100)
    text = (
        "draw actions at random, as in training, and as in Unity without 'Deterministic "
        "Inference'; default: the most probable actions, if the model has them (models of package "
        "1.x do not)"
    )
    option(parser, "--stochastic", text)
    # The default is far from the usual small seeds of training, so that no episode begins like a
    # training episode.
    option(parser, "--seed N", "seed of the environment and of the policy", default=10_000)
    text = (
        "film an episode as .gif, or as .mp4 with the extra 'video'; the episode is played again "
        "in this process, in a simulator or an environment of Gymnasium or PettingZoo that can "
        "draw pictures"
    )
    option(parser, "--video FILE", text)
    kinds = {"choices": ("median", "best"), "default": "median", "metavar": None}
    text = "film the episode with the median or best return"
    option(parser, "--video-episode KIND", text, **kinds)
    text = "pass everything after this to the executable"
    parser.add_argument("--env-args", nargs=argparse.REMAINDER, default=[], help=text)


def run(arguments: argparse.Namespace) -> str:
    """Play episodes, and return a line for each behavior of each seed."""
    from pipeline.dag.stages.evaluate import can_be_deterministic, metrics_of, play
    from pipeline.envs.executable import Build
    from pipeline.envs.named_env import executable_of
    from pipeline.evaluation.video import choose

    if arguments.episodes < 1:
        raise SettingsError(f"--episodes: must be at least 1, got {arguments.episodes}.")
    target: Path | None = arguments.video
    seeds = _seeds(arguments.models)
    if seeds and target is not None:
        raise SettingsError(
            f"--video: films one policy, but {arguments.models[0]} has {len(seeds)} seeds; give "
            f"the folder of one seed, such as {seeds[0]}"
        )
    # Policies are loaded first, so that a broken file is refused before an environment is built.
    by_folder = {folder: _policies([folder]) for folder in seeds}
    # Without folders of seeds, `by_folder` has one entry with the given policies, so that one loop
    # serves both cases.
    by_folder = by_folder or {Path(): _policies(arguments.models)}
    program = executable_of(arguments.env)
    build = Build(file=program, args=tuple(arguments.env_args), simulator=None)
    lines, means = [], defaultdict[str, list[float]](list)
    for folder, policies in by_folder.items():
        # Either all policies are deterministic or none, because the policies of an environment's
        # behaviors act together.
        deterministic = can_be_deterministic(policies) and not arguments.stochastic
        try:
            episodes = play(
                policies,
                build,
                deterministic=deterministic,
                episodes=arguments.episodes,
                seed=arguments.seed,
                videos=None if target is None else {arguments.video_episode: target},
            )
        except StageError as error:
            raise StageError(f"{arguments.env}: {error}") from error
        for behavior, metrics in metrics_of(episodes).items():
            means[behavior].append(metrics["mean_return"])
            lines.append(
                f"{f'{folder.name}, ' if seeds else ''}{behavior}: {metrics['episodes']} episodes, "
                f"mean return {metrics['mean_return']:.3f} ({metrics['min_return']:.3f} to "
                f"{metrics['max_return']:.3f}), mean length {metrics['mean_length']:.1f}"
            )
    for behavior, values in means.items() if seeds else ():
        lines.append(
            f"{behavior}: {len(values)} seeds, mean return {sum(values) / len(values):.3f} (means "
            f"of seeds {min(values):.3f} to {max(values):.3f})"
        )
    lines.append(_actions_in_words(policies, deterministic=deterministic))
    if target is not None:
        episode = choose(episodes)[arguments.video_episode]
        lines.append(
            f"{target}: the {arguments.video_episode} episode of {episode.behavior}, number "
            f"{episode.index}, return {episode.episode_return:.3f}, {episode.length} steps"
        )
    return "\n".join(lines)


def _seeds(models: Sequence[Path]) -> list[Path]:
    """Return the folders of an experiment's seeds; [] if `models` is not an experiment's folder."""
    if len(models) > 1 or any(models[0].glob("*.onnx")):
        return []
    folders = {path.parent for path in models[0].glob("seed*/*.onnx")}
    # Names are sorted by length first, so that seed10 comes after seed9.
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def _policies(models: Sequence[Path]) -> dict[str, OnnxPolicy]:
    from pipeline.export.policy import OnnxPolicy

    paths: dict[str, Path] = {}
    for model in models:
        found = sorted(model.glob("*.onnx")) if model.is_dir() else [model]
        if not found:
            raise SettingsError(
                f"{model}: is a folder without .onnx files; give the folder of a run, such as "
                "results/<run-id> or results/export/<experiment>/seed<k>, or a file"
            )
        for path in found:
            # The same file may be given twice, by its path and by its folder.
            other = paths.setdefault(path.stem, path)
            if other.resolve() != path.resolve():
                raise SettingsError(
                    f"{path}: is a second policy of the behavior {path.stem}, after {other}; leave "
                    "one of them out"
                )
    return {behavior: OnnxPolicy(path) for behavior, path in paths.items()}


def _actions_in_words(policies: Mapping[str, OnnxPolicy], *, deterministic: bool) -> str:
    if deterministic:
        return (
            "Actions: deterministic, the most probable actions; --stochastic draws them at random, "
            "as training and Unity do by default"
        )
    old = [name for name, policy in policies.items() if not policy.has_deterministic_actions]
    reason = f"; {', '.join(old)} has no deterministic actions (package 1.x)" if old else ""
    return f"Actions: stochastic, drawn at random as in training{reason}"
