"""Let `mlagents-learn` train a little on every executable, with this repository's configurations.

    python benchmarks/interoperability.py [NAME ...] [--steps 2000] [--write]

The configurations are those in `config/`, with fewer steps and buffers so small that updates happen
within them; for environments without one, that of CartPole under their behaviors' names. Needs the
reference: `make peer`, or MLAGENTS_LEARN names the program. The exit code is 1 if a run fails. With
--write the table goes into docs/reference/environments/README.md; with NAMEs only their rows do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import scores
import yaml
from catalogue import Listed, chosen
from environments import PAGE
from peer import ROOT, free_port, peer_command
from tables import put, table

from pipeline.cli.demo import record
from pipeline.envs.launch import die_with_parent

LIMIT_S = 900
_GENERAL = "ppo/CartPole.yaml"
_SMALL = {"time_horizon": 16, "summary_freq": 500, "checkpoint_interval": 1000}
_SMALL_HYPERPARAMETERS = {"batch_size": 64, "buffer_size": 512}
_SMALL_SELF_PLAY = {"save_steps": 250, "team_change": 500, "swap_steps": 250}
_HEADER = ("environment", "configuration", "exit code", "steps", "updates", "ONNX", "why not")


@dataclass(kw_only=True)
class Run:
    """Results of one run of the reference."""

    behaviors: tuple[str, ...]
    """Behaviors that it should train."""
    code: int | None = None
    """Exit code; None if it did not end in time."""
    steps: dict[str, int] = field(default_factory=dict)
    """Of each behavior's last checkpoint."""
    updates: int = 0
    """Of all behaviors' networks."""
    onnx: tuple[str, ...] = ()
    """Behaviors whose final model was written."""
    why: str = ""
    """Last line of its output, if it failed."""

    def is_well(self, n_steps: int) -> bool:
        """Whether it trained all behaviors for `n_steps`, with updates, and wrote their models."""
        trained = [self.steps.get(behavior, 0) >= n_steps for behavior in self.behaviors]
        has_models = set(self.behaviors) <= set(self.onnx)
        return self.code == 0 and self.updates > 0 and all(trained) and has_models


def settings(listed: Listed, config: str | None, n_steps: int, demo: Path) -> dict[str, Any]:
    """A configuration file's content with little to do, for the environment's behaviors.

    Args:
        listed: the environment.
        config: file in `config/`; None takes the general one.
        n_steps: agent steps of each behavior.
        demo: what replaces the file's demonstrations.
    """
    content: dict[str, Any] = yaml.safe_load((ROOT / "config" / (config or _GENERAL)).read_text())
    qualified = scores.action_specs(listed.name, **listed.options)
    if config is None:
        (general,) = content["behaviors"].values()
        general["hyperparameters"]["num_epoch"] = 3
        if len({behavior_id.partition("team=")[2] for behavior_id in qualified}) > 1:
            general["self_play"] = {}
        names = {behavior_id.partition("?")[0] for behavior_id in qualified}
        text = json.dumps(general)
        content["behaviors"] = {name: json.loads(text) for name in sorted(names)}
    for behavior in content["behaviors"].values():
        behavior.update(_SMALL, max_steps=n_steps)
        behavior["hyperparameters"].update(_SMALL_HYPERPARAMETERS)
        if "self_play" in behavior:
            behavior["self_play"].update(_SMALL_SELF_PLAY)
        signals = behavior["reward_signals"].values()
        for part in (*signals, behavior.get("behavioral_cloning", {})):
            if "demo_path" in part:
                part["demo_path"] = str(demo)
    return content


def train(executable: Path, content: dict[str, Any], folder: Path) -> Run:
    """Run `mlagents-learn` in `folder`, and read the files that it writes."""
    run = Run(behaviors=tuple(content["behaviors"]))
    config = folder / "trainer.yaml"
    config.write_text(yaml.safe_dump(content, sort_keys=False))
    command = [peer_command(), str(config), "--env", str(executable), "--run-id", "run"]
    command += ["--results-dir", str(folder), "--base-port", str(free_port()), "--seed", "1"]
    command += ["--no-graphics", "--torch-device", "cpu", "--timeout-wait", "120"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PIPELINE_PYTHON"] = sys.executable
    with (folder / "output").open("w+") as output:
        try:
            run.code = subprocess.run(  # noqa: S603  # the reference, which ends with us
                command,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=LIMIT_S,
                check=False,
                preexec_fn=die_with_parent(os.getpid()),  # calls only prctl
            ).returncode
        except subprocess.TimeoutExpired:
            run.why = f"did not end within {LIMIT_S} s"
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    if run.code:
        run.why = lines[-1] if lines else "it printed nothing"
    _read(run, folder / "run")
    return run


def _read(run: Run, results: Path) -> None:
    """Read checkpoints, final models and timers into `run`."""
    run.onnx = tuple(
        behavior for behavior in run.behaviors if (results / f"{behavior}.onnx").is_file()
    )
    for behavior in run.behaviors:
        matches = (
            re.search(r"-(\d+)\.pt$", file.name) for file in (results / behavior).glob("*.pt")
        )
        run.steps[behavior] = max((int(match[1]) for match in matches if match), default=0)
    timers = results / "run_logs" / "timers.json"
    if timers.is_file():
        run.updates = _updates(json.loads(timers.read_text()))


def _updates(timer: dict[str, Any]) -> int:
    """Calls of an optimizer's update in a tree of the reference's timers."""
    children = timer.get("children", {})
    n_calls = sum(
        child["count"] for name, child in children.items() if name.endswith("Optimizer.update")
    )
    return int(n_calls + sum(_updates(child) for child in children.values()))


def row(listed: Listed, config: str | None, run: Run) -> list[str]:
    """The cells of one run."""
    steps = ", ".join(f"{run.steps[behavior]:,}" for behavior in run.behaviors)
    onnx = "yes" if set(run.onnx) == set(run.behaviors) else f"**{len(run.onnx)}**"
    return [
        f"[{listed.env_id or listed.name}]({listed.page})",
        f"`{config}`" if config else "",
        "none" if run.code is None else str(run.code),
        steps,
        f"{run.updates:,}",
        onnx,
        run.why.replace("|", "/"),
    ]


def main() -> int:
    """Train in the named environments, and write the table on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all environments if none")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--write", action="store_true", help="the table into its page")
    arguments = parser.parse_args()
    peer_command()
    rows, n_failed = [], 0
    with tempfile.TemporaryDirectory() as name:
        demo = Path(name) / "pyramids.demo"
        record("pyramids", demo, episodes=10, seed=1)
        for listed in chosen(arguments.names):
            executable = listed.build(Path(name))
            for config in listed.configs or (None,):
                content = settings(listed, config, arguments.steps, demo)
                with tempfile.TemporaryDirectory() as folder:
                    run = train(executable, content, Path(folder))
                n_failed += not run.is_well(arguments.steps)
                rows.append(row(listed, config, run))
                sys.stdout.write(f"{table(_HEADER, rows[-1:]).splitlines()[-1]}\n")
                sys.stdout.flush()
    if arguments.write:
        put(PAGE, "interoperability", _HEADER, rows, n_keys=2, keep=bool(arguments.names))
    sys.stdout.write(f"{len(rows) - n_failed} of {len(rows)} runs trained and wrote their models\n")
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
