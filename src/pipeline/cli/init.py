"""`pipeline init`: write a project that both engines can run, outside a checkout.

A project has the parameters and the trainer files; the code and Snakemake's rules stay in the
installed package. dvc.yaml is the repository's file with two changes: stages are started as
modules, and the stage `check`, which records the code of the other stages, always runs, because DVC
can only watch files outside the project by their absolute paths, which differ between machines.
"""

import argparse
import contextlib
import itertools
import math
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.cli.parser import Parser, option
from pipeline.core.specs import BehaviorSpec
from pipeline.dag.project import checkout
from pipeline.dag.stages.check import check_ids
from pipeline.envs.base import BaseEnv
from pipeline.envs.sources.executables import executable_of
from pipeline.errors import SettingsError, brief, shell_command
from pipeline.files import similar, write_whole
from pipeline.settings.project.environments import (
    BridgeSource,
    EnvironmentParams,
    PathSource,
    named,
)
from pipeline.settings.project.params import load_params
from pipeline.settings.project.plan import write_plan
from pipeline.settings.reader import to_map
from pipeline.settings.yaml_file import dump_yaml
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
"""Files and folders that are copied from this repository into every project."""
_IMAGE = 3
"""Number of axes of a visual observation."""
_XQC_FROM_MS = 2.0
"""Minimum duration of an exchange with the environment, in milliseconds, for which XQC is chosen
(docs/explanation/algorithms.md)."""
_N_TIMED, _MOST_S = 20, 2.0
"""Maximum number of exchanges with the environment that are timed, and the seconds after which
timing ends."""
_NATURE_CNN_PIXELS, _SIMPLE_PIXELS = 36, 20
"""Smallest images, in pixels a side, that the encoders nature_cnn and simple accept."""
DVC_HEADER = """\
# The DAG for DVC; Snakefile has the same one. The tables under `runs` are made from params.yaml by
# `pipeline plan`. The code is that of the installed package rl-pipeline: the stage `check`, which
# takes a second, always runs, and notes the contents of each stage's sources in `workflow/code`.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Behavior:
    """What the environment reports about a behavior."""

    spec: BehaviorSpec
    """Specification of the behavior's observations and actions."""
    n_agents: int
    """Number of agents at the first step."""
    in_groups: bool = False
    """Whether agents are in groups that share rewards."""
    n_teams: int = 1
    """Number of teams that play against each other."""
    exchange_ms: float | None = None
    """Median time of an exchange with the environment, in milliseconds; None if not measured."""


def add_options(parser: Parser) -> None:
    """Add the options of `pipeline init`."""
    text = "folder of the project; it may exist"
    parser.add_argument("folder", type=Path, metavar="DIR", help=text)
    which = parser.add_mutually_exclusive_group()
    text = "the environment: a name that `pipeline env list` shows, or module:function; default: \
balance_ball, an example"
    option(which, "--env NAME", text)
    option(which, "--unity BUILD", "a Unity build: its executable or its folder")
    option(which, "--gymnasium ID", "an environment of Gymnasium")
    option(which, "--pettingzoo ID", "an environment of PettingZoo")
    text = "the algorithm; default: poca if agents share rewards, xqc for one agent with \
continuous actions in an environment that takes 2 ms or more for a step, else ppo"
    parser.add_argument("--trainer", choices=("ppo", "sac", "poca", "xqc"), help=text)

    option(parser, "--demo FILE", "recorded episodes (.demo) that the policy first imitates")


