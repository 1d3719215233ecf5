"""`pipeline init`: a user's project outside a checkout, which both engines run.

A project has the parameters and the trainer files; the code, and the rules of Snakemake, stay in
the installed package. dvc.yaml is the package's own with two changes: stages are started as
modules, and the stage `check`, which notes the code of the others, runs always, since DVC can watch
no files outside the project without naming this machine's folders.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.commands.parser import Parser, option
from pipeline.envs.sources.executables import executable_of
from pipeline.errors import SettingsError, brief, shell_command
from pipeline.files import write_whole
from pipeline.protocol.specs import BehaviorSpec
from pipeline.settings.environments import BridgeSource, EnvironmentParams, PathSource, named
from pipeline.settings.params import load_params
from pipeline.settings.plan import write_plan
from pipeline.settings.reader import to_map
from pipeline.settings.yaml_file import dump_yaml
from pipeline.stages.check import check_ids
from pipeline.stages.shared.project import checkout
from pipeline.tracking.run_metadata import git

_COPIED = (
    "constraints.txt",
    ".dvcignore",
    ".gitignore",
    ".dvc/.gitignore",
    ".dvc/config",
    ".dvc/plots/comparison.json",
    ".dvc/plots/improvement.json",
    ".dvc/plots/learning.json",
    "profiles",
    "workflow/cluster",
)
"""Files and folders of this repository that every project has."""
WAYS = "--env NAME, --unity BUILD, --gymnasium ID or --pettingzoo ID"
_IMAGE = 3
"""Dimensions of a visual observation."""
_NATURE_CNN_PIXELS, _SIMPLE_PIXELS = 36, 20
"""Least sides of the images that these encoders take."""
DVC_HEADER = """\
# The DAG for DVC; Snakefile has the same one. The tables under `runs` are made from params.yaml by
# `pipeline plan`. The code is that of the installed package rl-pipeline: the stage `check`, which
# takes a second, always runs, and notes the contents of each stage's sources in `workflow/code`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behavior:
    """Facts about one behavior, as the environment reports them."""

    spec: BehaviorSpec
    """Observations and actions."""
    n_agents: int
    """Agents at the first step."""
    in_groups: bool = False
    """Whether agents share rewards."""
    n_teams: int = 1
    """Teams that play against each other."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline init`."""
    parser.description = "Write a project that trains agents in an environment, without a checkout."
    parser.add_argument("folder", type=Path, metavar="DIR", help="the project; may be there")
    which = parser.add_mutually_exclusive_group()
    option(which, "--env NAME", "any name (default: the example balance_ball)")
    option(which, "--unity BUILD", "a Unity player, or its folder")
    option(which, "--gymnasium ID", "an environment of Gymnasium")
    option(which, "--pettingzoo ID", "an environment of PettingZoo")
    text = "how the agents learn; default: poca where they share rewards, else ppo"
    parser.add_argument("--trainer", choices=("ppo", "sac", "poca"), help=text)


def run(arguments: argparse.Namespace) -> str:
    """Ask the environment for its specification, and write the project."""
    folder: Path = arguments.folder
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{folder}: is a file; name a folder, new or with your module in it")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        environment = _environment(arguments, folder)
        name = _name_of(environment, folder)
        _refuse_what_is_there(folder, f"config/{name}.yaml")
        behaviors = _ask(environment, folder)
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    trainers = {key: trainer_of(behavior, arguments.trainer) for key, behavior in behaviors.items()}
    for file, text in _texts(environment, name, behaviors, trainers, folder).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file == ".gitignore" and path.exists():
            write_whole(path, f"{path.read_text(encoding='utf-8')}\n{text}")
        elif not path.exists():
            write_whole(path, text)
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    _repository(folder)
    with contextlib.chdir(folder):
        params = load_params("params.yaml")
        check_ids(params)
        write_plan(params)
    lines = [f"Wrote {folder}: {'; '.join(_described(behaviors))}."]
    if not (arguments.env or arguments.unity or arguments.gymnasium or arguments.pettingzoo):
        lines.append(f"balance_ball is an example; name your own environment by {WAYS}.")
    lines.append("Run everything, with a table at the end:")
    there = "" if folder.samefile(Path()) else f"{shell_command('cd', folder)} && "
    return "\n".join([*lines, f"{there}pipeline run --cores 2"])


