"""The arrays, moments and random streams that algorithms pass to their parts.

Expected numbers are computed for single agents or rows, from the data that the test recorded.
"""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from steps import decision_steps, take_turn, terminal_steps
from test_signals import CPU, demo

from pipeline.algos import replay_sampler, reward_signals
from pipeline.algos.process_group import SINGLE_PROCESS
from pipeline.algos.rows import Rows
from pipeline.algos.schedules import Schedule, completed
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.nets.encoder import Normalizers
from pipeline.nets.group_critic import GroupLayout
from pipeline.nets.memory import SequenceState
from pipeline.settings import load_run_settings
from pipeline.settings.trainer.schema import PPOSettings
from pipeline.trainer.learner import Learner

SIZES = (2, 3)
SPEC = BehaviorSpec([ObservationSpec.vector(n) for n in SIZES], ActionSpec(1, (3, 2)))
NETWORK = {"hidden_units": 8, "num_layers": 1, "normalize": True}
MEMORY = {"sequence_length": 2, "memory_size": 4}
SIGNALS = {
    "extrinsic": {"gamma": 0.9, "strength": 0.7},
    "rnd": {"gamma": 0.5, "strength": 3.0, "network_settings": NETWORK},
}
GROUPS = np.array([1, 1, 1, 2, 2])


def learner(trainer, *, seed=1, memory=None, signals=SIGNALS, **settings) -> Learner:
    hyperparameters = {"batch_size": 8, "buffer_size": 16, **settings.pop("hyperparameters", {})}
    behavior = {
        "trainer_type": trainer,
        "hyperparameters": hyperparameters,
        "network_settings": NETWORK | {"memory": memory},
        "reward_signals": signals,
        "time_horizon": 4,
        **settings,
    }
    read = load_run_settings(None, overrides={"behaviors": {"B": behavior}}).behaviors["B"]
    return Learner("B", SPEC, read, seed=seed, device=CPU)


def rewarded(rnd, obs) -> float:
    """Return RND's reward of one step: it gets raw observations and normalises them."""
    with torch.no_grad():
        inputs = rnd.normalizers(obs)
        return float((rnd.predictor(inputs) - rnd.target(inputs)).square().sum())


class Seen(NamedTuple):
    """An agent's last observation, its memory before that, and its action."""

    obs: list
    memory: torch.Tensor | None
    action: torch.Tensor | None = None
    over: bool = False


class Row(NamedTuple):
    """A row of experience: its agent, and all members of the group when it decided."""

    agent: int
    members: dict[int, Seen]


class Play:
    """Five agents in two groups, with the observations and actions of each and of its mates."""

    def __init__(self, team_learner: Learner, seed: int = 0) -> None:
        self.learner, self.rng = team_learner, np.random.default_rng(seed)
        self.now: dict[int, Seen] = {}
        self.later: dict[int, torch.Tensor | None] = {}
        """Memory of each agent after its last decision."""
        self.rows: dict[bytes, Row] = {}
        """Rows by their first observation."""
        self.after: dict[bytes, dict[int, Seen]] = {}
        """Group after a trajectory, by its agent's observation at that moment."""

    def group(self, agent: int) -> dict[int, Seen]:
        return {a: self.now[a] for a in sorted(self.now) if GROUPS[a] == GROUPS[agent]}

    def draw(self, agents):
        return [self.rng.normal(size=(len(agents), n), scale=3).astype(np.float32) for n in SIZES]

    def message(self, deciding, ended=None) -> None:
        """Handle agents that decide, and agents that have ended, each truncated or not."""
        ended = ended or {}
        gone, seen = list(ended), self.draw(deciding)
        last = self.draw(gone)
        rewards = [self.rng.normal(size=len(agents)) for agents in (deciding, gone)]
        steps = (
            decision_steps(seen, deciding, reward=rewards[0], group_id=GROUPS[list(deciding)]),
            terminal_steps(
                last,
                gone,
                interrupted=list(ended.values()),
                reward=rewards[1],
                group_id=GROUPS[gone],
            ),
        )
        self.note(deciding, seen, gone, last, ended)
        decision = take_turn(self.learner, [steps]).decision
        for i, agent in enumerate(deciding):
            parts = [torch.from_numpy(decision.rows["continuous"][i : i + 1])]
            for choice, size in zip(decision.rows["discrete"][i], (3, 2), strict=True):
                parts.append(torch.eye(size)[None, int(choice)])
            self.now[agent] = self.now[agent]._replace(action=torch.cat(parts, dim=1))
            if decision.memory is not None:
                self.later[agent] = torch.from_numpy(decision.memory[i : i + 1].copy())
        for agent in deciding:
            self.rows[self.now[agent].obs[0].tobytes()] = Row(agent, self.group(agent))

    def note(self, deciding, seen, gone, last, ended) -> None:
        """Record the members of groups after the message, and before some of them ended."""
        fresh = {}
        for i, agent in enumerate(deciding):
            begins = agent in ended or agent not in self.now
            memory = None if begins else self.later.get(agent)
            fresh[agent] = Seen([values[i : i + 1] for values in seen], memory)
            if not begins:
                self.now[agent] = fresh[agent]
        for i, agent in enumerate(gone):
            obs = [values[i : i + 1] for values in last]
            self.now[agent] = Seen(obs, self.later.get(agent), over=not ended[agent])
        for i, agent in enumerate(gone):
            self.after[last[0][i].tobytes()] = self.group(agent)
        for agent in gone:
            del self.now[agent]
        self.now |= fresh
        for agent in deciding:
            self.after[fresh[agent].obs[0].tobytes()] = self.group(agent)

    def rollout(self):
        return self.learner.trajectories.rollout(self.learner.grouping.moments)


