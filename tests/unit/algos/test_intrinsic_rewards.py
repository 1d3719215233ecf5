"""The steps that reward signals get from a rollout, against slow versions."""

import numpy as np
import pytest
import torch
from test_ppo import trainer_settings

from pipeline.algos.ppo import PPO
from pipeline.algos.reward_signals import IntrinsicRewards, RewardSignals, steps_of
from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec
from pipeline.data.columns import Columns, Field
from pipeline.data.rollout import Trajectories
from pipeline.errors import TrainingError

CPU = torch.device("cpu")
SPEC = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_continuous(1))
COLUMNS = Columns(
    {
        "log_prob": Field(shape=(1,)),
        "continuous": Field(shape=(1,)),
        "discrete": Field(shape=(0,), dtype=np.int64),
    },
    [Field(shape=(2,))],
)


def settings(**signals):
    own = {"network_settings": {"hidden_units": 8, "num_layers": 1}}
    return trainer_settings(
        hyperparameters={"batch_size": 16, "buffer_size": 64},
        reward_signals={name: own | options for name, options in signals.items()},
    )


def signals_of(**signals) -> RewardSignals:
    return RewardSignals(SPEC, settings(**signals), seed=1, device=CPU)


def with_rnd(**options) -> IntrinsicRewards:
    return IntrinsicRewards(signals_of(extrinsic={}, rnd=options), device=CPU)


def ppo(**signals) -> PPO:
    return PPO(SPEC, settings(**signals), seed=1, device=CPU)


