"""The runs that `interruptions.py` interrupts: what is trained, and how it is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kill_scenarios import PPO, SAC, SELF_PLAY

SMALL = {"network_settings": {"hidden_units": 16, "num_layers": 1}}
MEMORY = {
    "network_settings": SMALL["network_settings"]
    | {"memory": {"sequence_length": 8, "memory_size": 16}}
}
DEMO = {"demo_path": "../../expert.demo"}  # from a run's folder
LESSONS = {
    "gravity": {
        "curriculum": [
            {
                "name": f"l{number}",
                "value": {
                    "sampler_type": "uniform",
                    "sampler_parameters": {"min_value": 4.0 + number, "max_value": 9.81},
                },
                **(
                    {
                        "completion_criteria": {
                            "measure": "progress",
                            "behavior": "3DBall",
                            "threshold": 0.2 * (number + 1),
                            "require_reset": number == 1,
                        }
                    }
                    if number < 3
                    else {}
                ),
            }
            for number in range(4)
        ]
    }
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is trained."""

    method: str
    env: str = "balance_ball"
    behaviors: tuple[str, ...] = ("3DBall",)
    settings: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] | None = None
    num_envs: int = 1
    learners: int = 1
    threaded: bool = False
    compiled: bool = False
    ms: float = 0.0
    """Median of the milliseconds added to an exchange; the times vary."""
    gives_state: bool = True

    def content(self) -> dict[str, Any]:
        """The trainer configuration."""
        behavior = PPO | self.settings | {"threaded": self.threaded}
        # long enough that a draw seldom misses the run
        behavior["max_steps"] *= 16 if self.compiled else 4
        content: dict[str, Any] = {"behaviors": dict.fromkeys(self.behaviors, behavior)}
        content["torch_settings"] = {"compile": self.compiled}
        if self.parameters is not None:
            content["environment_parameters"] = self.parameters
        return content

    @property
    def build(self) -> str:
        """Name of the executable."""
        return f"{self.env}-{self.ms:g}" if self.ms else self.env

    def command(self, *more: str) -> list[str]:
        """Arguments of `pipeline`."""
        several = ["--num-envs", str(self.num_envs), "--learners", str(self.learners)]
        env = self.env if ":" in self.env else f"../../builds/{self.build}"
        run = ["learn", "config.yaml", "--env", env, "--run-id", "run", "--seed", "1"]
        return [*run, "--track", "jsonl", *several, *more]


def _signal(name: str, **more: Any) -> dict[str, Any]:
    network = {"network_settings": {"hidden_units": 16, "num_layers": 1}}
    return {"reward_signals": {"extrinsic": {}, name: network | more}}


_SELF_PLAY = PPO | {"self_play": SELF_PLAY}
_PONG = {"env": "pong", "behaviors": ("Pong",), "settings": _SELF_PLAY}
_PUSH = {"env": "push_together", "behaviors": ("PushTogether",)}
_POCA = PPO | {"trainer_type": "poca"}
_LONG = {  # gradient steps that `threaded` makes in a thread
    "network_settings": {"hidden_units": 512, "num_layers": 2},
    "hyperparameters": PPO["hyperparameters"] | {"batch_size": 128},
}
_GAIL = _signal("gail", **DEMO) | {"behavioral_cloning": {**DEMO, "steps": 3000}}
_XQC = SAC | {
    "trainer_type": "xqc",
    "hyperparameters": SAC["hyperparameters"]
    | {"n_steps": 2, "held_noise": 4, "buffer_init_steps": 100},
}
ROWS = {
    "ppo": Row(method="PPO"),
    "ppo-4": Row(method="PPO", num_envs=4),
    "ppo-threaded": Row(method="PPO", threaded=True),
    "ppo-4-threaded": Row(method="PPO", num_envs=4, threaded=True),
    "ppo-slow-threaded": Row(method="PPO", ms=2.0, threaded=True),
    "ppo-compiled": Row(method="PPO", compiled=True),
    "ppo-compiled-threaded": Row(method="PPO", compiled=True, threaded=True),
    "ppo-long-threaded": Row(method="PPO, 512 units", settings=_LONG, threaded=True),
    "ppo-4-long-threaded": Row(
        method="PPO, 512 units", settings=_LONG, num_envs=4, ms=2.0, threaded=True
    ),
    "sac": Row(method="SAC", settings=SAC),
    "sac-4": Row(method="SAC", settings=SAC, num_envs=4),
    "sac-threaded": Row(method="SAC", settings=SAC, threaded=True),
    "sac-compiled-threaded": Row(method="SAC", settings=SAC, compiled=True, threaded=True),
    "xqc": Row(method="XQC", settings=_XQC),
    "xqc-2-threaded": Row(method="XQC", settings=_XQC, num_envs=2, threaded=True),
    "xqc-2-masks-threaded": Row(
        method="XQC, hybrid with masks",
        env="collector",
        behaviors=("FoodCollector",),
        settings=_XQC | {"time_horizon": 4},
        num_envs=2,
        threaded=True,
    ),
    "poca": Row(method="POCA", settings=_POCA, **_PUSH),
    "poca-4-threaded": Row(method="POCA", settings=_POCA, num_envs=4, threaded=True, **_PUSH),
    "poca-compiled-threaded": Row(
        method="POCA", settings=_POCA, compiled=True, threaded=True, **_PUSH
    ),
    "self-play": Row(method="PPO, self-play", **_PONG),
    "self-play-4": Row(method="PPO, self-play", num_envs=4, **_PONG),
    "lessons": Row(method="PPO, lessons", parameters=LESSONS),
    "lessons-4": Row(method="PPO, lessons", parameters=LESSONS, num_envs=4),
    "lstm": Row(method="PPO, LSTM", settings=MEMORY),
    "lstm-4": Row(method="PPO, LSTM", settings=MEMORY, num_envs=4),
    "gail-bc": Row(method="PPO, GAIL and BC", settings=_GAIL),
    "curiosity": Row(method="PPO, curiosity", settings=_signal("curiosity")),
    "rnd-4": Row(method="PPO, RND", settings=_signal("rnd"), num_envs=4),
    "attention": Row(method="PPO, attention", env="sorter", behaviors=("Sorter",)),
    "images": Row(method="PPO, images", env="grid_world", behaviors=("GridWorld",)),
    "behaviors-4": Row(
        method="PPO, two behaviors", env="tag", behaviors=("Hunter", "Runner"), num_envs=4
    ),
    "ppo-learners": Row(method="PPO", learners=2),
    "ppo-4-learners": Row(method="PPO", num_envs=4, learners=2),
    "sac-learners": Row(method="SAC", settings=SAC, learners=2),
    "poca-learners": Row(method="POCA", settings=_POCA, learners=2, **_PUSH),
    "lessons-learners": Row(method="PPO, lessons", parameters=LESSONS, learners=2),
    "lstm-learners": Row(method="PPO, LSTM", settings=MEMORY, num_envs=2, learners=2),
    "gail-bc-learners": Row(method="PPO, GAIL and BC", settings=_GAIL, learners=2),
    "curiosity-learners": Row(method="PPO, curiosity", settings=_signal("curiosity"), learners=2),
    "behaviors-learners": Row(
        method="PPO, two behaviors", env="tag", behaviors=("Hunter", "Runner"), learners=2
    ),
    "gymnasium": Row(method="PPO", env="gymnasium:Hopper-v5", behaviors=("Hopper-v5",)),
}