def varied(play: Play) -> None:
    """Members pause, join, and end singly, or an agent is truncated as another agent ends."""
    play.message([0, 1, 2, 3])
    play.message([0, 1, 2, 3, 4])
    play.message([1, 2, 4, 3], {0: False})  # agent 0 ends, its mates continue
    play.message([2, 3, 4])
    play.message([0, 2, 3], {1: True, 4: False})  # agent 0 begins as agent 1 is truncated
    play.message([0, 3], {2: False})
    play.message([0, 2], {3: True})
    play.message([4, 3], {0: True, 2: False})  # truncated as a mate ends
    play.message([2, 3, 4])
    play.message([2], {3: False, 4: True})


def assert_minibatches_have_whole_moments(rows, groups) -> None:
    for seed in range(5):
        stream, taken = np.random.default_rng(seed), []
        for batch in groups.minibatches(rows, stream, 7, SINGLE_PROCESS):
            taken += batch.index.tolist()
            picked = np.isin(groups.moment, groups.moment[batch.index])
            assert sorted(batch.index.tolist()) == np.flatnonzero(picked).tolist(), "whole moments"
        assert len(set(taken)) == len(taken) > len(groups.moment) // 2


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_targets_of_groups_equal_targets_of_members_computed_row_by_row(memory):
    team_learner = learner("poca", memory=memory)
    play = Play(team_learner)
    algorithm = team_learner.algorithm
    varied(play)
    rollout = play.rollout()
    rows, groups = algorithm._rows(rollout), algorithm.groups
    assert float(algorithm.critic.largest) == 3.0
    critic, normalizers = algorithm.critic, algorithm.policy.normalizers

    def estimate(members, agent=None):
        obs = [torch.from_numpy(np.concatenate(p)) for p in zip(*(m.obs for m in members.values()))]  # noqa: B905
        remembered = [
            torch.zeros(1, 4) if member.memory is None else member.memory
            for member in members.values()
        ]
        wanted = actions = None
        if agent is not None:
            wanted = torch.tensor([1 + list(members).index(agent)])
            actions = torch.cat([member.action for member in members.values()])
        layout = GroupLayout(size=len(members), wanted=wanted)
        remembered = torch.cat(remembered) if memory else None
        with torch.no_grad():
            return critic(normalizers(obs), remembered, actions, layout)[0].numpy()

    rnd, n_beyond = algorithm.signals.by_name["rnd"], 0
    for k, (start, length) in enumerate(zip(rollout.starts, rollout.lengths, strict=True)):
        after = play.after[rollout.next_obs[0][k].tobytes()]
        living = {agent: member for agent, member in after.items() if not member.over}
        beyond = np.array([estimate(living)[0] if living else 0.0, 0.0])
        # RND: all members if the agent's own task has ended, else only unfinished members
        counted = after if rollout.terminated[k] else living
        beyond[1] = estimate(counted)[1]
        n_beyond += len(living) < len(after) and not rollout.terminated[k]
        value_after, later = beyond, beyond
        for row in range(start + length - 1, start - 1, -1):
            agent, members = play.rows[rollout.obs[0][row].tobytes()]
            seen = [torch.from_numpy(values) for values in members[agent].obs]
            reward = np.array([0.7 * rollout.fields["reward"][row], 3.0 * rewarded(rnd, seen)])
            later = reward + np.array([0.9, 0.5]) * (0.95 * later + 0.05 * value_after)
            value_after = estimate(members)
            np.testing.assert_allclose(rows.value[row], value_after, atol=1e-5)
            np.testing.assert_allclose(rows.baseline[row], estimate(members, agent), atol=1e-5)
            np.testing.assert_allclose(rows.returns[row], later, atol=1e-4)
    assert n_beyond == 2, "a mate ended where an agent's own task went on"
    if not memory:
        assert_minibatches_have_whole_moments(rows, groups)
    else:
        lengths = rows.sequences.lengths.numpy()
        firsts = np.cumsum(lengths) - lengths
        for first, stored in zip(firsts.tolist(), rows.sequences.memory, strict=True):
            agent, members = play.rows[rollout.obs[0][first].tobytes()]
            before = members[agent].memory
            assert stored.tolist() == ([0.0] * 4 if before is None else before[0].tolist())


