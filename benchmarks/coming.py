"""The example of the page about Stable-Baselines3, trained by both packages.

    pip install --no-deps stable-baselines3==2.9.2
    python benchmarks/coming.py [--seeds 1 2 3 4 5] [--write]
    python benchmarks/coming.py --differences [--seeds 1 2 3 4 5] [--write]

Ours is trained with config/ppo/CartPole.yaml for as many steps, and with the settings under the
page's last heading, so that the page shows what was measured. Each policy's deterministic actions
are measured over 100 episodes. --differences trains ours with Stable-Baselines3's defaults and one
thing more as Stable-Baselines3 does it, for which there is no setting; torch acts in all of these
runs, since our NumPy policy has one activation. --write puts the table into the page.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import yaml
from peer import ROOT
from runs import say
from tables import put, table

import pipeline
from pipeline.algos import ppo
from pipeline.nets.fast import adam
from pipeline.nets.fast.numpy_actor import NumpyActor
from pipeline.nets.onnx_graph import OnnxGraph

PAGE = ROOT / "docs/how-to/coming-from-stable-baselines3.md"
ENVIRONMENT = "CartPole-v1"
OWN = ROOT / "config/ppo/CartPole.yaml"
NAMES = ("Stable-Baselines3 2.9.2", "our settings here", "Stable-Baselines3's defaults here")
N_EPISODES = 100
DIFFERENCES = (
    "none",
    "activation tanh",
    "initial weights orthogonal",
    "activation and weights",
    "Adam's epsilon 1e-5",
    "advantages normalised by minibatch",
)
_BLOCK = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def settings_of(page: Path) -> dict[str, Any]:
    """The trainer configuration that a `py` block of the page assigns to `settings`."""
    code = "\n".join(_BLOCK.findall(page.read_text(encoding="utf-8")))
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "settings":
            settings: dict[str, Any] = ast.literal_eval(statement.value)
            return settings
    raise ValueError(f"{page}: no assignment to `settings`")


def ours(seed: int, settings: dict[str, Any]) -> float:
    """The mean return of the policy that `pipeline.train` makes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        name = f"gymnasium:{ENVIRONMENT}"
        result = pipeline.train(name, settings, seed=seed, run_dir=folder)
        policy = pipeline.export_policy(result.behaviors[ENVIRONMENT].checkpoint, folder)
        episodes = pipeline.evaluate(policy, name, episodes=N_EPISODES)
    return float(np.mean([episode.episode_return for episode in episodes]))


def made_alike(difference: str) -> contextlib.ExitStack:
    """A context in which ours does one more thing as Stable-Baselines3 does."""
    stack = contextlib.ExitStack()

    def put_in(*where: Any) -> None:
        stack.enter_context(patch.object(*where))

    put_in(NumpyActor, "fits", lambda actor: False)  # noqa: ARG005
    if difference.startswith("activation"):
        put_in(torch.nn.functional, "silu", torch.tanh)
        put_in(OnnxGraph, "swish", lambda self, x: self.node("Tanh", [x]))
    if "weights" in difference:
        make = ppo.PPO.make_networks

        def remade(self: ppo.PPO, seed: int) -> None:
            make(self, seed)
            orthogonal(self, seed)

        put_in(ppo.PPO, "make_networks", remade)
    if "epsilon" in difference:
        put_in(adam.FusedAdam, "EPSILON", 1e-5)
    if "minibatch" in difference:
        learn = ppo.PPO.learn_minibatch

        def normalised(self: ppo.PPO, batch: Any, **options: Any) -> Any:
            advantage = batch.advantage
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            changed = replace(batch, fields={**batch.fields, "advantage": advantage})
            return learn(self, ppo.with_clip_range(changed, 0.2), **options)

        put_in(ppo.PPO, "learn_minibatch", normalised)
    return stack


def orthogonal(algorithm: ppo.PPO, seed: int) -> None:
    """Give the networks of PPO the initial weights that Stable-Baselines3 has."""
    torch.manual_seed(seed)
    actor, critic = algorithm.policy.actor, algorithm.critic
    layers = [(layer, 2**0.5) for net in (actor, critic) for layer in net.body.dense.linears]
    layers += [(layer, 0.01) for layer in actor.heads.branches]
    for layer, gain in [*layers, (critic.heads, 1.0)]:
        torch.nn.init.orthogonal_(layer.weight, gain)


def theirs(seed: int, steps: int) -> float:
    """The mean return of the policy that Stable-Baselines3 makes as the page types it."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    env = make_vec_env(ENVIRONMENT, n_envs=16)
    model = PPO("MlpPolicy", env, n_steps=64, batch_size=128, n_epochs=10, seed=seed, device="cpu")
    model.learn(steps)
    test = make_vec_env(ENVIRONMENT, n_envs=16, seed=10_000)
    mean, _ = evaluate_policy(model, test, n_eval_episodes=N_EPISODES)
    return float(mean)


def spread(values: list[float]) -> str:
    """The mean of the seeds' returns, with the lowest and the highest one."""
    return f"{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Train and measure with each seed, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--differences", action="store_true", help="measure each by itself")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    settings = settings_of(PAGE)
    seeds = " / ".join(map(str, options.seeds))
    if options.differences:
        header = ("as Stable-Baselines3 does", f"seeds {seeds}", "mean (lowest to highest)")
        rows = []
        for name in DIFFERENCES:
            with made_alike(name):
                values = [ours(seed, settings) for seed in options.seeds]
            rows.append([name, " / ".join(f"{value:.1f}" for value in values), spread(values)])
            say(" | ".join(rows[-1]))
        if options.write:
            put(PAGE, "differences", header, rows)
        return
    steps = settings["default_settings"]["max_steps"]
    own = yaml.safe_load(OWN.read_text(encoding="utf-8"))
    own["behaviors"][ENVIRONMENT]["max_steps"] = steps
    returns = []
    for seed in options.seeds:
        returns.append((theirs(seed, steps), ours(seed, own), ours(seed, settings)))
        say(f"seed {seed}: {returns[-1]}")
    rows = [
        [name, " / ".join(f"{value:.1f}" for value in values), spread(values)]
        for name, values in zip(NAMES, map(list, zip(*returns, strict=True)), strict=True)
    ]
    header = (f"after {steps:,} steps", f"seeds {seeds}", "mean (lowest to highest)")
    say(table(header, rows))
    if options.write:
        put(PAGE, "coming", header, rows)


if __name__ == "__main__":
    main()
