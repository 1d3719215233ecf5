"""Properties of every game, and of games with several agents in an area."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from playing import acted, policies, rows_of, trajectory

from pipeline.core.simulator import Restorable
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import SettingsError
from pipeline.seeding import stream
from pipeline.settings import load_run_settings
from pipeline.simulators import registry
from pipeline.simulators.games import areas
from pipeline.wire.channels.parameters import Sampler

CONFIGURATIONS = {
    "couriers": "ppo/Couriers.yaml",
    "pong": "ppo/Pong.yaml",
    "push_together": "poca/PushTogether.yaml",
    "tag": "ppo/Tag.yaml",
}
SHARED = tuple(CONFIGURATIONS)
"""Games with several agents in an area, or agents that come and go."""
MAX_STEP = {"grid_world": 100, "hallway": 150, "pyramids": 500, "sorter": 500, "collector": 300}
SOLO = ("balance_ball", *MAX_STEP)
CONFIG = Path(__file__).parents[4] / "config"
SCRIPT = """\
#!{python}
import sys
sys.path[:0] = {path!r}
from pipeline.simulators.executable import main
sys.exit(main({name!r}, sys.argv[1:]))
"""


@pytest.fixture(params=(*SHARED, *SOLO))
def name(request):
    return request.param


shared = pytest.mark.parametrize("name", SHARED)


def made(name, *, seed=1, n_agents=12):
    return registry.make(name, seed=seed, n_agents=n_agents)


BEHAVIORS = {  # shapes of observations, continuous actions, branches
    "balance_ball": {"3DBall?team=0": ([(8,)], 2, ())},
    "collector": {"FoodCollector?team=0": ([(45,), (3,)], 3, (2,))},
    "grid_world": {"GridWorld?team=0": ([(3, 20, 20), (2,)], 0, (5,))},
    "hallway": {"Hallway?team=0": ([(49,), (3,)], 0, (5,))},
    "pyramids": {"Pyramids?team=0": ([(77,), (5,)], 0, (5,))},
    "sorter": {"Sorter?team=0": ([(20, 23), (4,)], 0, (3, 3, 3))},
}
GROUPS = {
    "push_together": [[1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]],
    "tag": [[1, 1, 2, 2, 3, 3, 4, 4], [0] * 4],
}


def test_behaviors_and_groups_are_as_documented_and_observations_are_sorted_by_their_names(name):
    simulator = made(name)
    for spec in simulator.behavior_specs.values():
        names = [obs.name for obs in spec.observation_specs]
        assert names == sorted(names)
    found = {
        behavior: ([obs.shape for obs in observations], *actions)
        for behavior, (observations, actions) in simulator.behavior_specs.items()
    }
    assert BEHAVIORS.get(name) in (None, found)
    groups = [decisions.group_id.tolist() for decisions, _ in simulator.reset().values()]
    assert GROUPS.get(name) in (None, groups)


def test_agent_ids_are_unique_and_arrays_have_the_dtypes_of_the_protocol(name):
    """Also: first rewards are 0, no message is empty, and steps do not change later."""
    simulator = made(name)
    steps, by = simulator.reset(), policies(name, simulator)
    for _ in range(300):
        before = rows_of(steps)
        ids = np.concatenate([decisions.agent_id for decisions, _ in steps.values()])
        assert len(set(ids.tolist())) == len(ids)
        assert any(len(decisions) or len(terminals) for decisions, terminals in steps.values())
        for behavior, (decisions, terminals) in steps.items():
            restarted = np.isin(decisions.agent_id, terminals.agent_id)
            assert not decisions.reward[restarted].any()
            assert not decisions.group_reward[restarted].any()
            specs = simulator.behavior_specs[behavior].observation_specs
            for batch in (decisions, terminals):
                shapes = [(len(batch), *obs.shape) for obs in specs]
                assert [obs.shape for obs in batch.obs] == shapes
                floats = [*batch.obs, batch.reward, batch.group_reward]
                assert {values.dtype for values in floats} == {np.dtype(np.float32)}
                assert {batch.agent_id.dtype, batch.group_id.dtype} == {np.dtype(np.int32)}
                # networks without normalization need small numbers; a ball may be fast
                limit = np.inf if name == "balance_ball" else 2.0
                assert all(np.abs(obs).max(initial=0.0) <= limit for obs in batch.obs)
        next_steps = simulator.step(acted(steps, by))
        assert rows_of(steps) == before, "steps that were given away have changed"
        steps = next_steps


def test_trajectories_of_a_game_are_equal_only_for_equal_seeds(name):
    first, repeated, other = (
        trajectory(simulator := made(name, seed=seed), policies(name, simulator), 150)[0]
        for seed in (1, 1, 2)
    )
    assert first == repeated
    assert first != other


def test_restored_simulator_gives_the_same_steps_as_the_saved_simulator(name):
    simulator = made(name)
    simulator.set_parameter("shift", 40.0)
    simulator.parameters.set_sampler("num_tiles", Sampler(kind=0, values=(3.0, 9.0), seed=5))
    _, steps = trajectory(simulator, policies(name, simulator), 75)
    assert isinstance(simulator, Restorable)
    state = simulator.state_dict()
    saved = pickle.dumps(state)
    first, _ = trajectory(simulator, policies(name, simulator, seed=5), 200, steps)
    assert pickle.dumps(state) == saved, "later steps have changed it"
    other = made(name, seed=9)
    other.reset()
    other.load_state_dict(pickle.loads(saved))  # noqa: S301  # written by the test
    second, _ = trajectory(other, policies(name, other, seed=5), 200, steps)
    assert first == second


def test_episodes_of_an_area_do_not_depend_on_the_number_of_areas(name):
    def first_areas(n_agents):
        """Return observations and rewards of the first six agents and of their successors."""
        simulator = made(name, n_agents=n_agents)
        rngs = [np.random.default_rng(seat) for seat in range(n_agents)]
        seen = [[] for _ in range(6)]
        steps = simulator.reset()
        for _ in range(320):
            actions = {}
            for behavior, (decisions, terminals) in steps.items():
                for batch in (terminals, decisions):
                    numbers = [*batch.obs, batch.reward, batch.group_reward]
                    for row in np.flatnonzero(batch.agent_id % n_agents < 6).tolist():
                        agent_values = [values[row].tolist() for values in numbers]
                        seen[batch.agent_id[row] % n_agents].append(agent_values)
                spec = simulator.behavior_specs[behavior].action_spec
                actions[behavior] = action = spec.empty_action(len(decisions))
                for row, agent in enumerate(decisions.agent_id.tolist()):
                    drawn = spec.random_action(1, rngs[agent % n_agents])
                    action.continuous[row], action.discrete[row] = drawn.continuous, drawn.discrete
            steps = simulator.step(actions)
        return seen

    for in_six, in_twelve in zip(first_areas(6), first_areas(12), strict=True):
        # With more agents, the clock that all agents share advances in smaller steps.
        n = min(len(in_six), len(in_twelve))
        assert n > 20
        assert in_six[:n] == in_twelve[:n]


@pytest.mark.parametrize("name", MAX_STEP)
def test_episode_of_an_idle_agent_is_interrupted_at_the_documented_step_limit(name):
    simulator = made(name, n_agents=3)
    simulator.reset()
    ((behavior, spec),) = simulator.behavior_specs.items()
    nothing = {behavior: spec.action_spec.empty_action(3)}
    for _ in range(MAX_STEP[name] - 1):
        decisions, terminals = simulator.step(nothing)[behavior]
        assert len(terminals) == 0
    last = decisions.obs[-1]
    decisions, terminals = simulator.step(nothing)[behavior]
    assert terminals.interrupted.tolist() == [True] * 3
    assert terminals.agent_id.tolist() == decisions.agent_id.tolist() == [0, 1, 2]
    assert decisions.reward.tolist() == [0.0] * 3
    assert np.array_equal(terminals.obs[-1], last)
    assert len(simulator.step(nothing)[behavior][1]) == 0


def test_a_wrong_number_of_actions_is_refused(name):
    simulator = made(name)
    simulator.reset()
    actions = {
        behavior: spec.action_spec.empty_action(1)
        for behavior, spec in simulator.behavior_specs.items()
    }
    with pytest.raises(ValueError, match=r"actions have the shape \(1, \d\), expected \(\d+, \d\)"):
        simulator.step(actions)


def test_wrong_number_of_agents_and_unknown_behavior_of_an_expert_are_refused():
    assert {*SHARED, *SOLO} == set(registry.NAMES)
    for name, per_area in (("pong", 2), ("push_together", 3), ("tag", 3)):
        with pytest.raises(SettingsError, match=rf"{name}: .* multiple of {per_area}, .* got 7;"):
            registry.make(name, n_agents=7)
    with pytest.raises(SettingsError, match=r"tag: .* behavior ''; .* Hunter, Runner"):
        registry.expert("tag")


@pytest.mark.parametrize("name", [*SHARED, "grid_world", "collector", "balance_ball"])
def test_executable_gives_the_same_steps_as_the_simulator_in_process(name, tmp_path):
    file = tmp_path / "environment"
    file.write_text(SCRIPT.format(python=sys.executable, path=sys.path, name=name))
    file.chmod(0o755)
    local = made(name, seed=4)
    by, remote_by = policies(name, local), policies(name, local)
    with UnityEnvironment(file, seed=4, additional_args=["--num-agents", "12"]) as remote:
        remote.reset()
        steps = local.reset()
        for _ in range(60):
            answer = {behavior: remote.get_steps(behavior) for behavior in remote.behavior_specs}
            assert rows_of(answer) == rows_of(steps)
            for behavior, action in acted(answer, remote_by).items():
                remote.set_actions(behavior, action)
            remote.step()
            steps = local.step(acted(steps, by))


@shared
def test_configuration_of_a_game_lists_its_behaviors_and_has_self_play_for_opposing_teams(name):
    behaviors = load_run_settings(CONFIG / CONFIGURATIONS[name]).behaviors
    qualified = registry.make(name).behavior_specs
    assert set(behaviors) == {full_name.partition("?")[0] for full_name in qualified}
    teams = {full_name.partition("team=")[2] for full_name in qualified}
    for settings in behaviors.values():
        assert (settings.self_play is not None) == (len(teams) > 1)
        assert settings.trainer_type == CONFIGURATIONS[name].partition("/")[0]


class Counting(areas.SoloAreas):
    """Observes ten times the episode's number plus its steps; the choice 1 ends the task."""

    def __init__(self, seed=3):
        spec = BehaviorSpec([areas.vector(1)], ActionSpec(0, (2,)))
        super().__init__("counting", "C?team=0", spec, max_step=3, seed=seed, n_agents=3)
        self._episode = self._keep("episode", ())

    def _place(self, rows):
        self._episode[rows] += 1

    def _advance(self, action):
        return np.float32([1, 2, 3]), action.discrete[:, 0] == 1

    def _observe(self, rows):
        return [np.float32(10 * self._episode[rows] + self._n_steps[rows])[:, None]]


