"""Time and memory of many environments, agents and behaviors, and of agents that come and go.

    python benchmarks/scale.py [--case NAME] [--steps 1000] [--json]
                               [--environments N] [--agents N] [--behaviors N]

Each environment is a real executable in a process of its own, which computes nothing but noise.
They are driven in three ways: `driving` sends zeros, `acting` asks the policy, `training` trains
with PPO (two layers of 64). Printed are milliseconds per step of all agents, by the clock and of
the trainer's processor time (polling included, unless PIPELINE_SPIN_US is 0), and the most resident
memory of the trainer and of one environment in the second and in the last fifth of the steps: the
first fifth fills the buffers. `benchmarks/growth.py` measures what needs no environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import DecisionSteps, TerminalSteps
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.errors import Interrupted
from pipeline.simulators import client

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.core.steps import Steps

SPEC = BehaviorSpec([ObservationSpec.vector(8, "VectorSensor_size8")], ActionSpec(2, ()))
CASES = {
    "environments": {"environments": 16, "behaviors": 1, "agents": 1, "vanishing": 0},
    "agents": {"environments": 1, "behaviors": 1, "agents": 5000, "vanishing": 0},
    "behaviors": {"environments": 1, "behaviors": 64, "agents": 1, "vanishing": 0},
    "vanishing": {"environments": 1, "behaviors": 1, "agents": 64, "vanishing": 4},
}
MODES = ("driving", "acting", "training")
WAIT_S = 900


class Crowd:
    """Agents whose observations are noise, and whose episodes last 50 to 62 steps.

    Args:
        behaviors: how many.
        agents: of each behavior.
        vanishing: agents of each behavior that are replaced in every step, without an end of their
            episode.
    """

    def __init__(self, *, behaviors: int, agents: int, vanishing: int) -> None:
        self.behavior_specs = {f"Crowd{k}?team=0": SPEC for k in range(behaviors)}
        self._rng = np.random.default_rng(0)
        self._ids = np.arange(behaviors * agents, dtype=np.int32).reshape(behaviors, agents)
        self._age = np.zeros(self._ids.shape, dtype=np.int64)
        self._n_ids = self._ids.size
        self._vanishing = vanishing
        self._n_steps = 0

    def reset(self) -> Mapping[str, Steps]:
        """Begin episodes; every agent requests a decision."""
        self._age[:] = 0
        over = np.zeros(self._ids.shape[1], dtype=np.bool_)
        return {name: self._steps(k, over) for k, name in enumerate(self.behavior_specs)}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Every agent requests a decision, some after the end of an episode."""
        del actions
        self._n_steps += 1
        self._age += 1
        over = self._age > 50 + self._ids % 13
        self._age[over] = 0
        for seat in range(self._vanishing):
            row = (self._n_steps * self._vanishing + seat) % self._ids.shape[1]
            self._ids[:, row] = self._n_ids + np.arange(len(self._ids))
            self._n_ids += len(self._ids)
            self._age[:, row], over[:, row] = 0, False
        return {name: self._steps(k, over[k]) for k, name in enumerate(self.behavior_specs)}

    def set_parameter(self, name: str, value: float) -> None:
        """Do nothing: there are no parameters."""

    def close(self) -> None:
        """Nothing to free."""

    def _steps(self, behavior: int, over: np.ndarray) -> Steps:
        ids = self._ids[behavior]
        obs = self._rng.random((len(ids), 8), dtype=np.float32)
        rewards, group = np.ones(len(ids), np.float32), np.zeros(len(ids), np.int32)
        rows = np.flatnonzero(over)
        none = np.zeros(len(rows), np.float32)
        cut = np.zeros(len(rows), np.bool_)
        return (
            DecisionSteps([obs], rewards, ids.copy(), None, group, np.zeros_like(rewards)),
            TerminalSteps([obs[rows]], rewards[rows], cut, ids[rows], group[rows], none),
        )


class Measured(UnityEnvironment):
    """Measures time and memory of the steps, and interrupts the run after the last one."""

    n_steps, n_done = 0, 0

    def __init__(self, *args: Any, n_steps: int) -> None:
        super().__init__(*args)
        self.n_steps = n_steps
        self.began, self.ended = (0.0, 0.0), (0.0, 0.0)
        self.early: list[tuple[float, float]] = []
        self.late: list[tuple[float, float]] = []
        self._own_process = psutil.Process()
        self._env_process = self._own_process.children()[0]

    def step_wait(self) -> None:
        """Finish a step, count it and take the memory."""
        super().step_wait()
        self.n_done += 1
        fifth = (5 * self.n_done - 1) // self.n_steps
        if fifth in (1, 4):
            memory_mb = (
                self._own_process.memory_info().rss / 2**20,
                self._env_process.memory_info().rss / 2**20,
            )
            (self.early if fifth == 1 else self.late).append(memory_mb)
        if fifth == 0:
            self.began = (time.perf_counter(), time.process_time())
        self.ended = (time.perf_counter(), time.process_time())
        if self.n_done == self.n_steps:
            os.kill(os.getpid(), signal.SIGINT)


