"""Do our updates make of given weights what ML-Agents' make of them?

    make peer && python benchmarks/agreement.py [--case NAME ...] [--updates 300] [--write]

Both programs begin with the same weights and learn from the same random minibatches with the same
noise. Printed is how far the weights have come and how far apart they then are, network by network.
Networks have two layers of 64. `agreement_ours.py` makes our steps; ML-Agents runs in the
environment of `make peer`, and its side is `peer_agreement.py`. Ends with 1 if the weights differ
by more than rounding. --write puts the table into docs/comparison.md.
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
from agreement_ours import BETA, EPSILON, GROUPS, N_OBS, N_ROWS, RATE, learner
from peer import ROOT, peer_command
from runs import say
from tables import put

from pipeline.protocol.specs import ActionSpec

if TYPE_CHECKING:
    from torch import nn

    from pipeline.arrays import AnyArray

PAGE = ROOT / "docs/comparison.md"
HEADER = ("case", "network", "weights moved, at most", "differ, at most")
_CONTINUOUS, _DISCRETE, _HYBRID = ActionSpec(2, ()), ActionSpec(0, (3, 2)), ActionSpec(2, (3, 2))
CASES = {
    "ppo, continuous": ("ppo", _CONTINUOUS),
    "ppo, discrete": ("ppo", _DISCRETE),
    "ppo, hybrid": ("ppo", _HYBRID),
    "sac, continuous": ("sac", _CONTINUOUS),
    "sac, discrete": ("sac", _DISCRETE),
    "poca, continuous": ("poca", _CONTINUOUS),
    "poca, discrete": ("poca", _DISCRETE),
    "rnd": ("rnd", _CONTINUOUS),
    "curiosity, continuous": ("curiosity", _CONTINUOUS),
    "curiosity, discrete": ("curiosity", _DISCRETE),
    "gail": ("gail", _CONTINUOUS),
}
ROUNDING = 1e-3
"""Most by which weights may differ, as a share of how far they have come."""


def main() -> int:
    """Print a table; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choices = {"choices": list(CASES), "default": list(CASES), "metavar": "NAME"}
    parser.add_argument("--case", nargs="+", **choices, help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--updates", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    agrees, rows = True, []
    for name in options.case:
        for network, (moved, apart) in compared(name, options.updates).items():
            rows.append([name, network, f"{moved:.2g}", f"{apart:.1g}"])
            say("  ".join(f"{cell:>22}" for cell in rows[-1]))
            agrees &= apart <= ROUNDING * moved
    if options.write:
        put(PAGE, "agreement", HEADER, rows, n_keys=2, keep=True)
    return int(not agrees)


def compared(case: str, n_updates: int) -> dict[str, tuple[float, float]]:
    """How far each network's weights have moved in our updates, and how far theirs are from ours.

    Args:
        case: one of `CASES`.
        n_updates: gradient steps.
    """
    kind, actions = CASES[case]
    ours = learner(kind, actions)
    before = weights(ours.networks)
    data = minibatches(kind, actions, n_updates)
    theirs = peer_weights(kind, actions, before, data)
    for number in range(n_updates):
        ours.learn({name: values[number] for name, values in data.items()})
    after = weights(ours.networks)
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
    data: dict[str, Any] = {
        "obs": normal(N_OBS),
        "continuous": normal(actions.continuous_size),
        "discrete": np.stack(choices, axis=-1) if sizes else np.zeros((*numbers, 0), np.int64),
    }
    if kind in ("ppo", "poca"):
        old = normal(n_actions) * 0.1 - 1.2
        data |= {"log_prob": old, "advantage": normal(), "value": normal(), "returns": normal()}
        return data if kind == "ppo" else {**data, "baseline": normal()}
    data["continuous"] = np.tanh(data["continuous"])
    data["done"] = (rng.random(numbers) < 0.05).astype(np.float32)
    noise = normal(actions.continuous_size)
    data |= {"noise": noise, "next_obs": normal(N_OBS), "reward": normal()}
    if kind == "gail":
        data |= {"expert": normal(N_OBS) + 0.5, "share": rng.random(data["obs"].shape)}
    return data


def peer_weights(
    kind: str, actions: ActionSpec, before: dict[str, list[AnyArray]], data: dict[str, AnyArray]
) -> dict[str, list[AnyArray]]:
    """What ML-Agents makes of the weights."""
    named = {f"{name}/{i}": one for name, some in before.items() for i, one in enumerate(some)}
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "found.npz"
        np.savez(given, **named, **data)
        sizes = [actions.continuous_size, *actions.discrete_branches]
        groups = ",".join(map(str, GROUPS))
        numbers = [groups, EPSILON, BETA, RATE, *sizes]
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