def _refuse_what_is_there(folder: Path, trainer: str) -> None:
    """Refuse a folder that has project files; a README stays, and .gitignore is extended."""
    files = {"params.yaml", "dvc.yaml", "Snakefile", trainer, *_COPIED} - {".gitignore"}
    if existing := sorted(file for file in files if (folder / file).exists()):
        raise SettingsError(
            f"{folder}: has {', '.join(existing)} already, and nothing is overwritten; name "
            "another folder, or move them away"
        )


def _environment(arguments: argparse.Namespace, folder: Path) -> EnvironmentParams:
    """Return the environment as the folder's params.yaml will name it."""
    for kind in ("gymnasium", "pettingzoo"):
        if identifier := getattr(arguments, kind):
            return named(f"{kind}:{identifier}")
    if arguments.unity is not None:
        environment: EnvironmentParams = PathSource(path=arguments.unity)
    else:
        environment = named(arguments.env or "balance_ball")
    if isinstance(environment, BridgeSource) and environment.source == "module":
        file = Path(f"{environment.id.partition(':')[0].partition('.')[0]}.py")
        if file.is_file() and not (folder / file).exists():
            raise SettingsError(
                f"{file}: is here, but a project needs its environment beside params.yaml; "
                f"`{shell_command('mkdir', '-p', folder)} && {shell_command('mv', file, folder)}`, "
                "or make the project here: `pipeline init .` with the same options"
            )
    if not isinstance(environment, PathSource):
        return environment
    if Path(environment.path, "ProjectSettings").is_dir():
        raise SettingsError(
            f"{environment.path}: is a Unity project; build it in the Editor and name the build "
            "here. The source 'unity' of params.yaml builds it from then on"
        )
    environment = replace(environment, path=os.path.relpath(environment.path, folder))
    return replace(environment, path=environment.found(folder))


def _name_of(environment: EnvironmentParams, project: Path) -> str:
    """Return a name for params.yaml, which becomes a folder; of a build that of the project."""
    source = getattr(environment, "id", "") or source_of(environment, project)
    word = getattr(environment, "name", None) or Path(source.partition(":")[0]).stem
    if isinstance(environment, PathSource):
        word = project.resolve().name
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") or "environment"


def source_of(environment: EnvironmentParams, project: Path = Path()) -> str:
    """Return the text that names the environment on the command line, in the project."""
    if isinstance(environment, PathSource):
        path = os.path.relpath(executable_of(project / environment.found(project)), project)
        return path if "/" in path else f"./{path}"
    if isinstance(environment, BridgeSource):
        kind = "" if environment.source == "module" else f"{environment.source}:"
        return f"{kind}{environment.id}"
    return getattr(environment, "name", None) or ""


def _ask(environment: EnvironmentParams, folder: Path) -> dict[str, Behavior]:
    """Start the environment and return its behaviors by name without team."""
    from pipeline.api import make_env

    copies = getattr(environment, "copies", None)
    behaviors: dict[str, Behavior] = {}
    # Modules are looked for beside params.yaml, as the stages will do.
    project = str(folder.resolve())
    sys.path.insert(0, project)
    try:
        with (
            contextlib.chdir(project),
            contextlib.closing(make_env(source_of(environment), n_agents=copies)) as env,
        ):
            env.reset()
            for full, spec in env.behavior_specs.items():
                steps = env.get_steps(full)[0]
                name = full.partition("?")[0]
                before = behaviors.get(name, Behavior(spec=spec, n_agents=0, n_teams=0))
                behaviors[name] = replace(
                    before,
                    n_agents=before.n_agents + len(steps),
                    in_groups=before.in_groups or bool((steps.group_id > 0).any()),
                    n_teams=before.n_teams + 1,
                )
    finally:
        sys.path.remove(project)
    return behaviors