def measure(case: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step, and the most memory of both processes early and late."""
    sizes = {**CASES[case], **{k: v for k, v in given(options).items() if CASES[case][k] > 1}}
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "crowd"
        inside = {key: value for key, value in sizes.items() if key != "environments"}
        words = " ".join(f"--{key} {value}" for key, value in inside.items())
        program.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" --serve {words} "$@"\n'
        )
        program.chmod(0o755)
        with contextlib.ExitStack() as stack:
            env = stack.enter_context(Measured(program, n_steps=options.steps))
            others = range(1, sizes["environments"])
            envs = [env, *(stack.enter_context(UnityEnvironment(program, k)) for k in others)]
            stack.enter_context(contextlib.suppress(Interrupted, KeyboardInterrupt))
            if mode == "driving":
                drive(envs)
            else:
                train(envs, sizes, Path(name) / "run", inference=mode == "acting")
    early, late = np.max(env.early, axis=0), np.max(env.late, axis=0)
    n_timed = options.steps - options.steps // 5
    clock_s, processor_s = (end - begin for begin, end in zip(env.began, env.ended, strict=True))
    return {
        "case": case,
        "mode": mode,
        **sizes,
        "ms_per_step": 1e3 * clock_s / n_timed,
        "trainer_ms": 1e3 * processor_s / n_timed,
        "trainer_mb": [early[0], late[0]],
        "environment_mb": [early[1], late[1]],
    }


def given(options: argparse.Namespace) -> dict[str, int]:
    """Sizes that the command line changes."""
    keys = ("environments", "agents", "behaviors")
    return {key: value for key in keys if (value := getattr(options, key)) is not None}


def drive(envs: list[UnityEnvironment]) -> None:
    """Send zeros until interrupted."""
    workers = WorkerSet(envs)
    workers.reset()
    while True:
        workers.step()


def train(
    envs: list[UnityEnvironment], sizes: dict[str, int], run_dir: Path, *, inference: bool
) -> None:
    """Train, or act with, one policy per behavior until interrupted."""
    from pipeline.settings import load_run_settings
    from pipeline.trainer import JobSpec
    from pipeline.trainer import train as run

    n_agents = sizes["agents"] * sizes["environments"]
    batch = 64 if n_agents == 1 else 16 * n_agents
    behavior = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": batch, "buffer_size": 2 * batch, "num_epoch": 1},
        "network_settings": {"hidden_units": 64, "num_layers": 2},
        "max_steps": 10**9,
        "time_horizon": 32,
        "summary_freq": 10**9,
    }
    behaviors = {f"Crowd{k}": behavior for k in range(sizes["behaviors"])}
    settings = load_run_settings(None, overrides={"behaviors": behaviors})
    run(JobSpec(envs, settings, seed=1, run_dir=run_dir), inference=inference)


def main() -> None:
    """Measure and print, or run as the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--environments", type=int)
    parser.add_argument("--agents", type=int)
    parser.add_argument("--behaviors", type=int)
    parser.add_argument("--vanishing", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one line of JSON per measurement")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--mlagents-port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        crowd = Crowd(
            behaviors=options.behaviors, agents=options.agents, vanishing=options.vanishing
        )
        client.converse(lambda *_: crowd, port=options.mlagents_port)
        return
    pairs = [(c, m) for c in options.case or CASES for m in options.mode or MODES]
    if len(pairs) > 1:  # each in its own process, so that memory is measured apart
        for case, mode in pairs:
            words = [f"--case={case}", f"--mode={mode}", f"--steps={options.steps}"]
            words += [f"--{key}={value}" for key, value in given(options).items()]
            words += ["--json"] if options.json else []
            command = [sys.executable, __file__, *words]
            subprocess.run(command, check=True, timeout=WAIT_S)  # noqa: S603  # this file
        return
    show(measure(*pairs[0], options), as_json=options.json)


def show(found: dict[str, Any], *, as_json: bool) -> None:
    """Write one line."""
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    memory = "   ".join(
        f"{process} " + " -> ".join(f"{mb:4.0f}" for mb in found[f"{process}_mb"]) + " MB"
        for process in ("trainer", "environment")
    )
    sys.stdout.write(
        f"{found['environments']:2} x {found['behaviors']:2} x {found['agents']:5} agents, "
        f"{found['vanishing']} vanish   {found['mode']:8} {found['ms_per_step']:8.2f} ms per step, "
        f"{found['trainer_ms']:7.2f} of the trainer   {memory}\n"
    )


if __name__ == "__main__":
    main()