def imitating(folder) -> dict:
    """Return settings with every reward signal, and cloning of weighted demonstrations."""
    demos = [
        {"path": str(demo(SPEC, folder, name)), "weight": weight}
        for name, weight in (("a.demo", 1.0), ("b.demo", 3.0))
    ]
    gail = {"demo_path": demos, "use_vail": True, "use_actions": True, "network_settings": NETWORK}
    return {
        "signals": {"curiosity": {"network_settings": NETWORK}, **SIGNALS, "gail": gail},
        "behavioral_cloning": {"demo_path": demos, "batch_size": 40, "num_epoch": 1},
    }


def tensors_of(state, path=""):
    """Yield tensors, and states of NumPy's generators, by their places in a state."""
    if isinstance(state, dict) and "bit_generator" not in state:
        for key, value in state.items():
            yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(state, torch.Tensor | dict):
        yield path, state if isinstance(state, dict) else state.tolist()


def acted_and_learned(algorithm, rollout, step: int) -> list:
    rng = np.random.default_rng(step)
    obs = [rng.normal(size=(4, n)).astype(np.float32) for n in SIZES]
    memory = np.zeros((4, algorithm.memory_size), np.float32) if algorithm.memory_size else None
    action = algorithm.act(obs, None, memory).action
    algorithm.observe(obs)
    stats = algorithm.update(rollout, step=step)
    assert {"Losses/GAIL Loss", "Losses/Pretraining Loss"} <= set(stats)
    if algorithm.intrinsic is not None:
        charted = {f"Policy/{name} Reward" for name in ("Curiosity", "Extrinsic", "Rnd", "Gail")}
        assert charted - set(stats) == {"Policy/Extrinsic Reward"}, "counted as episodes end"
    return [action.continuous.tolist(), action.discrete.tolist(), stats]


@pytest.mark.parametrize("memory", [None, MEMORY])
@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_random_streams_are_derived_from_the_seed_and_saved_in_the_state(trainer, memory, tmp_path):
    options = {"memory": memory, **imitating(tmp_path)}
    if trainer == "sac":
        options["hyperparameters"] = {"steps_per_update": 8, "buffer_size": 100}
        options["hyperparameters"]["reward_signal_steps_per_update"] = 20
    play = Play(learner(trainer, seed=3, **options))
    varied(play)
    rollout = play.rollout()
    torch.manual_seed(4)
    outside = torch.get_rng_state()
    original, other = (learner(trainer, seed=seed, **options).algorithm for seed in (1, 2))
    pairs = zip(tensors_of(original.state_dict()), tensors_of(other.state_dict()), strict=True)
    n_streams = 0
    for (place, first), (_, second) in pairs:
        if any(part in place for part in ("stream", "generator")):
            n_streams += 1
            assert first != second, place
        elif place.endswith("weight"):
            assert first != second, place
    assert n_streams == 4 + (trainer == "sac")  # actions, minibatches, cloning, GAIL, noise
    acted_and_learned(original, rollout, 40)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(5)
    other.load_state_dict(copy.deepcopy(original.state_dict()))
    if trainer == "sac":
        other.replay.load_state_dict(original.replay.state_dict())
    went_on, resumed = (acted_and_learned(a, rollout, 80) for a in (original, other))
    assert went_on == resumed
    assert dict(tensors_of(original.state_dict())) == dict(tensors_of(other.state_dict()))