def _texts(
    environment: EnvironmentParams,
    name: str,
    behaviors: Mapping[str, Behavior],
    trainers: Mapping[str, dict[str, Any]],
    folder: Path,
) -> dict[str, str]:
    """Return the files of the project, by path in it."""
    short = {
        key: settings | {"max_steps": 2 * rollout_of(behaviors[key]), "summary_freq": 1000}
        for key, settings in trainers.items()
    }
    kind = "_".join(sorted({str(settings["trainer_type"]) for settings in trainers.values()}))
    trainer, short_file = f"config/{name}.yaml", f"config/{name}_short.yaml"
    source = source_of(environment, folder)
    learn = shell_command("pipeline", "learn", short_file, "--env", source, "--run-id", "first")
    comment = "".join(f"# {line}\n" for line in _described(behaviors))
    left_out: tuple[Any, ...] = (None, [], {}, "auto")  # the defaults
    options = {key: value for key, value in to_map(environment).items() if value not in left_out}
    steps = {key: {"max_steps": settings["max_steps"]} for key, settings in short.items()}
    tried = dump_yaml({"behaviors": steps})
    entry = dump_yaml({name: {"source": environment.source, **options}})
    experiment = f"{name}_{kind}"
    second = {
        "environment": name,
        "trainer": trainer,
        "overrides": {"behaviors": {key: _slower(settings) for key, settings in trainers.items()}},
        "seeds": [1, 2, 3],
        "stages": ["train", "export", "evaluate"],
        "evaluation": {"episodes": 50, "seed": 10000},
    }
    second_entry = dump_yaml({f"{experiment}_slower": second})
    texts = {
        "params.yaml": template("params.yaml").format(
            environment="".join(f"  {line}\n" for line in entry.splitlines()),
            experiment=experiment,
            name=name,
            trainer=trainer,
            short="".join(f"    #   {line}\n" for line in tried.splitlines()),
            second="".join(f"  # {line}\n" for line in second_entry.splitlines()),
        ),
        trainer: f"# Where to begin, chosen by what the environment says of itself:\n{comment}"
        + dump_yaml({"behaviors": trainers}),
        short_file: f"# To see that it runs: {trainer} with few steps.\n"
        + dump_yaml({"behaviors": short}),
        "dvc.yaml": dvc_yaml((checkout() / "dvc.yaml").read_text(encoding="utf-8")),
        "Snakefile": template("Snakefile"),
        "README.md": template("README.md").format(
            title=name, source=source, trainer=trainer, version=__version__, learn=learn
        ),
    }
    root = checkout()
    copied = [
        path for name in _COPIED for path in (root / name, *sorted(root.glob(f"{name}/**/*")))
    ]
    return texts | {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for path in copied
        if path.is_file()
    }


def template(name: str) -> str:
    """Return the text of a project's file, with names in braces where parts are filled in."""
    return Path(__file__).with_name("templates").joinpath(f"{name}.txt").read_text("utf-8")


