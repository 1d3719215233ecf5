"""Copies in several processes: the same steps and states as in one, and what errors say."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing

import numpy as np
import psutil
import pytest

from pipeline.core.specs import ActionTuple
from pipeline.core.steps import same_steps
from pipeline.envs.in_process import SimulatorSource
from pipeline.errors import SettingsError, UnityEnvironmentException
from pipeline.simulators.bridges import gymnasium_processes
from pipeline.simulators.bridges.gymnasium_bridge import GymnasiumSimulator
from pipeline.simulators.bridges.gymnasium_processes import GymnasiumInProcesses

FRAGILE = '''
import gymnasium
import numpy as np


class Fragile(gymnasium.Env):
    """Fails in a way of its own in the third step of the copy with the seed of copy 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, how):
        self.how, self.n_steps, self.fails = how, 0, False

    def reset(self, *, seed=None, options=None):
        self.fails = self.fails or seed == FAILING
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.n_steps += 1
        if self.fails and self.n_steps == 3:
            return self.fail()
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def fail(self):
        if self.how == "raises":
            raise KeyError("left wheel")
        if self.how == "exits":
            raise SystemExit(3)
        return np.zeros(2, np.float32), 0.0


gymnasium.register("Fragile-v0", entry_point=Fragile)
'''


@pytest.fixture
def children():
    """A function that returns the child processes that the test has started."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    """The id of an environment that fails in one of its copies."""
    from pipeline.seeding import derive

    code = FRAGILE.replace("FAILING", str(derive(3, "gymnasium", 1)))
    (tmp_path / "fragile_env.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return "fragile_env:Fragile-v0"


def action_of(rng, spec, n):
    kinds = spec.action_spec
    return ActionTuple(
        rng.uniform(-1, 1, (n, kinds.continuous_size)).astype(np.float32),
        np.stack([rng.integers(0, size, n) for size in kinds.discrete_branches], axis=1)
        if kinds.discrete_branches
        else np.zeros((n, 0), np.int32),
    )


def play(simulator, n_steps, rng):
    """Return the steps of actions at random; `simulator` has been reset or restored."""
    ((name, spec),) = simulator.behavior_specs.items()
    actions = (action_of(rng, spec, simulator.n_copies) for _ in range(n_steps))
    return [simulator.step({name: action})[name] for action in actions]


@pytest.mark.parametrize(
    ("env_id", "shares"),
    [("CartPole-v1", [1, 2, 2]), ("Pendulum-v1", [2, 1]), ("Taxi-v4", [3, 2])],
)
def test_several_processes_give_the_steps_and_the_state_of_one(env_id, shares):
    with ExitStack() as stack:
        _compare(env_id, shares, lambda simulator: stack.enter_context(closing(simulator)))


def _compare(env_id, shares, opened):
    several = opened(GymnasiumInProcesses(shares, id=env_id, seed=4))
    one = opened(GymnasiumSimulator(id=env_id, seed=4, n_agents=sum(shares)))
    assert several.behavior_specs == one.behavior_specs
    (name,) = one.behavior_specs
    n_ended = 0
    assert same_steps(several.reset()[name], one.reset()[name])
    # 260 steps end several episodes of every task.
    pairs = zip(
        *(play(simulator, 260, np.random.default_rng(1)) for simulator in (several, one)),
        strict=True,
    )
    for steps, expected in pairs:
        assert same_steps(steps, expected)
        n_ended += len(expected[1])
    assert n_ended >= sum(shares)
    saved = several.state_dict()
    rest = play(one, 40, np.random.default_rng(2))
    # Another number of processes, and one process, go on from the saved state.
    others = [GymnasiumInProcesses(shares[::-1], id=env_id, seed=9)]
    others.append(GymnasiumSimulator(id=env_id, seed=9, n_agents=sum(shares)))
    for other in map(opened, others):
        other.load_state_dict(saved)
        for steps, expected in zip(play(other, 40, np.random.default_rng(2)), rest, strict=True):
            assert same_steps(steps, expected)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "GymnasiumSimulator: KeyError: 'left wheel'"),
        ("exits", r"GymnasiumSimulator: it calls sys.exit\(3\)"),
        ("returns", "returns 2 values, and Gymnasium asks for 5 values"),
    ],
)
def test_error_of_another_process_is_raised_in_this_one(how, said, fragile, children):
    with closing(
        GymnasiumInProcesses([1, 2], id=fragile, kwargs={"how": how}, seed=3)
    ) as simulator:
        simulator.reset()
        with pytest.raises(UnityEnvironmentException, match=said):
            play(simulator, 3, np.random.default_rng(1))
    assert not children()


def test_process_that_was_killed_is_named(children):
    said = r"CartPole-v1, copies 1 to 2: the process has ended \(exit code -9\)"
    with closing(GymnasiumInProcesses([1, 2], id="CartPole-v1", seed=3)) as simulator:
        simulator.reset()
        (child,) = children()
        child.kill()
        with pytest.raises(UnityEnvironmentException, match=said):
            play(simulator, 2, np.random.default_rng(1))
    assert not children()


def test_environment_that_cannot_be_made_leaves_no_process(children):
    with pytest.raises(SettingsError, match="Missing-v0"):
        GymnasiumInProcesses([1, 1], id="Missing-v0", seed=3)
    assert not children()


def test_other_processes_end_with_the_first_even_if_it_is_killed():
    code = (
        "from pipeline.simulators.bridges.gymnasium_processes import GymnasiumInProcesses\n"
        "GymnasiumInProcesses([1, 1], id='CartPole-v1', seed=1).reset()\n"
        "print('ready', flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:  # noqa: S603
        assert process.stdout.readline() == b"ready\n"
        (child,) = psutil.Process(process.pid).children()
        os.kill(child.pid, signal.SIGTERM)  # as a cluster's queue sends to all of a job's processes
        assert child.is_running()
        process.kill()
        child.wait(10)


@pytest.mark.parametrize(
    ("n_processors", "step_ms", "n_copies", "expected"),
    [
        (8, 0.164, 16, [3, 2, 2, 2, 2, 2, 2, 1]),
        (2, 0.078, 8, [5, 3]),
        (16, 0.078, 8, [5, 3]),
        (16, 50.0, 3, [1, 1, 1]),
        (16, 0.005, 16, [16]),
        (1, 50.0, 16, [16]),
        (16, 50.0, 1, [1]),
    ],
)
def test_number_of_processes_follows_from_processors_and_the_time_of_a_step(
    n_processors, step_ms, n_copies, expected, monkeypatch
):
    monkeypatch.setattr(gymnasium_processes.machine, "n_processors", lambda: n_processors)
    monkeypatch.setattr(gymnasium_processes, "_step_s", lambda *_: step_ms / 1e3)
    assert gymnasium_processes.shares("CartPole-v1", {}, n_copies) == expected


@pytest.mark.parametrize(("parts", "n_others"), [([2, 2], 1), ([4], 0)])
def test_a_spread_source_starts_the_processes(parts, n_others, monkeypatch, children):
    monkeypatch.setattr(gymnasium_processes, "shares", lambda *_: parts)
    source = SimulatorSource("gymnasium", {"id": "CartPole-v1", "n_agents": 4}, is_spread=True)
    with closing(source.start(3)) as environment:
        environment.reset()
        assert (environment.n_copies, environment.n_other_processes) == (4, n_others)
        assert len(children()) == n_others
