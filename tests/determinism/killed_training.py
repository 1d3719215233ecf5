"""Train until a number of updates, or until a kill; the program that test_resume.py runs.

The arguments are the folder, an environment, the number of updates, the update after which the
process is killed before it saves (0: none), and words for the options of the training; a number
among the words is the `steps_per_update`.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import remembering
import torch
import toys
import yaml

import pipeline.trainer.updates
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.simulators import registry
from pipeline.trainer.learner import Learner

BEHAVIORS = {
    "balance_ball": "3DBall",
    "grid_world": "GridWorld",
    "collector": "FoodCollector",
    "couriers": "Couriers",
    "push_together": "PushTogether",
}


def environments(name: str) -> str | list[InProcessEnvironment]:
    if Path(name).exists():  # the folder of an executable
        return name
    toy = getattr(toys, name, None) or getattr(remembering, name, None)
    if toy is None:
        return [InProcessEnvironment(registry.make(name, seed=3, n_agents=3))]
    return [InProcessEnvironment(toy(seed=seed, n_agents=3)) for seed in (3, 4)]


def trainer(how: str, demonstration: Path) -> dict:
    settings = {
        "trainer_type": "ppo",
        "hyperparameters": {"batch_size": 32, "buffer_size": 100, "num_epoch": 2},
        "network_settings": {"hidden_units": 16, "num_layers": 1, "normalize": True},
        "max_steps": 100000,
        "time_horizon": 7,
        "summary_freq": 90,
        "checkpoint_interval": 300,
        "threaded": "threaded" in how,
    }
    if "sac" in how or "xqc" in how:
        settings["trainer_type"] = "sac"
        settings["hyperparameters"] = {
            "batch_size": 16,
            "buffer_size": 90,
            "buffer_init_steps": 30,
            "steps_per_update": 4,
            "save_replay_buffer": "lost" not in how,
        }
        for word in {word for word in how.split() if word == "auto" or word[0].isdigit()}:
            settings["hyperparameters"]["steps_per_update"] = word
        if "xqc" in how:
            settings["trainer_type"] = "xqc"
            more = {"held_noise": 4, "n_steps": 2, "policy_delay": 3, "init_entcoef": 0.1}
            settings["hyperparameters"] |= more
            settings["network_settings"]["goal_conditioning_type"] = "none"
    if "poca" in how:
        settings["trainer_type"] = "poca"
    for key, _, value in (word.partition("=") for word in how.split() if "=" in word):
        settings["hyperparameters"][key] = yaml.safe_load(value)
    if "memory" in how:
        settings["network_settings"]["memory"] = {"sequence_length": 4, "memory_size": 8}
    for signal_name in {"curiosity", "gail", "rnd"} & set(how.split()):
        network = {"hidden_units": 8, "num_layers": 1, "normalize": True}
        settings["reward_signals"] = {"extrinsic": {}, signal_name: {"network_settings": network}}
    if "gail" in how:
        demo = {"demo_path": str(demonstration)}
        settings["reward_signals"]["gail"] |= {**demo, "use_actions": True, "use_vail": True}
        settings["behavioral_cloning"] = {**demo, "steps": 2000}
    return settings


def parameters() -> dict:
    def lesson(number: int, value: object, **criteria: object) -> dict:
        base = {"measure": "progress", "behavior": "3DBall", "threshold": 0.001 * number}
        last = {"completion_criteria": base | criteria} if number < 6 else {}
        return {"name": f"l{number}", "value": value} | last

    def sampler(low: float) -> dict:
        return {"sampler_type": "uniform", "sampler_parameters": {"min_value": low, "max_value": 9}}

    return {
        "gravity": {"curriculum": [lesson(n, sampler(n / 2)) for n in range(1, 7)]},
        "mass": {"curriculum": [lesson(n, 0.5 + n / 4, require_reset=True) for n in range(1, 7)]},
        "scale": {
            "curriculum": [
                lesson(1, sampler(0.4), measure="reward", threshold=-1.0, min_lesson_length=9),
                lesson(6, 1.0),
            ]
        },
    }


@contextlib.contextmanager
def ending(due: Callable[[Learner], int]) -> Iterator[None]:
    """After each update, send this process the signal that `due` returns (0: none)."""
    torch.set_num_threads(1)
    learn = Learner.learn

    def counted(self: Learner) -> bool:
        learned = learn(self)
        if learned and (number := due(self)):
            os.kill(os.getpid(), number)
        return learned

    Learner.learn = counted
    try:
        yield
    except pipeline.errors.Interrupted:
        sys.exit(0)
    sys.exit("ended by itself")


def main(folder: str, name: str, max_updates: str, kill_at: str, how: str) -> None:
    if "long" in how:
        pipeline.trainer.updates.PER_STEP = 30_000

    def due(learner: Learner) -> int:
        if learner.n_updates == int(kill_at):
            # The state after this update is not saved; the state after the previous update is.
            return signal.SIGKILL
        return signal.SIGTERM if learner.n_updates == int(max_updates) else 0

    settings = trainer(how, Path(folder).parent / "expert.demo")
    run = {
        "behaviors": {BEHAVIORS.get(Path(name).name, "Toy"): settings},
        "environment_parameters": parameters() if "lessons" in how else None,
        "torch_settings": {"compile": "compiled" in how},
    }
    with ending(due):
        pipeline.train(
            environments(name),
            run,
            seed=5,
            run_dir=Path(folder),
            num_envs=4 if "four" in how else 1,
            resume="resume" in how,
            resume_interval_s=1e6 if "rarely" in how else 0.0,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