def run(arguments: argparse.Namespace) -> str:
    """Ask the environment for its specification, and write the project."""
    folder: Path = arguments.folder
    if folder.exists() and not folder.is_dir():
        text = f"{folder}: is a file; give a new folder, or one with your module in it"
        raise SettingsError(text)
    demo = arguments.demo
    if demo is not None and not Path(demo).is_file():
        hint = similar(Path(demo)) or "; name a .demo file"
        raise SettingsError(f"--demo: {demo} does not exist{hint}")
    # A failed start of the environment must not leave an empty folder behind.
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        environment = _environment(arguments, folder)
        if arguments.trainer == "xqc" and isinstance(environment, BridgeSource):
            # XQC was measured with one copy, where it updates its networks after each step of the
            # agent.
            environment = replace(environment, copies=1)
        name = _name_of(environment, folder)
        _refuse_what_is_there(folder, f"config/{name}.yaml")
        behaviors = _query_behaviors(environment, folder)
    except BaseException:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    trainers = {key: trainer_of(behavior, arguments.trainer) for key, behavior in behaviors.items()}
    for file, text in _texts(environment, name, behaviors, trainers, folder, demo).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if file == ".gitignore" and path.exists():
            write_whole(path, f"{path.read_text(encoding='utf-8')}\n{text}")
        # An existing README is the user's own, and is kept.
        elif not path.exists():
            write_whole(path, text)
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
    _repository(folder)
    # Paths in params.yaml are relative to its folder.
    with contextlib.chdir(folder):
        params = load_params("params.yaml")
        check_ids(params)
        write_plan(params)
    lines = [f"Wrote {folder}: {'; '.join(_described(behaviors))}."]
    if not (arguments.env or arguments.unity or arguments.gymnasium or arguments.pettingzoo):
        ways = "--env NAME, --unity BUILD, --gymnasium ID or --pettingzoo ID"
        lines.append(f"balance_ball is an example; give your own environment by {ways}.")
    there = "" if folder.samefile(Path()) else f"{shell_command('cd', folder)} && "
    lines += ["Run everything, with a table at the end:", f"{there}pipeline run --cores 2"]
    return "\n".join(lines)


def _refuse_what_is_there(folder: Path, trainer: str) -> None:
    """Refuse a folder with project files; README.md is kept, and .gitignore is extended."""
    files = {"params.yaml", "dvc.yaml", "Snakefile", trainer, *_COPIED} - {".gitignore"}
    if existing := sorted(file for file in files if (folder / file).exists()):
        raise SettingsError(
            f"{folder}: has {', '.join(existing)} already, and nothing is overwritten; give "
            "another folder, or move these files away"
        )


def _environment(arguments: argparse.Namespace, folder: Path) -> EnvironmentParams:
    for kind in ("gymnasium", "pettingzoo"):
        if identifier := getattr(arguments, kind):
            return named(f"{kind}:{identifier}")
    if arguments.unity is not None:
        environment: EnvironmentParams = PathSource(path=arguments.unity)
    else:
        environment = named(arguments.env or "balance_ball")
    # The stages import the module from the project, not from the folder of this command.
    if isinstance(environment, BridgeSource) and environment.source == "module":
        file = Path(f"{environment.id.partition(':')[0].partition('.')[0]}.py")
        if file.is_file() and not (folder / file).exists():
            raise SettingsError(
                f"{file}: is here, but a project needs its environment next to params.yaml; "
                f"`{shell_command('mkdir', '-p', folder)} && {shell_command('mv', file, folder)}`, "
                "or make the project here: `pipeline init .` with the same options"
            )
    if not isinstance(environment, PathSource):
        return environment
    if Path(environment.path, "ProjectSettings").is_dir():
        raise SettingsError(
            f"{environment.path}: is a Unity project; build it in the Editor and give the build to "
            "--unity. Later the source 'unity' in params.yaml can build the project"
        )
    # The path is relative, so that the project and the build can be moved together.
    environment = replace(environment, path=os.path.relpath(environment.path, folder))
    return replace(environment, path=environment.found(folder))


def _name_of(environment: EnvironmentParams, project: Path) -> str:
    """Return the name in params.yaml and in files: for a build, the project folder's name."""
    source = getattr(environment, "id", "") or source_of(environment, project)
    word = getattr(environment, "name", None) or Path(source.partition(":")[0]).stem
    if isinstance(environment, PathSource):
        word = project.resolve().name
    # Letters, digits and underscores are allowed in all names that are derived from this name.
    return re.sub(r"[^a-z0-9]+", "_", word.lower()).strip("_") or "environment"


