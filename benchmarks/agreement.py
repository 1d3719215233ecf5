"""Do our updates make of given weights what ML-Agents' make of them?

    make peer && python benchmarks/agreement.py [--case NAME ...] [--rollouts 20] [--write]
    make peer && python benchmarks/agreement.py [--case NAME ...] --golden

Both programs begin with the same weights, get the same messages of a few agents, in which these
have decided the same, and draw the same random numbers; all the rest is their own: trajectories,
advantages, schedules, minibatches, reward signals and losses. Printed is how far the weights have
come and how far apart they then are, network by network. Ends with 1 if they differ by more than
rounding. --write puts the table into docs/evidence/comparison.md.

--golden writes what three rollouts make of networks with two layers of 8 to
tests/unit/algos/golden: by the reference (unless it differs on purpose), and by us.

The cases, and our side of them, are tests/support/golden_cases.py and golden_training.py beside it;
ML-Agents runs in the environment of `make peer`, and its side is `peer_agreement.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from peer import ROOT, peer_command
from runs import say
from tables import put

sys.path.append(str(ROOT / "tests/support"))
from golden_cases import CASES, N_MESSAGES, N_OBS, golden_file
from golden_training import Training, recorded, sampled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.core.arrays import AnyArray

PAGE = ROOT / "docs/evidence/comparison.md"
GOLDEN = ROOT / "tests/unit/algos/golden"
HEADER = ("case", "network", "weights moved, at most", "differ, at most")
ROUNDING = 1e-3
"""Largest allowed difference of weights, as a share of how far training has moved them."""
Weights = dict[str, list["AnyArray"]]


def main() -> int:
    """Print a table; 1 if something differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choices = {"choices": list(CASES), "default": list(CASES), "metavar": "NAME"}
    parser.add_argument("--case", nargs="+", **choices, help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--rollouts", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="the table into its page")
    parser.add_argument("--golden", action="store_true", help="the files of the unit tests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    n_blocks, hidden_units = (3, 8) if options.golden else (options.rollouts, 64)
    agrees, rows = True, []
    for name in options.case:
        if CASES[name].differs and not options.golden:
            continue
        training, before, theirs = trained(name, n_blocks, hidden_units)
        ours, counts = training.weights(), training.has_effect()
        for network in ours:
            moved = distance(ours[network], before[network])
            apart = 0.0
            if theirs is not None:
                apart = distance(ours[network], theirs[network], counts[network])
            rows.append([name, network, f"{moved:.2g}", f"{apart:.1g}"])
            say("  ".join(f"{cell:>22}" for cell in rows[-1]))
            agrees &= apart <= ROUNDING * moved
        if options.golden:
            write_golden(name, before, ours, theirs)
    if options.write:
        put(PAGE, "agreement", HEADER, rows, n_keys=2, keep=True)
    return int(not agrees)


def trained(
    name: str, n_blocks: int, hidden_units: int
) -> tuple[Training, Weights, Weights | None]:
    """Return our training, the first weights, and those after the reference's training.

    The last are None for a case that differs on purpose.
    """
    with tempfile.TemporaryDirectory() as folder:
        ours = Training(name, Path(folder), n_blocks=n_blocks, hidden_units=hidden_units)
        before = ours.weights()
        with recorded(ours) as draws:
            ours.run()
        theirs = None if ours.case.differs else peer_weights(ours, before, draws, Path(folder))
        return ours, before, theirs


def peer_weights(
    ours: Training, before: Weights, draws: dict[str, list[AnyArray]], folder: Path
) -> Weights:
    """Return the weights after ML-Agents has trained with the same draws and messages."""
    case, settings = ours.case, dict(ours.settings)
    settings["hyperparameters"] = dict(settings["hyperparameters"])
    clips_values = settings["hyperparameters"].pop("clip_value", False)
    described = {
        "trainer": case.trainer,
        "settings": settings,
        "actions": [case.actions.continuous_size, *case.actions.discrete_branches],
        "n_obs": N_OBS,
        "n_messages": N_MESSAGES,
        "clips_values": clips_values,
        "clones_means": case.cloning is not None and case.actions.continuous_size > 0,
    }
    named = {
        f"{name}/{i:03}": tensor
        for name, tensors in before.items()
        for i, tensor in enumerate(tensors)
    }
    drawn = {
        name: np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0)
        for name, arrays in draws.items()
    }
    if ours.memories:
        width = ours.learner.algorithm.policy.memory_size
        named["memory"] = np.stack(ours.memories)[:, :, :width]
    input_file, output_file, case_file = (
        folder / "given.npz",
        folder / "found.npz",
        folder / "case.json",
    )
    np.savez(input_file, **named, **drawn, **ours.experience)
    case_file.write_text(json.dumps(described), encoding="utf-8")
    python = Path(peer_command()).with_name("python")
    script = Path(__file__).with_name("peer_agreement.py")
    completed = subprocess.run(  # noqa: S603  # our own file
        [python, script, case_file, input_file, output_file],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode:
        sys.exit(f"{script.name} has failed in {described}:\n{completed.stderr}")
    result: Weights = {}
    with np.load(output_file) as content:
        for key in content.files:
            result.setdefault(key.partition("/")[0], []).append(content[key])
    return result


def write_golden(name: str, before: Weights, ours: Weights, theirs: Weights | None) -> None:
    """Write a sample of the weights, with the command and versions that made them."""
    versions = f"torch {torch.__version__}, numpy {np.__version__}"
    reference = "differs on purpose" if theirs is None else "mlagents 1.1.0"
    made_by = f"python benchmarks/agreement.py --golden --case '{name}' ({versions}; {reference})"
    parts = {"before": before, "ours": ours} | ({} if theirs is None else {"theirs": theirs})
    arrays = {
        f"{part}/{network}": values
        for part, weights in parts.items()
        for network, values in sampled(weights).items()
    }
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / golden_file(name), made_by=np.array(made_by), **arrays)


def distance(some: list[AnyArray], others: list[AnyArray], counts: Sequence[bool] = ()) -> float:
    """Return the largest difference of two networks' weights, over the tensors in `counts`."""
    pairs = list(zip(some, others, strict=True))
    if counts:
        pairs = list(compress(pairs, counts))
    return max(float(np.abs(a - b.reshape(a.shape)).max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
