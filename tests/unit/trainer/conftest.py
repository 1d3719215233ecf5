from collections import defaultdict
from dataclasses import fields

import pytest
import torch

import pipeline
from pipeline.envs.in_process import InProcessEnvironment
from pipeline.settings import load_run_settings
from pipeline.tracking.base import Sink, Tracker
from pipeline.trainer.environment import JobSpec
from pipeline.trainer.learner import Learner
from pipeline.trainer.loop import TrainingLoop

QUICK = {
    "trainer_type": "ppo",
    "hyperparameters": {"batch_size": 32, "buffer_size": 128, "num_epoch": 1},
    "network_settings": {"hidden_units": 8, "num_layers": 1},
    "max_steps": 500,
    "time_horizon": 8,
    "summary_freq": 100,
    "checkpoint_interval": 200,
}


class Recorder(Sink):
    """A sink that records all metrics and distributions."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict]] = []
        self.spreads: dict[str, list[list[float]]] = defaultdict(list)
        """For each tag: the values of its distribution, one list for each summary."""
        self.n_closed = 0

    def on_summary(self, behavior, values, step):
        self.rows.append((behavior, step, dict(values)))

    def on_distribution(self, _behavior, tag, values, _step):
        self.spreads[tag].append(list(values))

    def close(self):
        self.n_closed += 1

    def steps(self, behavior):
        return [step for name, step, _ in self.rows if name == behavior]

    def values(self, tag):
        """Return the values of a tag, one for each summary that has the tag."""
        return [values[tag] for _, _, values in self.rows if tag in values]


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def quick():
    """Settings with which behaviors train quickly; keywords replace top-level keys.

    `limits` gives the behaviors in it a `max_steps` of their own.
    """

    def make(*names, parameters=None, limits=None, **changes):
        behaviors = dict.fromkeys(names or limits or ("Toy",), QUICK | changes)
        for name, max_steps in (limits or {}).items():
            behaviors[name] = behaviors[name] | {"max_steps": max_steps}
        overrides = {"behaviors": behaviors, "environment_parameters": parameters}
        return load_run_settings(None, overrides=overrides)

    return make


@pytest.fixture
def make_learner(quick):
    """A learner of one behavior on the CPU; keywords replace keys of its settings."""

    def make(spec, **changes):
        settings = quick(**changes).behaviors["Toy"]
        return Learner("Toy", spec, settings, seed=1, device=torch.device("cpu"))

    return make


@pytest.fixture
def make_loop(tmp_path):
    """A training loop on the CPU; keywords are fields of `JobSpec` or arguments of the loop."""

    def make(workers, settings, *, sinks=(), **options):
        job_options = {
            field.name: options.pop(field.name)
            for field in fields(JobSpec)
            if field.name in options
        }
        job = JobSpec(
            **{"env": None, "settings": settings, "seed": 1, "run_dir": tmp_path} | job_options
        )
        cpu = torch.device("cpu")
        return TrainingLoop(workers, job, device=cpu, tracker=Tracker(sinks), **options)

    return make


@pytest.fixture
def train_in(tmp_path):
    """Train in a simulator of this process, or in a list of simulators."""

    def train(toys, settings, **options):
        toys = toys if isinstance(toys, list) else [toys]
        environments = [InProcessEnvironment(toy) for toy in toys]
        return pipeline.train(environments, settings, **{"seed": 1, "run_dir": tmp_path} | options)

    return train


@pytest.fixture
def in_process():
    return InProcessEnvironment


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
