"""`device: null` and `threads: null`: choose the fastest device and number of threads."""

import logging
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from pipeline import machine
from pipeline.algos.policy import generator_for
from pipeline.algos.rows import forgetful_sequences, tensors
from pipeline.core.specs import BehaviorSpec
from pipeline.settings.trainer.schema import TrainerSettings
from pipeline.trainer.supported import algorithm_of, usable_device

_log = logging.getLogger(__name__)

_N_TIMED = 7
_WORTH_MORE = 1.05
"""A smaller number of threads is chosen if its time is at most this factor times the shortest time.
"""


def devices_here() -> list[torch.device]:
    """Return the devices to choose from: the CPU, and the GPU if this machine has CUDA."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in names]


def fastest_device(
    name: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    *,
    n_agents: int,
    kept: str | None = None,
) -> torch.device:
    """Return the device with the shortest time per agent step, acting and learning together.

    `kept`, the choice before the run was resumed, is returned without measuring; SettingsError
    if this machine does not have it.
    """
    if kept is not None:
        return usable_device(kept)
    devices = devices_here()
    # With one device nothing is measured, because a measurement would delay the start.
    if len(devices) == 1:
        return devices[0]
    costs = {d: step_seconds(spec, settings, d, n_agents=n_agents) for d in devices}
    fastest = min(costs, key=lambda device: costs[device])
    other_costs = ", ".join(f"{costs[d] * 1e6:.0f} on {d}" for d in devices if d != fastest)
    _log.info(
        "%s learns on %s, where a step takes %.0f microseconds (%s); --torch-device or "
        "torch_settings.device chooses another.",
        name,
        fastest,
        costs[fastest] * 1e6,
        other_costs,
    )
    return fastest


def fastest_threads(
    name: str,
    spec: BehaviorSpec,
    settings: TrainerSettings,
    device: torch.device,
    *,
    n_agents: int,
    n_busy: int,
) -> int:
    """Return the least number of torch threads that is about as fast as the fastest number.

    The numbers 1, 2, 4, ... are measured, up to the processors that `n_busy` environments leave
    free, with `n_agents` that act together. The result is 1 on a GPU, and in a portable run,
    which must add in the same order on every machine.
    """
    n_free = max(machine.n_processors() - n_busy, 1)
    if device.type != "cpu" or machine.is_portable() or n_free == 1:
        return 1
    before, costs = torch.get_num_threads(), dict[int, float]()
    try:
        for n_threads in (1 << k for k in range(n_free.bit_length())):
            torch.set_num_threads(n_threads)
            costs[n_threads] = step_seconds(spec, settings, device, n_agents=n_agents)
    finally:
        torch.set_num_threads(before)
    chosen = next(n for n, cost in costs.items() if cost <= _WORTH_MORE * min(costs.values()))
    _log.info(
        "%s learns with %d of %d threads, where a step takes %.0f microseconds (%s); --threads or "
        "torch_settings.threads chooses another number.",
        name,
        chosen,
        n_free,
        costs[chosen] * 1e6,
        ", ".join(f"{cost * 1e6:.0f} with {n}" for n, cost in costs.items() if n != chosen),
    )
    return chosen


def step_seconds(
    spec: BehaviorSpec, settings: TrainerSettings, device: torch.device, *, n_agents: int
) -> float:
    """Return the seconds that acting and gradient steps take together per agent step.

    The critic is left out: on each device it takes about as long as the policy.
    """
    network, hyperparameters = settings.network_settings, settings.hyperparameters
    with torch.random.fork_rng(devices=[]):  # the random numbers of the run must not change
        policy = algorithm_of(settings).policy_for(spec, network).to(device)
    stream = generator_for(0, device, "device choice")
    n_rows = hyperparameters.batch_size
    agent_obs, batch_obs = (
        [np.zeros((n, *obs.shape), np.float32) for obs in spec.observation_specs]
        # At least one row is measured, because there may be no agent yet that asks for a decision.
        for n in (max(n_agents, 1), n_rows)
    )
    memory, sequences = None, None
    if network.memory is not None:
        memory = np.zeros((len(agent_obs[0]), policy.memory_size), np.float32)
        length = network.memory.sequence_length
        lengths = np.full(-(-n_rows // length), length)
        # The last sequence may be shorter, so that the minibatch has `n_rows` rows.
        lengths[-1] -= lengths.sum() - n_rows
        sequences = forgetful_sequences(lengths, length, policy.memory_size, device)

    def act() -> None:
        policy.act(agent_obs, None, stream, memory)

    def minibatch() -> None:
        policy.zero_grad()
        # Any scalar will do: the time of the backward pass does not depend on the loss.
        loss = policy.actor(policy.normalizers(tensors(batch_obs, device)), sequences).sum()
        loss.backward()
        # CUDA runs asynchronously: reading the gradients waits for the GPU.
        [parameter.grad.cpu() for parameter in policy.parameters() if parameter.grad is not None]

    return (
        # One call acts for all agents; an agent step needs `minibatches_per_step` gradient steps.
        _seconds(act) / len(agent_obs[0])
        + _seconds(minibatch) * hyperparameters.minibatches_per_step
    )


def _seconds(work: Callable[[], None]) -> float:
    """Return the median seconds of `_N_TIMED` calls, after two calls to warm up."""
    seconds = []
    for _ in range(_N_TIMED + 2):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[2:])