def _slower(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides of a trainer's settings, with a third of its learning rate."""
    rate = trainer["hyperparameters"]["learning_rate"] / 3
    return {"hyperparameters": {"learning_rate": float(f"{rate:.0e}")}}


def dvc_yaml(ours: str) -> str:
    """Return the dvc.yaml of a project, made from this repository's."""
    stages = ours[ours.index("vars:") :]
    stages = re.sub(r"python workflow/scripts/(\w+)\.py", r"python -m pipeline.stages \1", stages)
    stages = re.sub(r" +- (src/pipeline|workflow/scripts)\n", "", stages)
    return DVC_HEADER + stages.replace("  check:\n", "  check:\n    always_changed: true\n", 1)


def _described(behaviors: Mapping[str, Behavior]) -> list[str]:
    """Return a line for each behavior."""
    lines = []
    for name, behavior in behaviors.items():
        shapes = [" x ".join(map(str, spec.shape)) for spec in behavior.spec.observation_specs]
        n, branches = behavior.spec.action_spec
        acts = [f"{n} continuous"] if n else []
        acts += [f"discrete of {', '.join(map(str, branches))}"] if branches else []
        more = f" in {behavior.n_teams} teams" if behavior.n_teams > 1 else ""
        lines.append(
            f"{brief(name)} with {behavior.n_agents} agents{more}, observations of "
            f"{' and '.join(shapes)}, actions {' and '.join(acts)}"
        )
    return lines


def _repository(folder: Path) -> None:
    """Make a git repository for DVC, or configure DVC to work without one."""
    if git(folder, "rev-parse", "--is-inside-work-tree") is None and (
        git(folder, "init", "--quiet") is None
    ):
        config = folder / ".dvc/config"
        write_whole(config, config.read_text(encoding="utf-8") + "    no_scm = true\n")


def trainer_of(behavior: Behavior, trainer: str | None = None) -> dict[str, Any]:
    """Return trainer settings that suit a behavior's observations and actions.

    Common sizes: small networks for few numbers, a convolution and more exploration for images and
    discrete actions; self-play for teams. Without `trainer` POCA for agents that share rewards,
    else PPO.
    """
    observations, actions = behavior.spec
    images = [observation.shape for observation in observations if len(observation.shape) == _IMAGE]
    n_numbers = sum(
        math.prod(observation.shape)
        for observation in observations
        if len(observation.shape) < _IMAGE
    )
    choices = bool(actions.discrete_branches)
    buffer_size = rollout_of(behavior)
    network: dict[str, Any] = {
        "normalize": n_numbers > 0,
        "hidden_units": 256 if images else 64 if n_numbers <= 16 else 128,
        "num_layers": 2,
    }
    if images:
        pixels = min(side for shape in images for side in shape[1:])
        network["vis_encode_type"] = (
            "nature_cnn" if pixels >= _NATURE_CNN_PIXELS
            else "simple" if pixels >= _SIMPLE_PIXELS else "match3"
        )  # fmt: skip
    kind = trainer or ("poca" if behavior.in_groups else "ppo")
    on_policy = {
        "batch_size": buffer_size // (8 if images else 16),
        "buffer_size": buffer_size,
        "learning_rate": 3e-4 if images else 1e-3 if choices else 3e-4,
        "learning_rate_schedule": "constant" if behavior.n_teams > 1 else "linear",
        "beta": 0.01 if images else 0.005 if choices else 0.001,
        "epsilon": 0.2,
        "lambd": 0.95,
        "num_epoch": 4 if images else 10,
    }
    settings: dict[str, Any] = {
        "trainer_type": kind,
        "hyperparameters": _sac_of(behavior) if kind == "sac" else on_policy,
        "network_settings": network,
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "keep_checkpoints": 3,
        "max_steps": 1000000 if images or behavior.n_teams > 1 else 300000,
        "time_horizon": 128,
        "summary_freq": 10000,
    }
    if behavior.n_teams > 1:
        settings["self_play"] = {"save_steps": 20000, "team_change": 100000, "swap_steps": 10000}
    return settings


def _sac_of(behavior: Behavior) -> dict[str, Any]:
    """Return SAC's hyperparameters: an update for each step of all agents."""
    observations, actions = behavior.spec
    n_numbers = sum(math.prod(observation.shape) for observation in observations)
    return {
        "batch_size": 256,
        # At most a gigabyte of observations.
        "buffer_size": min(200_000, 2**28 // max(n_numbers, 1)),
        "buffer_init_steps": 1000,
        "learning_rate": 3e-4,
        "learning_rate_schedule": "constant",
        # Entropy is measured against the reward: of choices it is larger than of small moves.
        "init_entcoef": 0.05 if actions.discrete_branches else 0.5,
        "steps_per_update": max(behavior.n_agents, 1),
        "tau": 0.005,
    }


def rollout_of(behavior: Behavior) -> int:
    """Return 128 steps of each agent, within limits between too rare and too noisy updates."""
    rows: int = 2 ** math.ceil(math.log2(max(behavior.n_agents, 1) * 128))
    return min(max(rows, 2048), 16384)
