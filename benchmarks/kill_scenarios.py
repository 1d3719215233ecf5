"""The runs that `kills.py` kills: what they train, how they start, and when they have ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from left_behind import ended_early

if TYPE_CHECKING:
    from pathlib import Path

PPO = {
    "trainer_type": "ppo",
    "network_settings": {"hidden_units": 16, "num_layers": 1},
    "hyperparameters": {"batch_size": 64, "buffer_size": 512, "num_epoch": 1},
    "time_horizon": 32,
    "checkpoint_interval": 500,
    "keep_checkpoints": 3,
    "summary_freq": 1000,
    "max_steps": 6000,
}
REPLAY = {"buffer_size": 3000, "buffer_init_steps": 100, "save_replay_buffer": True}
SAC = PPO | {
    "trainer_type": "sac",
    "hyperparameters": {"batch_size": 32, "steps_per_update": 10, **REPLAY},
    "max_steps": 3000,
}
SELF_PLAY = {"save_steps": 500, "team_change": 1000, "swap_steps": 200, "window": 3}
PARAMS = """\
runtime: {torch_threads: 1, device: cpu}
environments:
  balance_ball: {source: builtin, args: []}
demonstrations:
  expert: {environment: balance_ball, policy: expert, episodes: 2, seed: 100}
experiments:
  cloned:
    environment: balance_ball
    trainer: config/ppo/3DBall.yaml
    overrides:
      behaviors.3DBall.max_steps: 3000
      behaviors.3DBall.summary_freq: 1000
      behaviors.3DBall.checkpoint_interval: 500
      behaviors.3DBall.hyperparameters.buffer_size: 1000
    demonstrations: expert
    pretrain: {epochs: 2, batch_size: 64, learning_rate: 1.0e-3}
    seeds: [1]
    stages: [pretrain, train, export, evaluate]
    evaluation: {episodes: 2, seed: 10000}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A run to kill: `pipeline learn` in a simulator, or an engine with its stages."""

    share: int
    """Of a hundred kills."""
    simulator: str = ""
    behavior: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    engine: str = ""
    stage: bool = False
    """Whether the stage is killed instead of its engine."""

    def first(self) -> list[list[str]]:
        """Commands of the start that is killed: the last of them is."""
        if not self.engine:
            return [self._learn()]
        return [["pipeline", "plan"], self._engine()]

    def following(self, folder: Path, *, force: bool) -> list[list[str]]:
        """Commands of the next start, as the documentation says."""
        if self.engine == "snakemake":
            return [["snakemake", "--unlock"], *self.first()]
        if self.engine:
            return self.first()
        run = folder / "results/run"
        used = run.is_dir() and any(run.iterdir())
        flag = ["--force"] if force else ["--resume"] if used else []
        return [[*self._learn(), *flag]]

    def checkpoint(self, folder: Path) -> Path:
        """The file that `pipeline learn` continues from."""
        return folder / "results/run" / self.behavior / "checkpoint.pt"

    def short(self, folder: Path) -> list[str]:
        """Return what is missing at the end: steps, or a file's checkpoint."""
        if not self.engine:
            return ended_early(self.checkpoint(folder), self.settings["max_steps"])
        files = (folder / "results/train").glob("*/seed1/metrics.json")
        steps = [json.loads(path.read_text())["3DBall"]["steps"] for path in files]
        return [] if len(steps) == 1 and steps[0] >= 3000 else [f"steps in metrics: {steps}"]

    def _engine(self) -> list[str]:
        return ["dvc", "repro"] if self.engine == "dvc" else ["snakemake", "--cores", "2"]

    def _learn(self) -> list[str]:
        fixed = ["pipeline", "learn", "config.yaml", "--env", f"../../builds/{self.simulator}"]
        return [*fixed, "--run-id", "run", "--seed", "1", *self.options]


BALL = {"simulator": "balance_ball", "behavior": "3DBall"}
PONG = {"simulator": "pong", "behavior": "Pong"}
PUSH = {"simulator": "push_together", "behavior": "PushTogether"}
SCENARIOS = {
    "ppo": Scenario(share=17, **BALL, settings=PPO),
    "sac": Scenario(share=17, **BALL, settings=SAC),
    "self-play": Scenario(share=17, **PONG, settings=PPO | {"self_play": SELF_PLAY}),
    "poca": Scenario(share=17, **PUSH, settings=PPO | {"trainer_type": "poca"}),
    "two-environments": Scenario(share=16, **BALL, settings=PPO, options=("--num-envs", "2")),
    "dvc": Scenario(share=4, engine="dvc"),
    "dvc-stage": Scenario(share=4, engine="dvc", stage=True),
    "snakemake": Scenario(share=4, engine="snakemake"),
    "snakemake-stage": Scenario(share=4, engine="snakemake", stage=True),
}
