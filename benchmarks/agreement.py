"""Do our updates make of given weights what ML-Agents' make of them?

    make peer && python benchmarks/agreement.py [--updates 300] [--write]

Both programs begin with the same weights and learn from the same random minibatches with the same
noise. Printed is how far the weights have come and how far apart they then are, network by network.
Networks have two layers of 64. ML-Agents runs in the environment of `make peer`, its side is
`peer_agreement.py`. Ends with 1 if the weights differ by more than rounding. --write puts the table
into docs/comparison.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peer import ROOT, peer_command
from runs import say
from tables import put

from pipeline.algos import sac as sac_module
from pipeline.algos.batch import Batch
from pipeline.algos.ppo import PPO
from pipeline.algos.sac import SAC
from pipeline.algos.samples import Minibatch
from pipeline.protocol.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.settings import load_run_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from pipeline.arrays import AnyArray

PAGE = ROOT / "docs/comparison.md"
HEADER = ("case", "network", "weights moved, at most", "differ, at most")
CASES = {
    "ppo, continuous": ("ppo", ActionSpec(2, ())),
    "ppo, discrete": ("ppo", ActionSpec(0, (3, 2))),
    "ppo, hybrid": ("ppo", ActionSpec(2, (3, 2))),
    "sac, continuous": ("sac", ActionSpec(2, ())),
    "sac, discrete": ("sac", ActionSpec(0, (3, 2))),
}
N_OBS, N_ROWS = 8, 64
EPSILON, BETA, RATE = 0.2, 0.005, 3e-4
ROUNDING = 1e-3
"""Most by which weights may differ, as a share of how far they have come."""


def main() -> int:
    """Print a table; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst, rows = 0.0, []
    for name in CASES:
        for network, (moved, apart) in compared(name, options.updates).items():
            rows.append([name, network, f"{moved:.2g}", f"{apart:.1g}"])
            say("  ".join(f"{cell:>16}" for cell in rows[-1]))
            worst = max(worst, apart / moved)
    if options.write:
        put(PAGE, "agreement", HEADER, rows, n_keys=2)
    return int(worst > ROUNDING)


def compared(case: str, n_updates: int) -> dict[str, tuple[float, float]]:
    """How far each network's weights have moved in our updates, and how far theirs are from ours.

    Args:
        case: one of `CASES`.
        n_updates: gradient steps.
    """
    kind, actions = CASES[case]
    spec = BehaviorSpec([ObservationSpec.vector(N_OBS)], actions)
    behavior = {
        "trainer_type": kind,
        "hyperparameters": {"learning_rate": RATE, "learning_rate_schedule": "constant"},
        "network_settings": {"hidden_units": 64, "num_layers": 2, "normalize": False},
    }
    own = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    made: Any = {"ppo": PPO, "sac": SAC}[kind](spec, own, seed=1, device=torch.device("cpu"))
    networks: dict[str, nn.Module] = {"policy": made.policy.actor}
    if kind == "ppo":
        networks["value"] = made.critic
    else:
        twins = {"q1": made.twins.first, "q2": made.twins.second}
        networks |= {"value": made.value, "target": made.target, **twins}
    before = weights(networks)
    data = minibatches(kind, actions, n_updates)
    theirs = peer_weights(kind, actions, before, data)
    learn = {"ppo": ppo_update, "sac": sac_update}[kind](made)
    for number in range(n_updates):
        learn({name: values[number] for name, values in data.items()})
    after = weights(networks)
    if kind == "sac":
        after["temperature"] = [made.log_alpha.detach().numpy().copy()]
        before["temperature"] = [np.zeros_like(after["temperature"][0])]
    return {
        name: (distance(after[name], before[name]), distance(after[name], theirs[name]))
        for name in after
    }