def source_of(environment: EnvironmentParams, project: Path = Path()) -> str:
    """Return the value of `--env` that names an environment for commands in `project`."""
    if isinstance(environment, PathSource):
        path = os.path.relpath(executable_of(project / environment.found(project)), project)
        # A path without a slash would be taken for a simulator's name.
        return path if "/" in path else f"./{path}"
    if isinstance(environment, BridgeSource):
        kind = "" if environment.source == "module" else f"{environment.source}:"
        return f"{kind}{environment.id}"
    return getattr(environment, "name", None) or ""


def _query_behaviors(environment: EnvironmentParams, folder: Path) -> dict[str, Behavior]:
    """Start the environment, and return its behaviors by name, without `?team=`."""
    from pipeline.api import make_env

    copies = getattr(environment, "copies", None)
    behaviors: dict[str, Behavior] = {}
    # Modules are imported from the folder of params.yaml, as in the stages.
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
                # The environment announces each team of a behavior separately; the agents of all
                # teams are counted.
                before = behaviors.get(name, Behavior(spec=spec, n_agents=0, n_teams=0))
                behaviors[name] = replace(
                    before,
                    n_agents=before.n_agents + len(steps),
                    in_groups=before.in_groups or bool((steps.group_id > 0).any()),
                    n_teams=before.n_teams + 1,
                )
            for name, behavior in behaviors.items():
                # Exchanges are timed only where the time decides between algorithms.
                if _suits_xqc(behavior) and len(behaviors) == 1:
                    behaviors[name] = replace(behavior, exchange_ms=_exchange_ms(env))
    finally:
        sys.path.remove(project)
    return behaviors


def _exchange_ms(env: BaseEnv) -> float:
    """Return the median milliseconds of a step with all continuous actions set to zero."""
    times = [time.perf_counter()]
    while len(times) <= _N_TIMED and times[-1] - times[0] < _MOST_S:
        env.step()
        times.append(time.perf_counter())
    # The median is used, because the first exchanges may be slow.
    return 1e3 * statistics.median(later - sooner for sooner, later in itertools.pairwise(times))


def _suits_xqc(behavior: Behavior) -> bool:
    """Return whether XQC was measured for such behaviors: one agent, vectors, continuous."""
    observations, actions = behavior.spec
    return (
        (behavior.n_agents, behavior.n_teams) == (1, 1)
        and not actions.discrete_branches
        and all(len(observation.shape) == 1 for observation in observations)
    )


