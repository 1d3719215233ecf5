"""What an executable draws from samplers has the distribution that was declared.

The values come back over the statistics channel, as they do in training. A sample of n draws is
refused when its distribution function is further from the declared one than
sqrt(ln(2 / alpha) / 2n): the bound of Dvoretzky, Kiefer and Wolfowitz with the constant of Massart
(1990). Draws are seeded, so that a sample that passes always does.
"""

from __future__ import annotations

import logging
import math
import os

import numpy as np
import pytest

from pipeline.envs.side_channels import EnvironmentParametersChannel, StatsSideChannel
from pipeline.envs.unity import UnityEnvironment
from pipeline.envs.workers import WorkerSet
from pipeline.protocol.parameters import GAUSSIAN, MULTI_RANGE, UNIFORM, Sampler

_log = logging.getLogger(__name__)

N_AGENTS, N_RESETS = 12, 250
ALPHA = 0.01

RANGES = ((0.5, 1.0), (1.5, 1.75), (2.0, 2.25))
SAMPLERS = {
    "mass": Sampler(kind=UNIFORM, values=(0.5, 10.0), seed=21),
    "gravity": Sampler(kind=GAUSSIAN, values=(9.81, 2.0), seed=22),
    "scale": Sampler(kind=MULTI_RANGE, values=sum(RANGES, ()), seed=23),
}


def uniform(x):
    return np.clip((x - 0.5) / 9.5, 0.0, 1.0)


def gaussian(x):
    return np.array([0.5 * (1.0 + math.erf((one - 9.81) / (2.0 * math.sqrt(2.0)))) for one in x])


def ranges(x):
    return sum(np.clip(x - low, 0.0, high - low) for low, high in RANGES) / 1.0


DECLARED = {"mass": uniform, "gravity": gaussian, "scale": ranges}


def distance(values, declared):
    """Largest difference of the sample's distribution function from the declared one."""
    x = np.sort(values)
    n = len(x)
    expected = declared(x)
    steps = np.arange(n)
    return max(np.max((steps + 1) / n - expected), np.max(expected - steps / n))


def bound(n):
    return math.sqrt(math.log(2.0 / ALPHA) / (2.0 * n))


@pytest.fixture(scope="module")
def executable(packed, tmp_path_factory):
    return packed("balance_ball", tmp_path_factory.mktemp("built") / "balance_ball")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    before = os.environ.get("PIPELINE_CACHE")
    os.environ["PIPELINE_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    yield
    if before is None:
        del os.environ["PIPELINE_CACHE"]
    else:
        os.environ["PIPELINE_CACHE"] = before


def collected(executable, samplers, *, n_resets=N_RESETS, env_seed=1, n_workers=1):
    """What each worker's executable read of each parameter, in order."""
    envs = [
        UnityEnvironment(
            executable,
            worker_id=worker,
            seed=env_seed + worker,
            additional_args=["--num-agents", str(N_AGENTS)],
            side_channels=[EnvironmentParametersChannel(), StatsSideChannel()],
        )
        for worker in range(n_workers)
    ]
    values = [{name: [] for name in samplers} for _ in envs]
    with WorkerSet(envs) as workers:
        for name, sampler in samplers.items():
            assert workers.set_parameter(name, sampler)
        for _ in range(n_resets):
            workers.reset()
            for worker, stats in enumerate(workers.take_stats()):
                for name, gathered in values[worker].items():
                    reported = stats[f"Environment/Parameter/{name}"]
                    gathered += [value for value, _ in reported]
    return values


@pytest.fixture(scope="module")
def drawn(executable):
    return collected(executable, SAMPLERS)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_have_the_declared_distribution(name, drawn):
    values = np.array(drawn[name])
    assert len(values) == N_AGENTS * N_RESETS >= 1000
    assert len(np.unique(values)) > 0.99 * len(values)
    found, allowed = distance(values, DECLARED[name]), bound(len(values))
    _log.info("%s: distance %.4f, bound %.4f", name, found, allowed)
    assert found < allowed


@pytest.mark.slow
def test_draws_of_another_distribution_are_refused(drawn):
    """The bound is tight enough to tell these from each other."""
    values = np.array(drawn["gravity"])
    half = 2.0 * math.sqrt(3.0)  # of the interval with the same mean and deviation

    def flat(x):
        return np.clip((x - 9.81 + half) / (2.0 * half), 0.0, 1.0)

    def whole(x):
        return np.clip((x - 0.5) / 1.75, 0.0, 1.0)

    assert distance(values, flat) > bound(len(values))
    assert distance(values - 0.2, gaussian) > bound(len(values))
    assert distance(np.array(drawn["scale"]), whole) > bound(len(values))


@pytest.mark.slow
def test_same_seed_same_draws_and_another_seed_others(executable, drawn):
    again = collected(executable, SAMPLERS, n_resets=20, env_seed=77)[0]
    n = 20 * N_AGENTS
    assert again == {name: values[:n] for name, values in drawn.items()}
    reseeded = {
        name: Sampler(kind=one.kind, values=one.values, seed=one.seed + 100)
        for name, one in SAMPLERS.items()
    }
    other = collected(executable, reseeded, n_resets=20)[0]
    for name, values in drawn.items():
        assert not set(other[name]) & set(values)


@pytest.mark.slow
def test_every_worker_draws_the_same(executable, drawn):
    """As in ML-Agents, which sends one seed to all: docs/how-to/curriculum.md says what to do."""
    first, second = collected(executable, SAMPLERS, n_resets=3, n_workers=2)
    assert first == second == {name: values[: 3 * N_AGENTS] for name, values in drawn.items()}