def minibatches(kind: str, actions: ActionSpec, n: int) -> dict[str, AnyArray]:
    """Random rows [n, N_ROWS, ...] of everything that a minibatch has."""
    rng = np.random.default_rng(0)
    numbers = (n, N_ROWS)

    def normal(*size: int) -> AnyArray:
        return rng.normal(size=(*numbers, *size)).astype(np.float32)

    sizes = actions.discrete_branches
    choices = [rng.integers(size, size=numbers) for size in sizes]
    n_actions = actions.continuous_size + len(sizes)
    data = {
        "obs": normal(N_OBS),
        "continuous": normal(actions.continuous_size),
        "discrete": np.stack(choices, axis=-1) if sizes else np.zeros((*numbers, 0), np.int64),
    }
    if kind == "ppo":
        old = normal(n_actions) * 0.1 - 1.2
        return {
            **data,
            "log_prob": old,
            "advantage": normal(),
            "value": normal(),
            "returns": normal(),
        }
    data["continuous"] = np.tanh(data["continuous"])
    done = (rng.random(numbers) < 0.05).astype(np.float32)
    noise = normal(actions.continuous_size)
    return {**data, "next_obs": normal(N_OBS), "reward": normal(), "done": done, "noise": noise}


def ppo_update(made: PPO) -> Callable[[dict[str, AnyArray]], object]:
    """Makes one gradient step of ours."""
    # in ML-Agents' buffer old values and returns are one column, so no value is ever clipped
    clip = torch.full((1,), torch.inf)

    def update(rows: dict[str, AnyArray]) -> object:
        t = {name: torch.from_numpy(values) for name, values in rows.items()}
        column = {name: t[name].unsqueeze(1) for name in ("advantage", "value", "returns")}
        batch = Batch(
            obs=[t["obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            log_prob=t["log_prob"],
            allowed=anything(made.spec.action_spec),
            **column,
        )
        return made._learn(batch, epsilon=EPSILON, beta=BETA, clip=clip)

    made.optimizer.learning_rate = RATE
    return update


def sac_update(made: SAC) -> Callable[[dict[str, AnyArray]], object]:
    """Makes one gradient step of ours."""
    given: list[torch.Tensor] = []
    squashed = sac_module.squashed_action

    def with_given_noise(
        *, mu: torch.Tensor, log_sigma: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return squashed(mu=mu, log_sigma=log_sigma, noise=given.pop().view_as(noise))

    def update(rows: dict[str, AnyArray]) -> object:
        t = {name: torch.from_numpy(values) for name, values in rows.items()}
        given[:] = [t["noise"]]
        batch = Minibatch(
            obs=[t["obs"]],
            next_obs=[t["next_obs"]],
            continuous=t["continuous"],
            discrete=t["discrete"],
            rewards=t["reward"].unsqueeze(1),
            done=t["done"] > 0,
            allowed=anything(made.spec.action_spec),
        )
        sac_module.squashed_action = with_given_noise
        try:
            return made._learn(batch)
        finally:
            sac_module.squashed_action = squashed

    made.optimizer.learning_rate = RATE
    return update


def anything(actions: ActionSpec) -> torch.Tensor | None:
    """The mask that forbids nothing."""
    n_choices = sum(actions.discrete_branches)
    return torch.ones(N_ROWS, n_choices, dtype=torch.bool) if n_choices else None


def peer_weights(
    kind: str, actions: ActionSpec, before: dict[str, list[AnyArray]], data: dict[str, AnyArray]
) -> dict[str, list[AnyArray]]:
    """What ML-Agents makes of the weights."""
    named = {f"{name}/{i}": one for name, some in before.items() for i, one in enumerate(some)}
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
        np.savez(given, **named, **data)
        numbers = [EPSILON, BETA, RATE, actions.continuous_size, *actions.discrete_branches]
        python = Path(peer_command()).with_name("python")
        script = Path(__file__).with_name("peer_agreement.py")
        done = subprocess.run(  # noqa: S603  # our own file
            [python, script, kind, given, found, *map(str, numbers)],
            env={},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{script.name} has failed:\n{done.stderr}")
        with np.load(found) as content:
            result: dict[str, list[AnyArray]] = {}
            for key in content.files:
                result.setdefault(key.partition("/")[0], []).append(content[key])
    return result


def weights(networks: dict[str, nn.Module]) -> dict[str, list[AnyArray]]:
    """Copies of the parameters of each network, in the order that they are made in."""
    return {
        name: [one.detach().numpy().copy() for one in network.parameters()]
        for name, network in networks.items()
    }


def distance(one: list[AnyArray], other: list[AnyArray]) -> float:
    """The largest difference of two weights."""
    pairs = zip(one, other, strict=True)
    return max(float(np.abs(a - b.reshape(a.shape)).max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
