"""Trace a short portable training, and name the first tensor by which two traces differ.

    python tests/determinism/portable_trace.py PPO -o trace.json       on one machine
    python tests/determinism/portable_trace.py PPO --against trace.json      on another

A trace has a digest of every tensor in the order of computation, in three stages: `observe` (what
the environment sends), `act` (the policy's decision), and `update` (every operation of torch in an
update, forward and backward, and then the weights). So the first difference names the operation
whose kernel rounds in another way; all tensors before it are equal. tests/determinism/portable/ has
the traces of four runs, which test_portable.py compares with traces of the machine that it runs on.
docs/explanation/provenance.md explains how to read a difference.
"""

import argparse
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "portable"
CASES = ("PPO", "SAC", "images", "memory")
_UNSET = ("aten.empty", "aten.new_empty")
"""Operations whose result has no values yet."""
MADE_WITH = ("numpy", "torch", "mujoco-core")
"""Packages whose versions decide the bytes: traces of other versions are not compared."""


def trace(case: str) -> list[list[str]]:
    """Train a case, and return stage, tensor and digest of all that was computed, in order."""
    import torch
    from remembering import Cue
    from toys import Quadrant

    import pipeline
    from pipeline.envs.in_process import InProcessEnvironment
    from pipeline.simulators import registry

    torch.set_num_threads(1)
    simulators = {"images": lambda: Quadrant(seed=3, n_agents=4), "memory": lambda: Cue(seed=3)}
    ball = lambda: registry.make("balance_ball", seed=3, n_agents=4)  # noqa: E731  # as the others
    environment = InProcessEnvironment(simulators.get(case, ball)())
    name = "Toy" if case in simulators else "3DBall"
    with tempfile.TemporaryDirectory() as folder, _recorded() as rows:
        settings = {"behaviors": {name: settings_of(case)}}
        pipeline.train([environment], settings, seed=5, run_dir=Path(folder, "run"))
    return rows


def settings_of(case: str) -> dict[str, Any]:
    """Return the trainer's settings of a case: one or two updates of small networks."""
    settings: dict[str, Any] = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 32, "buffer_size": 64, "num_epoch": 1},
        "network_settings": {"hidden_units": 32, "num_layers": 2, "normalize": True},
        "max_steps": 140,
        "time_horizon": 16,
        "summary_freq": 64,
    }
    if case == "SAC":
        settings["trainer_type"] = "sac"
        settings["hyperparameters"] = {
            "batch_size": 32,
            "buffer_size": 200,
            "buffer_init_steps": 64,
            "steps_per_update": 32,
        }
    if case == "memory":
        settings["network_settings"]["memory"] = {"sequence_length": 8, "memory_size": 16}
    return settings


@contextmanager
def _recorded() -> Iterator[list[list[str]]]:
    """Record the tensors of every learner in the block."""
    from pipeline.trainer.learner import Learner

    recorder = Recorder()
    with (
        patch.object(Learner, "receive", recorder.receive(Learner.receive)),
        patch.object(Learner, "decide", recorder.decide(Learner.decide)),
        patch.object(Learner, "learn", recorder.learn(Learner.learn)),
    ):
        yield recorder.rows