def _texts(
    environment: EnvironmentParams,
    name: str,
    behaviors: Mapping[str, Behavior],
    trainers: Mapping[str, dict[str, Any]],
    folder: Path,
    demo: str | None,
) -> dict[str, str]:
    """Return the text of each file of the project, by path in the project's folder."""
    # Two rollouts are the shortest run in which new experience follows an update.
    short = {
        key: settings | {"max_steps": 2 * rollout_of(behaviors[key]), "summary_freq": 1000}
        for key, settings in trainers.items()
    }
    kind = "_".join(sorted({str(settings["trainer_type"]) for settings in trainers.values()}))
    trainer, short_file = f"config/{name}.yaml", f"config/{name}_short.yaml"
    source = source_of(environment, folder)
    learn = shell_command("pipeline", "learn", short_file, "--env", source, "--run-id", "first")
    comment = "".join(f"# {line}\n" for line in _described(behaviors))
    # Options with these default values are left out of params.yaml.
    left_out: tuple[Any, ...] = (None, [], {}, "auto")
    options = {key: value for key, value in to_map(environment).items() if value not in left_out}
    steps = {key: {"max_steps": settings["max_steps"]} for key, settings in short.items()}
    tried = dump_yaml({"behaviors": steps})
    entry = dump_yaml({name: {"source": environment.source, **options}})
    experiment = f"{name}_{kind}"
    recorded, cloning = dict[str, Any](), dict[str, Any]()
    if demo is not None:
        recorded = {f"{name}_demo": {"file": os.path.relpath(demo, folder)}}
        pretrain = {"epochs": 10, "batch_size": 256, "learning_rate": 3e-4}
        cloning = {"demonstrations": f"{name}_demo", "pretrain": pretrain}
    # This entry is written as a comment into params.yaml, as an example of a comparison.
    second = {
        "environment": name,
        "trainer": trainer,
        "overrides": {"behaviors": {key: _slower(settings) for key, settings in trainers.items()}},
        **cloning,
        "seeds": [1, 2, 3],
        "stages": [*(["pretrain"] if cloning else []), "train", "export", "evaluate"],
        "evaluation": {"episodes": 50, "seed": 10000},
    }
    second_entry = dump_yaml({f"{experiment}_slower": second})
    texts = {
        "params.yaml": template("params.yaml").format(
            environment="".join(f"  {line}\n" for line in entry.splitlines()),
            demonstrations="\n" + dump_yaml({"demonstrations": recorded}) if recorded else "",
            cloning=textwrap.indent(dump_yaml(cloning), "    ") if cloning else "",
            first_stage="      - pretrain\n" if cloning else "",
            experiment=experiment,
            name=name,
            trainer=trainer,
            short="".join(f"    #   {line}\n" for line in tried.splitlines()),
            second="".join(f"  # {line}\n" for line in second_entry.splitlines()),
        ),
        trainer: f"# Settings to start with, chosen by the environment's behaviors:\n{comment}"
        + dump_yaml({"behaviors": trainers}),
        short_file: f"# A first test: {trainer} with few steps.\n"
        + dump_yaml({"behaviors": short}),
        "dvc.yaml": dvc_yaml((checkout() / "dvc.yaml").read_text(encoding="utf-8")),
        "Snakefile": template("Snakefile"),
        "README.md": template("README.md").format(
            title=name, source=source, trainer=trainer, version=__version__, learn=learn
        ),
    }
    root = checkout()
    for path in (path for name in _COPIED for path in (root / name, *root.glob(f"{name}/**/*"))):
        if path.is_file():
            texts[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    return texts


def template(name: str) -> str:
    """Return the template of a project's file, with placeholders in braces."""
    return Path(__file__).with_name("templates").joinpath(f"{name}.txt").read_text("utf-8")


def _slower(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides that reduce a trainer's learning rate to a third."""
    rate = trainer["hyperparameters"]["learning_rate"] / 3
    return {"hyperparameters": {"learning_rate": float(f"{rate:.0e}")}}


def dvc_yaml(ours: str) -> str:
    """Return the text of a project's dvc.yaml; `ours` is the text of this repository's file."""
    # The header is left out, because it is about the checkout.
    stages = ours[ours.index("vars:") :]
    stages = re.sub(r"python workflow/scripts/(\w+)\.py", r"python -m pipeline.dag \1", stages)
    stages = re.sub(r" +- (src/pipeline|workflow/scripts)\n", "", stages)
    return DVC_HEADER + stages.replace("  check:\n", "  check:\n    always_changed: true\n", 1)


def _described(behaviors: Mapping[str, Behavior]) -> list[str]:
    lines = []
    for name, behavior in behaviors.items():
        shapes = [" x ".join(map(str, spec.shape)) for spec in behavior.spec.observation_specs]
        n, branches = behavior.spec.action_spec
        acts = [f"{n} continuous"] if n else []
        acts += [f"discrete of {', '.join(map(str, branches))}"] if branches else []
        more = f" in {behavior.n_teams} teams" if behavior.n_teams > 1 else ""
        ms = behavior.exchange_ms
        timed = "" if ms is None else f", {ms:.1f} ms for a step"
        lines.append(
            f"{brief(name)} with {behavior.n_agents} agents{more}, observations of "
            f"{' and '.join(shapes)}, actions {' and '.join(acts)}{timed}"
        )
    return lines


def _repository(folder: Path) -> None:
    """Make a git repository for DVC, or configure DVC to work without git."""
    if git(folder, "rev-parse", "--is-inside-work-tree") is None and (
        git(folder, "init", "--quiet") is None
    ):
        # DVC works without git if its configuration has `no_scm`.
        config = folder / ".dvc/config"
        write_whole(config, config.read_text(encoding="utf-8") + "    no_scm = true\n")


def trainer_of(behavior: Behavior, trainer: str | None = None) -> dict[str, Any]:
    """Return trainer settings that suit a behavior's observations and actions.

    The trainer is `trainer` if given; else POCA for agents that share rewards, XQC where it has
    been measured to need the least time, and PPO otherwise.
    """
    observations, actions = behavior.spec
    images = [observation.shape for observation in observations if len(observation.shape) == _IMAGE]
    others = (observation.shape for observation in observations if len(observation.shape) < _IMAGE)
    n_numbers = sum(map(math.prod, others))
    choices = bool(actions.discrete_branches)
    # The values of the settings below are starting points for an unknown task, and are meant to be
    # changed.
    buffer_size = rollout_of(behavior)
    network: dict[str, Any] = {
        # Normalisation concerns vectors only; images have values in 0..1 already.
        "normalize": n_numbers > 0,
        # The more inputs a network has, the wider are its layers.
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
    is_slow = behavior.exchange_ms is not None and behavior.exchange_ms >= _XQC_FROM_MS
    if trainer is None and is_slow and _suits_xqc(behavior):
        kind = "xqc"
    on_policy = {
        "batch_size": buffer_size // (8 if images else 16),
        "buffer_size": buffer_size,
        "learning_rate": 3e-4 if images else 1e-3 if choices else 3e-4,
        # In self-play the opponents improve to the end, so learning must not slow down.
        "learning_rate_schedule": "constant" if behavior.n_teams > 1 else "linear",
        "beta": 0.01 if images else 0.005 if choices else 0.001,
        "epsilon": 0.2,
        "lambd": 0.95,
        "num_epoch": 4 if images else 10,
    }
    settings: dict[str, Any] = {
        "trainer_type": kind,
        "hyperparameters": _sac_of(behavior) if kind in ("sac", "xqc") else on_policy,
        "network_settings": network,
        "reward_signals": {"extrinsic": {"gamma": 0.99, "strength": 1.0}},
        "keep_checkpoints": 3,
        "max_steps": 1000000 if images or behavior.n_teams > 1 else 300000,
        "time_horizon": 128,
        "summary_freq": 10000,
    }
    if kind == "xqc":  # these are the settings of config/xqc/3DBall.yaml, with more steps
        settings["hyperparameters"] |= {
            "buffer_init_steps": 500,
            "learning_rate": 1e-3,
            "learning_rate_schedule": "linear",
            "init_entcoef": 0.3 if choices else 0.01,
            "tau": 0.05,
        }
        # XQC's networks have batch normalization, so they need no normalized observations.
        network |= {"normalize": False, "hidden_units": 256}
        settings |= {"max_steps": 20000 * max(behavior.n_agents, 1), "summary_freq": 1000}
        settings["time_horizon"] = 4
    if behavior.n_teams > 1:
        settings["self_play"] = {"save_steps": 20000, "team_change": 100000, "swap_steps": 10000}
    return settings


def _sac_of(behavior: Behavior) -> dict[str, Any]:
    """Return SAC's hyperparameters, with one update for each step of all agents."""
    observations, actions = behavior.spec
    n_numbers = sum(math.prod(observation.shape) for observation in observations)
    return {
        "batch_size": 256,
        # The limit is 2**28 float32 numbers, which are a gigabyte of observations.
        "buffer_size": min(200_000, 2**28 // max(n_numbers, 1)),
        "buffer_init_steps": 1000,
        "learning_rate": 3e-4,
        "learning_rate_schedule": "constant",
        # Discrete actions have a larger entropy, so they need a smaller coefficient, or the entropy
        # bonus would dominate the reward.
        "init_entcoef": 0.05 if actions.discrete_branches else 0.5,
        "steps_per_update": max(behavior.n_agents, 1),
        "tau": 0.005,
    }


def rollout_of(behavior: Behavior) -> int:
    """Return the buffer size for 128 steps per agent: a power of 2 from 2048 to 16384."""
    # A power of 2 can be divided into 8 or 16 minibatches of equal size.
    rows: int = 2 ** math.ceil(math.log2(max(behavior.n_agents, 1) * 128))
    return min(max(rows, 2048), 16384)