def test_episodes_of_different_areas_begin_end_and_are_restored_independently():
    game, restored = Counting(), Counting()

    def step(*choices, of=game):
        actions = {"C?team=0": ActionTuple(discrete=np.int32(choices)[:, None])}
        ((decisions, ended),) = of.step(actions).values()
        assert decisions.agent_id.tolist() == [0, 1, 2]
        shown = decisions.obs[0].ravel().tolist(), decisions.reward.tolist()
        ends = ended.agent_id, ended.obs[0].ravel(), ended.reward, ended.interrupted
        return *shown, list(zip(*(values.tolist() for values in ends), strict=True))

    game.reset()
    assert step(0, 1, 0) == ([11, 20, 11], [1, 0, 3], [(1, 11, 2, False)])
    state = game.state_dict()
    assert step(0, 0, 0) == ([12, 21, 12], [1, 2, 3], [])
    # the first area's task ends in its last allowed step, so it is not interrupted
    last = [20, 22, 20], [0, 2, 0], [(0, 13, 1, False), (2, 13, 3, True)]
    assert step(1, 0, 0) == last
    restored.reset()
    restored.load_state_dict(state)
    assert step(0, 0, 0, of=restored) == ([12, 21, 12], [1, 2, 3], [])
    assert step(1, 0, 0, of=restored) == last
    ((decisions, ended),) = game.reset().values()
    assert (decisions.obs[0].ravel().tolist(), len(ended)) == ([30, 30, 30], 0)
    assert decisions.reward.tolist() == [0, 0, 0]
    drawn = [stream(3, "counting", area).random(2).tolist() for area in range(3)]
    assert game._uniform(np.array([2, 0]), 2).tolist() == [drawn[2], drawn[0]]
    assert game._uniform(np.array([1]), 2).tolist() == [drawn[1]]