def test_rewards_of_replay_rows_use_raw_observations_and_losses_use_normalised_observations():
    play = Play(learner("sac", hyperparameters={"buffer_size": 100}))
    varied(play)
    algorithm = play.learner.algorithm
    algorithm.replay.add(play.rollout())
    stream = copy.deepcopy(algorithm.minibatch_stream)
    raw = algorithm.replay.sample(stream, 8)
    (batch,) = algorithm.sampler.minibatches(1)
    normalizers = algorithm.policy.normalizers.by_observation
    for name, sampled in (("obs", raw.obs), ("next_obs", raw.next_obs)):
        for i, values in enumerate(sampled):
            expected = normalizers[str(i)](torch.from_numpy(values))
            torch.testing.assert_close(getattr(batch, name)[i], expected)
            assert not torch.allclose(expected, torch.from_numpy(values), atol=0.1)
    rnd = algorithm.signals.by_name["rnd"]
    for row, rewards in enumerate(batch.rewards.tolist()):
        seen = [torch.from_numpy(values[row : row + 1]) for values in raw.obs]
        expected = [0.7 * raw.fields["reward"][row], 3.0 * rewarded(rnd, seen)]
        assert rewards == pytest.approx(expected, rel=1e-4)
    raw = algorithm.replay.sample(stream, 8)
    learned: list = []
    algorithm.signals.update = lambda rows: (learned.append(rows), {})[1]
    algorithm._update_signals(step=2)
    (batch,) = learned
    for name, sampled in (("obs", raw.obs), ("next_obs", raw.next_obs)):
        for i, values in enumerate(sampled):
            assert getattr(batch, name)[i].numpy().tolist() == values.tolist()


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_actor_and_critic_compute_separate_memories_from_normalised_observations(trainer):
    algorithm = learner(trainer, memory=MEMORY).algorithm
    rng = np.random.default_rng(0)
    obs = [rng.normal(size=(5, n)).astype(np.float32) * 3 + 1 for n in SIZES]
    algorithm.observe(obs)
    memory = rng.normal(size=(5, 8)).astype(np.float32)
    decision = algorithm.act(obs, None, memory)
    np.testing.assert_array_equal(decision.rows["memory"], memory)
    for row in range(5):
        inputs = algorithm.policy.normalizers([torch.from_numpy(v[row : row + 1]) for v in obs])
        before = torch.from_numpy(memory[row : row + 1])
        with torch.no_grad():
            actor = algorithm.policy.actor.step(inputs, before[:, :4])[1]
            critic = algorithm.recurrent_critic.step(inputs, before[:, 4:])
        torch.testing.assert_close(
            torch.from_numpy(decision.memory[row : row + 1]), torch.cat((actor, critic), dim=1)
        )


@pytest.mark.parametrize("memory", [None, MEMORY])
@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_copy_for_acting_and_original_draw_from_one_shared_random_stream(trainer, memory):
    shared, alone = (learner(trainer, memory=memory).algorithm for _ in range(2))
    obs = [np.ones((4, n), np.float32) for n in SIZES]
    remembered = np.zeros((4, shared.memory_size), np.float32) if memory else None
    acting = shared.copy_for_acting()
    drawn = [a.act(obs, None, remembered) for a in (acting, shared, acting)]
    expected = [alone.act(obs, None, remembered) for _ in range(3)]
    for decision, other in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(decision.action.continuous, other.action.continuous)
        np.testing.assert_array_equal(decision.action.discrete, other.action.discrete)