class Agents:
    """Return a rollout of three agents; their episodes terminate or are truncated at random."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.trajectories = Trajectories(COLUMNS, horizon=4, capacity=8)
        self.trajectories.reserve(3)
        self.obs = self.draw()
        self.led_to: dict[tuple, tuple] = {}
        """By observation: the next observation, whether the task ended, and the episode."""
        self.episode = [0, 0, 0]
        self.n_ended = 0

    def draw(self):
        return self.rng.normal(size=(3, 2)).astype(np.float32)

    def rows(self):
        action = self.rng.normal(size=(3, 1)) * 3
        return {"log_prob": np.zeros((3, 1)), "continuous": action, "discrete": np.zeros((3, 0))}

    def play(self, n):
        for _ in range(n):
            slots = np.arange(3)
            self.trajectories.begin_transition(slots, [self.obs], self.rows())
            later, ends = self.draw(), self.rng.random(3) < 0.2
            cut = self.rng.random(3) < 0.5
            for agent in range(3):
                done = bool(ends[agent] and not cut[agent])
                key = tuple(self.obs[agent])
                self.led_to[key] = (later[agent], done, (agent, self.episode[agent]))
                self.episode[agent] += int(ends[agent])
            reward = self.rng.normal(size=3).astype(np.float32)
            for mask, flags in ((ends, {"ended": True, "interrupted": cut[ends]}), (~ends, {})):
                self.trajectories.complete_transition(
                    slots[mask], reward[mask], [later[mask]], **{"ended": False, **flags}
                )
            self.obs = np.where(ends[:, None], self.draw(), later)
        return self.trajectories.rollout()


def test_each_row_for_reward_signals_has_the_next_observation_and_whether_the_task_ended():
    agents = Agents()
    rollout = agents.play(60)
    steps = steps_of(rollout, device=CPU, with_next_obs=True)
    order = torch.from_numpy(np.random.default_rng(0).permutation(rollout.n_rows))
    batch = steps.take(order)
    assert len(batch) > 100
    assert 0 < int(batch.done.sum()) < int(rollout.ended.sum()) < len(rollout.lengths)
    for obs, following, done in zip(batch.obs[0], batch.next_obs[0], batch.done, strict=True):
        later, was_done, _ = agents.led_to[tuple(obs.numpy())]
        assert np.array_equal(following.numpy(), later)
        assert bool(done) == was_done
    sample = torch.from_numpy(rollout.fields["continuous"])[order]
    assert sample.abs().max() > 3
    assert torch.allclose(batch.continuous, (sample / 3).clamp(-1, 1))


def test_next_observations_are_gathered_only_on_request():
    assert steps_of(Agents().play(20), device=CPU, with_next_obs=False).next_obs == []
    names = ("extrinsic", "rnd", "curiosity")
    needs = [signals_of(**{name: {}}).needs_next_obs for name in names]
    assert needs == [False, False, True]


@pytest.mark.parametrize("is_restored", [False, True])
def test_reported_reward_of_a_signal_averages_the_sums_of_episodes_that_may_span_rollouts(
    is_restored,
):
    agents, learned = Agents(), with_rnd(strength=0.5)
    sums: dict[tuple, float] = {}
    for n in (7, 50):
        if is_restored:
            original, learned = learned, IntrinsicRewards(learned.signals, device=CPU)
            learned.load_state_dict(original.state_dict())
        rollout = agents.play(n)
        before = set(sums)
        rewards = learned.begin(rollout)[0][:, 1]
        for obs, reward in zip(rollout.obs[0], rewards.tolist(), strict=True):
            episode = agents.led_to[tuple(obs)][2]
            sums[episode] = sums.get(episode, 0.0) + reward
        stats = learned.end(step=0)
        agents.trajectories.clear_closed()
        if n == 7:
            in_parts = before | {e for e in sums if agents.episode[e[0]] == e[1]}
            assert in_parts
            reported = set(sums) - in_parts
    ended = [
        total for e, total in sums.items() if e not in reported and agents.episode[e[0]] > e[1]
    ]
    assert stats["Policy/Rnd Reward"] == pytest.approx(np.mean(ended), rel=1e-5)
    assert "Policy/Extrinsic Reward" not in stats


def test_the_reported_sum_of_rewards_includes_small_rewards_after_a_large_reward(monkeypatch):
    agents, learned = Agents(), with_rnd()
    rollout = agents.play(50)
    rewards = torch.ones(rollout.n_rows, 2)
    rewards[rollout.starts] = 2.0**24  # to which float32 cannot add 1
    monkeypatch.setattr(learned.signals, "rewards", lambda _rows: rewards)
    learned.begin(rollout)
    going_on = sum(rnd for _, rnd in learned.state_dict()["sums"])
    n_ended = sum(agents.episode)
    ended = n_ended * learned.end(step=0)["Policy/Rnd Reward"]
    assert going_on + ended == rewards[:, 1].sum(dtype=torch.float64)


def test_rewards_of_a_dropped_episode_do_not_count_in_the_next_episode_of_the_same_slot():
    learned, agents, slots = with_rnd(), Agents(), np.arange(3)

    def step(*, ended):
        agents.trajectories.begin_transition(slots, [agents.draw()], agents.rows())
        interrupted = np.zeros(3, np.bool_) if ended else None
        agents.trajectories.complete_transition(
            slots, np.ones(3, np.float32), [agents.draw()], ended=ended, interrupted=interrupted
        )

    for _ in range(4):
        step(ended=False)
    rollout = agents.trajectories.rollout()
    assert rollout.begins.tolist() == [True] * 3
    learned.begin(rollout)
    assert "Policy/Rnd Reward" not in learned.end(step=0)
    agents.trajectories.clear_closed()
    agents.trajectories.drop_open(slots[:2])  # the third episode continues
    step(ended=True)
    rollout = agents.trajectories.rollout()
    assert rollout.begins.tolist() == [True, True, False]
    before = learned.state_dict()["sums"][2][1]
    rewards = learned.begin(rollout)[0][:, 1]
    expected = (rewards[0] + rewards[1] + rewards[2] + before) / 3
    assert learned.end(step=0)["Policy/Rnd Reward"] == pytest.approx(expected, rel=1e-5)
    assert learned.state_dict() == {"slots": [], "sums": []}


def test_list_of_optimizers_has_the_optimizers_of_the_algorithm_and_of_each_trained_signal():
    algorithm = ppo(extrinsic={}, rnd={})
    signal_optimizer = algorithm.signals.by_name["rnd"].optimizer
    assert algorithm.optimizers == [algorithm.optimizer, signal_optimizer]


def test_only_signals_that_ignore_done_bootstrap_after_the_end_of_the_task():
    algorithm = ppo(extrinsic={"gamma": 0.5}, rnd={"gamma": 0.9})
    rollout = Agents().play(40)
    batch = algorithm._rows(rollout)
    rewards, _ = algorithm.intrinsic.begin(rollout)
    (end,) = np.flatnonzero(rollout.terminated)[:1]
    row = rollout.starts[end] + rollout.lengths[end] - 1
    with torch.no_grad():
        later = [torch.from_numpy(rollout.next_obs[0][end : end + 1])]
        value = algorithm.critic(later, algorithm.policy.actor(later))[0]
    assert float(value.abs().min()) > 1e-3
    assert float(batch.returns[row, 0]) == pytest.approx(rewards[row, 0], abs=1e-5)
    assert float(batch.returns[row, 1]) == pytest.approx(
        rewards[row, 1] + 0.9 * float(value[1]), abs=1e-5
    )


def test_signals_and_policy_learn_from_the_same_minibatches():
    algorithm = ppo(extrinsic={}, curiosity={})
    rollout = Agents().play(40)
    taught, learned = [], []
    update, learn = algorithm.signals.update, algorithm.learn_minibatch
    algorithm.signals.update = lambda t: (taught.append(t.obs[0]), update(t))[1]
    algorithm.learn_minibatch = lambda b, **o: (learned.append(b.obs[0].clone()), learn(b, **o))[1]
    stats = algorithm.update(rollout, step=0)
    n_minibatches = 3 * (rollout.n_rows // 16)
    assert len(taught) == len(learned) == n_minibatches
    assert all(torch.equal(a, b) for a, b in zip(taught, learned, strict=True))
    for tag in ("Losses/Curiosity Forward Loss", "Losses/Curiosity Inverse Loss",
                "Policy/Curiosity Value Estimate"):  # fmt: skip
        assert np.isfinite(stats[tag])


def test_reported_signal_losses_are_the_means_over_the_minibatches_of_one_rollout():
    learned, agents, losses = with_rnd(), Agents(), iter([1.0, 4.0, 10.0])
    learned.signals.update = lambda _: {"Losses/RND Loss": torch.tensor(next(losses))}
    for n, expected in ((2, 2.5), (1, 10.0)):
        _, steps = learned.begin(agents.play(10))
        for _ in range(n):
            learned.learn(steps)
        assert learned.end(step=0)["Losses/RND Loss"] == expected


def test_a_signal_loss_that_is_not_finite_stops_the_run_and_names_step_and_tag():
    learned = with_rnd()
    _, steps = learned.begin(Agents().play(10))
    predictor = learned.signals.by_name["rnd"].predictor
    predictor.dense.layers[0].weight.data[0, 0] = torch.inf
    learned.learn(steps)
    with pytest.raises(TrainingError, match="step 7: Losses/RND Loss is not finite"):
        learned.end(step=7)