class Recorder:
    """Wraps methods of a learner, and records stage, tensor and digest of what they compute."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.step = self.update = 0

    def receive(self, original):
        def received(learner, steps, **options):
            self.step += 1
            label = f"observe, step {self.step}"
            for worker, kinds in enumerate(steps):
                for kind, sent in zip(("decision", "terminal"), kinds, strict=True):
                    for what, array in [*enumerate(sent.obs), ("reward", sent.reward)]:
                        self.rows.append([label, f"worker {worker} {kind} {what}", digest(array)])
            return original(learner, steps, **options)

        return received

    def decide(self, original):
        def decided(learner, message):
            result = original(learner, message)
            for what, array in sorted(result.decision.rows.items()) if result.decision else ():
                self.rows.append([f"act, step {self.step}", what, digest(array)])
            return result

        return decided

    def learn(self, original):
        def learned(learner):
            self.update += 1
            before = len(self.rows)
            with _operations(self.rows, f"update {self.update}"):
                result = original(learner)
            if len(self.rows) == before:  # no update was due
                self.update -= 1
                return result
            for what, tensor in learner.algorithm.policy.actor.named_parameters():
                self.rows.append([f"weights after update {self.update}", what, digest(tensor)])
            return result

        return learned


def _operations(rows: list[list[str]], label: str) -> Any:
    """Return a context that records each operation of torch, those of `backward` too."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode  # public modes miss `backward`

    rnn_layer = torch.ops.aten.mkldnn_rnn_layer.default

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's signature
            result = func(*args, **(kwargs or {}))
            for number, tensor in enumerate(_arrays(result)):
                is_workspace = (func, number) == (rnn_layer, 3)
                if not str(func).startswith(_UNSET) and not is_workspace:
                    rows.append([label, f"{func}[{number}]", digest(tensor)])
            return result

    return Operations()


def _arrays(result: Any) -> list[Any]:
    import torch

    several = result if isinstance(result, tuple | list) else (result,)
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor)]


def digest(array: Any) -> str:
    """Return the CRC-32 of a tensor's type, shape and bytes, as eight hexadecimal digits."""
    import numpy as np

    values = np.asarray(array.detach().numpy() if hasattr(array, "detach") else array)
    head = f"{values.dtype}{values.shape}".encode()
    return f"{zlib.crc32(np.ascontiguousarray(values).tobytes(), zlib.crc32(head)):08x}"


def first_difference(one: list[list[str]], other: list[list[str]]) -> str | None:
    """Return stage and tensor of the first difference between two traces; None if equal."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            where = f"{mine[0]}: {mine[1]} (number {number} of {len(one)})"
            same = mine[:2] == theirs[:2]
            return where if same else f"{where}, where the other run computed {theirs[1]}"
    if len(one) != len(other):
        return f"one run ends after {min(len(one), len(other))} tensors, the other goes on"
    return None


def content(case: str) -> dict[str, Any]:
    """Return a trace, with the processor and the package versions that it depends on."""
    from importlib import metadata

    from pipeline import machine

    rows = trace(case)
    stages: dict[str, list[str]] = {}
    for stage, tensor, value in rows:  # shorter than a name of the stage in each row
        stages.setdefault(stage, []).append(f"{value} {tensor}")
    versions = {name: metadata.version(name).partition("+")[0] for name in MADE_WITH}
    return {"processor": machine.processor(), "versions": versions, "trace": stages}


def rows_of(stored: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a stored trace."""
    return [
        [stage, tensor, value]
        for stage, entries in stored["trace"].items()
        for value, _, tensor in (entry.partition(" ") for entry in entries)
    ]


def main() -> None:
    """Trace a case, and write the trace or compare it with a stored trace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--against", type=Path)
    text = "use the kernels of this processor, to see which operation is the first to differ"
    parser.add_argument("--native", action="store_true", help=text)
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / name) for name in ("src", "tests/learning", "tests/support")]
    from pipeline import machine

    if not arguments.native:
        machine.restart_in_portable_mode()  # before torch and NumPy are loaded
    os.environ["OMP_NUM_THREADS"] = "1"
    made = content(arguments.case)
    if arguments.output:
        arguments.output.write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")
    if arguments.against:
        stored = json.loads(arguments.against.read_text(encoding="utf-8"))
        print(f"here:  {made['processor']}\nthere: {stored['processor']}")  # noqa: T201  # a tool
        found = first_difference(rows_of(made), rows_of(stored))
        print(found or f"{len(rows_of(made))} tensors are the same")  # noqa: T201  # a tool
        sys.exit(found is not None)


if __name__ == "__main__":
    main()