@pytest.mark.parametrize("memory", [None, MEMORY])
@pytest.mark.parametrize("trainer", ["ppo", "poca"])
def test_recomputed_log_probabilities_of_the_current_policy_equal_the_stored_log_probabilities(
    trainer, memory
):
    """With `threaded` they are computed again, from the stored memory of each sequence."""
    play = Play(learner(trainer, memory=memory))
    algorithm = play.learner.algorithm
    algorithm.observe = lambda _: None  # keeps the normalisers as they were for acting
    varied(play)
    rollout = play.rollout()
    algorithm.settings = replace(algorithm.settings, threaded=True)
    rows = algorithm._rows(rollout)
    np.testing.assert_allclose(rows.log_prob, rollout.fields["log_prob"], atol=1e-5)
    if memory:
        assert (rows.sequences.memory.abs().sum(1) > 0).sum() > 3


@pytest.mark.parametrize("memory", [None, MEMORY])
@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_each_agent_chooses_among_the_actions_that_its_mask_allows(trainer, memory):
    algorithm = learner(trainer, memory=memory).algorithm
    left = np.stack([np.arange(6) % 3, np.arange(6) // 3], axis=1)
    masks = [np.arange(size) != left[:, i : i + 1] for i, size in enumerate((3, 2))]
    obs = [np.ones((6, n), np.float32) for n in SIZES]
    remembered = np.zeros((6, algorithm.memory_size), np.float32) if memory else None
    decision = algorithm.act(obs, masks, remembered)
    np.testing.assert_array_equal(decision.action.discrete, left)
    np.testing.assert_array_equal(decision.rows["allowed"], ~np.concatenate(masks, axis=1))


@pytest.mark.parametrize("falls", ["learning_rate", "epsilon", "beta"])
def test_learning_rate_epsilon_and_beta_follow_their_own_schedules(falls):
    start = {"learning_rate": 0.5, "epsilon": 0.3, "beta": 0.2}
    kinds = {f"{name}_schedule": "linear" if name == falls else "constant" for name in start}
    now = Schedule.at(5, PPOSettings(**start, **kinds), 10)
    assert {name for name in start if getattr(now, name) != start[name]} == {falls}


@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_cloning_during_an_update_gets_the_number_of_agent_steps(trainer):
    """Its learning rate falls with the agent steps."""
    changes = {"buffer_init_steps": 0} if trainer == "sac" else {}
    play, told = Play(learner(trainer, hyperparameters=changes)), []

    def in_parts(*, step):
        told.append(step)
        yield from ()
        return 0.0

    def update(*, step):
        return completed(in_parts(step=step))

    algorithm = play.learner.algorithm
    algorithm.bc = SimpleNamespace(n_parts=0, update=update, update_in_parts=in_parts)
    varied(play)
    algorithm.update(play.rollout(), step=3)
    assert set(told) == {3}


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("trainer", ["ppo", "sac", "poca"])
def test_signals_normalise_observations_even_if_the_policy_has_no_normalisers(trainer, normalize):
    own = {"network_settings": NETWORK}
    signals = {"curiosity": own, "extrinsic": {}, "rnd": own}
    network = NETWORK | {"normalize": normalize}
    algorithm = learner(trainer, signals=signals, network_settings=network).algorithm
    rng, expected = np.random.default_rng(0), Normalizers(SPEC.observation_specs, enabled=True)
    for _ in range(2):
        obs = [rng.normal(4.0, 2.0, (9, n)).astype(np.float32) for n in SIZES]
        algorithm.observe(obs)
        expected.update([torch.from_numpy(values) for values in obs])
    networks = algorithm.signals.modules.values()
    found = [m for network in networks for m in network.modules() if isinstance(m, Normalizers)]
    assert len(found) == 2
    for normalizers in (*found, *([algorithm.policy.normalizers] * normalize)):
        torch.testing.assert_close(normalizers.state_dict(), expected.state_dict())
    assert bool(algorithm.policy.normalizers) == normalize


@pytest.mark.parametrize("trainer", ["ppo", "sac"])
def test_weights_of_another_run_are_loaded_into_all_networks(trainer, tmp_path):
    options = imitating(tmp_path)
    first, second = (learner(trainer, seed=seed, **options).algorithm for seed in (1, 2))
    second.observe([np.ones((4, n), np.float32) for n in SIZES])
    taken = second.weights()
    left, n_loaded = first.load_weights(taken)
    assert not left
    assert n_loaded == sum(map(len, taken.values()))
    for name, network in second.networks.items():
        torch.testing.assert_close(first.networks[name].state_dict(), network.state_dict())
    kept = copy.deepcopy(taken)
    for parameter in second.signals.by_name["rnd"].predictor.parameters():
        parameter.data.add_(1.0)
    second.optimizer.flat.data.add_(1.0)
    torch.testing.assert_close(taken, kept, rtol=0, atol=0)


def test_sampler_draws_separate_rows_for_each_gradient_step_of_reward_signals():
    play = Play(learner("sac", hyperparameters={"buffer_size": 100}))
    varied(play)
    algorithm = play.learner.algorithm
    algorithm.replay.add(play.rollout())
    stream = copy.deepcopy(algorithm.minibatch_stream)
    for batch in algorithm.sampler.transitions(3):
        drawn = algorithm.replay.sample(stream, 8)
        assert batch.fields["reward"].tolist() == drawn.fields["reward"].tolist()
    drawn = algorithm.replay.sample(stream, 24).fields["done"].reshape(3, 8)
    for batch, done in zip(algorithm.sampler.minibatches(3), drawn.tolist(), strict=True):
        assert batch.done.tolist() == done


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_rewards_computed_in_chunks_and_rows_read_in_chunks_equal_results_without_chunks(
    memory, monkeypatch
):
    own = {"network_settings": NETWORK}
    signals = {"curiosity": own, "extrinsic": {}, "rnd": own}
    play = Play(learner("poca", memory=memory, signals=signals))
    varied(play)
    rollout, intrinsic = play.rollout(), play.learner.algorithm.intrinsic
    intrinsic.signals.by_name["curiosity"].has_learned = True
    whole, _ = intrinsic.begin(rollout)
    assert rollout.n_rows > 9
    monkeypatch.setattr(reward_signals, "_CHUNK", 4)
    np.testing.assert_allclose(intrinsic.begin(rollout)[0], whole, rtol=1e-5)
    play = Play(learner("sac", memory=memory, hyperparameters={"buffer_size": 100}))
    varied(play)
    algorithm = play.learner.algorithm
    algorithm.replay.add(play.rollout())
    monkeypatch.setattr(replay_sampler, "CHUNK", 16)
    stream = copy.deepcopy(algorithm.minibatch_stream)
    batches = list(algorithm.sampler.minibatches(5))
    drawn = [algorithm.replay.sample(stream, n) for n in ([8] * 5 if memory else [16, 16, 8])]
    expected = np.concatenate([sampled.fields["reward"] for sampled in drawn])
    assert torch.cat([batch.reward for batch in batches]).tolist() == expected.tolist()
    assert len(batches) == 5
    if memory:
        lengths = [sampled.lengths.tolist() for sampled in drawn]
        assert [batch.sequences.lengths.tolist() for batch in batches] == lengths
        for batch, sampled in zip(batches, drawn, strict=True):
            assert batch.sequences.memory.tolist() == sampled.memory.tolist()
    else:
        assert [len(batch) for batch in batches] == [8] * 5


def test_a_minibatch_of_sequences_is_weighted_by_its_number_of_rows():
    weighed = []
    group = SimpleNamespace(
        minibatch_sizes=lambda n, size: [size] * (n // size),
        weighted=lambda sizes: (weighed.append(list(sizes)), sizes)[1],
    )
    state = SequenceState(memory=torch.arange(4.0)[:, None], lengths=torch.tensor([3, 1, 2, 2]))
    rows = Rows(obs=[torch.arange(8.0)], sequences=state)
    batches = list(rows.minibatches(np.random.default_rng(0), 2, group))
    assert weighed == [[len(batch) for batch in batches]]
    drawn = torch.cat([batch.sequences.memory[:, 0] for batch in batches]).tolist()
    assert sorted(drawn) == [0.0, 1.0, 2.0, 3.0] != drawn
    first = {0: [0.0, 1.0, 2.0], 1: [3.0], 2: [4.0, 5.0], 3: [6.0, 7.0]}
    for batch in batches:
        numbers = batch.sequences.memory[:, 0].int().tolist()
        assert batch.sequences.lengths.tolist() == [len(first[number]) for number in numbers]
        assert batch.obs[0].tolist() == [row for number in numbers for row in first[number]]
