"""Losses of PPO and POCA equal losses that slow code composes from the formulas.

Row by row and agent by agent from the messages of a golden case, for three gradient steps on all
rows of a rollout: rewards, values, advantages, clipping, entropy, weights of the terms and
schedules are in it. Compared are the losses and numbers that are reported, the gradient of the last
step, and the weights.
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from golden_cases import N_MESSAGES, TERMINATED
from golden_training import Training

from pipeline.nets.group_critic import GroupLayout

HORIZON, LAMBDA, STRENGTH = 6, 0.8, 0.7
GAMMAS = {"extrinsic": 0.9, "rnd": 0.8}
N_EPOCHS = 3
# Linear schedules half way: rollouts end at half of max_steps.
EPSILON, BETA = (0.2 + 0.1) / 2, (0.05 + 1e-5) / 2


@dataclass
class Trajectory:
    """An agent's steps at successive messages."""

    agent: int
    messages: list[int]
    begins: bool
    ended: bool
    terminated: bool

    @property
    def keys(self):
        return [(message, self.agent) for message in self.messages]


def trajectories(experience) -> list[Trajectory]:
    """Return the trajectories by agent."""
    result = []
    for agent in range(len(experience["groups"])):
        messages, begins = [], True
        for message in range(1, N_MESSAGES + 1):
            messages.append(message - 1)
            end = experience["ends"][message, agent]
            if end or len(messages) == HORIZON:
                trajectory = Trajectory(agent, messages, begins, bool(end), end == TERMINATED)
                result.append(trajectory)
                messages, begins = [], bool(end)
    return result


def mean(terms):
    terms = list(terms)
    return sum(terms) / len(terms)


def standardised(numbers: dict) -> dict:
    center = mean(numbers.values())
    spread = math.sqrt(mean((x - center) ** 2 for x in numbers.values()))
    return {key: (x - center) / (spread + 1e-10) for key, x in numbers.items()}


def spread(numbers) -> float:
    numbers = np.array(list(numbers))
    return max(float(numbers.std()), float(np.abs(numbers).max()) / 5)


class Slow:
    """Formulas that PPO and POCA share; `given` is the experience of a training."""

    revalues = False
    desired_kl = None
    earlier: np.ndarray | None = None
    """[n, S] earlier returns, if returns are normalised."""

    def __init__(self, training: Training) -> None:
        self.given = training.experience
        self.trajectories = trajectories(self.given)
        algorithm = training.learner.algorithm
        self.spec, self.signals = algorithm.spec, algorithm.signals.by_name
        self.memory = training.learner.settings.network_settings.memory
        self.policy, self.critic = copy.deepcopy((algorithm.policy, algorithm.critic))
        self.rate = training.settings["hyperparameters"]["learning_rate"] / 2
        self.starts: dict = {}
        self.units = [1.0] * len(self.signals)

    def learn(self) -> list[float]:
        """Make three steps; return the mean size of each loss, as it is charted."""
        parameters = [*self.policy.parameters(), *self.critic.parameters()]
        moments = [(torch.zeros_like(weights), torch.zeros_like(weights)) for weights in parameters]
        if self.earlier is not None:
            self.units = [spread(column) for column in self.earlier.T]
        with torch.no_grad():
            self.targets(self.units)
        begun, sizes = copy.copy(self.__dict__), []
        for number in range(1, N_EPOCHS + 1):
            if self.revalues and number > 1:
                with torch.no_grad():
                    self.targets(self.units, is_new=False)
                self.values = begun["values"]
            self.log_ratios = []
            losses, entropy = self.losses()
            for parameter in parameters:
                parameter.grad = None
            (self.weighted(*losses) - BETA * entropy).backward()
            for parameter, (first, second) in zip(parameters, moments, strict=True):
                first.lerp_(parameter.grad, 1 - 0.9)
                second.lerp_(parameter.grad**2, 1 - 0.999)
                scale = (second / (1 - 0.999**number)).sqrt() + 1e-8
                parameter.data -= self.rate * first / (1 - 0.9**number) / scale
            sizes.append([abs(loss.item()) for loss in losses])
            if self.desired_kl is not None and number > 1:
                self.adapt()
        for name in {"returns", "values", "baselines"} & begun.keys():  # reported in statistics
            setattr(self, name, begun[name])
        return [mean(loss_sizes) for loss_sizes in zip(*sizes, strict=True)]

    def adapt(self) -> None:
        """Return the next rate, by the mean over rows of the divergence summed over components."""
        n_rows = sum(len(t.keys) for t in self.trajectories)
        kl = sum(math.exp(x) - 1 - x for x in self.log_ratios) / n_rows
        if kl > 2 * self.desired_kl:
            self.rate = max(self.rate / 1.5, 1e-5)
        elif kl < self.desired_kl / 2:
            self.rate = min(self.rate * 1.5, 1e-2)

    def measure(self, returns: list[list[float]]) -> None:
        """Add new returns of each signal to the statistics of the critic's unit."""
        if self.earlier is not None:
            self.units = [
                spread([*before, *column])
                for before, column in zip(self.earlier.T, returns, strict=True)
            ]

    def seen(self, message: int, agent: int, *, after: bool = False) -> list[torch.Tensor]:
        """Return an agent's observation; `after` an action it may be the episode's last."""
        over = after and self.given["ends"][message, agent]
        return [torch.from_numpy(self.given["last_obs" if over else "obs"][message, agent][None])]

    def hidden(self, t: Trajectory) -> list[torch.Tensor]:
        """Return the actor's output of each row."""
        return [self.policy.actor(self.seen(*key)) for key in t.keys]

    def gains(self) -> tuple[list, list]:
        """Return clipped surrogates of all rows' components, and the entropy of each row."""
        gains, entropies = [], []
        rows = [
            pair for t in self.trajectories for pair in zip(t.keys, self.hidden(t), strict=True)
        ]
        for (message, agent), hidden in rows:
            log_probs, entropy = self.heads(hidden, message, agent)
            entropies.append(entropy)
            advantage = self.advantages[message, agent]
            old = self.given["log_prob"][message, agent]
            for log_prob, before in zip(log_probs, old, strict=True):
                ratio = (log_prob - float(before)).exp()
                self.log_ratios.append(ratio.log().item())
                clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
                gains.append(torch.minimum(ratio * advantage, clipped * advantage))
        return gains, entropies

    def heads(self, hidden, message: int, agent: int) -> tuple[list, torch.Tensor]:
        """Return the log probability of each action component, and the entropy."""
        heads, actions = self.policy.actor.heads, self.spec.action_spec
        log_probs, entropy, first = [], 0.0, 0
        if actions.continuous_size:
            mu, log_sigma = heads.gaussian(hidden)
            action = self.given["continuous"][message, agent]
            parts = [
                torch.distributions.Normal(mu[0, i], log_sigma[0, i].exp())
                for i in range(actions.continuous_size)
            ]
            log_probs += [
                dist.log_prob(torch.tensor(a)) for dist, a in zip(parts, action, strict=True)
            ]
            entropy = mean(dist.entropy() for dist in parts)
        for number, size in enumerate(actions.discrete_branches):
            forbidden = self.given["mask"][message, agent, first : first + size]
            logits = heads.branches[number](hidden)[0]
            allowed = [i for i in range(size) if not forbidden[i]]
            total = sum(logits[i].exp() for i in allowed)
            logs = {i: (logits[i].exp() / total).log() for i in allowed}
            log_probs.append(logs[int(self.given["discrete"][message, agent, number])])
            entropy = entropy - sum(log.exp() * log for log in logs.values())
            first += size
        return log_probs, entropy


class SlowPPO(Slow):
    def targets(self, units, *, is_new: bool = True) -> None:
        """Return returns by signal, values and advantages of each row, by the current networks."""
        if not self.starts:
            self.begin_memories()
        self.values, self.returns, advantages = {}, {}, {}
        for t in self.trajectories:
            obs = [self.seen(*key) for key in t.keys]
            obs.append(self.seen(t.messages[-1] + 1, t.agent, after=True))
            *values, following = [v * torch.tensor(units) for v in self.critic_values(t, obs)]
            for s, name in enumerate(self.signals):
                counts = name == "rnd" or not t.terminated
                after, advantage = float(following[s]) * counts, 0.0
                for key, value in reversed(list(zip(t.keys, values, strict=True))):
                    delta = self.reward(name, *key) + GAMMAS[name] * after - float(value[s])
                    advantage = delta + GAMMAS[name] * LAMBDA * advantage
                    after = float(value[s])
                    self.values[key, s] = after
                    self.returns[key, s] = advantage + after
                    advantages.setdefault(key, []).append(advantage)
        self.advantages = standardised(
            {key: mean(per_signal) for key, per_signal in advantages.items()}
        )
        if is_new:
            n_signals = range(len(self.signals))
            columns = [[r for (_, s), r in self.returns.items() if s == n] for n in n_signals]
            self.measure(columns)
        for numbers in (self.returns, self.values):
            for key, s in numbers:
                numbers[key, s] /= self.units[s]

    def reward(self, name: str, message: int, agent: int) -> float:
        if name == "extrinsic":
            return STRENGTH * float(self.given["reward"][message + 1, agent])
        obs, signal = self.seen(message, agent), self.signals["rnd"]
        return float((signal.predictor(obs) - signal.target(obs)).square().sum())

    def begin_memories(self) -> None:
        """Return memories of actor and critic at each sequence's start, from single steps."""
        self.starts = {}
        for t in self.trajectories if self.memory else []:
            if t.begins:
                actor_memory = critic_memory = torch.zeros(1, self.policy.memory_size)
            for number, key in enumerate(t.keys):
                if number % self.memory.sequence_length == 0:
                    self.starts[key] = actor_memory, critic_memory
                actor_memory = self.policy.actor.step(self.seen(*key), actor_memory)[1]
                critic_memory = self.critic.step(self.seen(*key), critic_memory)

    def critic_values(self, t: Trajectory, obs) -> list[torch.Tensor]:
        """Return the critic's value [signals] of each observation of `obs`, with its memory."""
        values = []
        for number, seen in enumerate(obs):
            if self.memory is None:
                values.append(self.critic(seen, seen[0])[0])
                continue
            if number < len(t.keys) and number % self.memory.sequence_length == 0:
                memory = self.starts[t.keys[number]][1]
            hidden, memory = self.critic.memory.step(self.critic.body(seen), memory)
            values.append(self.critic.heads(hidden)[0])
        return values

    def hidden(self, t: Trajectory) -> list[torch.Tensor]:
        if self.memory is None:
            return super().hidden(t)
        result = []
        for number, key in enumerate(t.keys):
            if number % self.memory.sequence_length == 0:
                memory = self.starts[key][0]
            hidden, memory = self.policy.actor.step(self.seen(*key), memory)
            result.append(hidden)
        return result

    def losses(self) -> tuple:
        """Return policy loss, value loss, and the mean entropy."""
        (gains, entropies), errors = self.gains(), []
        for t in self.trajectories:
            values = self.critic_values(t, [self.seen(*key) for key in t.keys])
            for key, value in zip(t.keys, values, strict=True):
                errors += [self.error(key, s, value[s]) for s in range(len(self.signals))]
        return (-mean(gains), mean(errors)), mean(entropies)

    clips = False

    def error(self, key, s: int, value):
        target = self.returns[key, s]
        error = (target - value) ** 2
        if not self.clips:
            return error
        column = [returns for (_, signal), returns in self.returns.items() if signal == s]
        most = EPSILON * float(np.std(column))
        before = self.values[key, s]
        moved = before + (value - before).clamp(-most, most)
        return torch.maximum(error, (target - moved) ** 2)

    @staticmethod
    def weighted(policy, value):
        return policy + 0.5 * value

    def statistics(self) -> dict[str, float]:
        """Return statistics of the last pass over the rows, and of values before the first pass."""
        far = [ratio for ratio in self.log_ratios if abs(math.exp(ratio) - 1) > EPSILON]
        shares = []
        for s, _ in enumerate(self.signals):
            columns = [(self.returns[key], self.values[key]) for key in self.returns if key[1] == s]
            left = np.var([returns - value for returns, value in columns])
            shares.append(1 - left / np.var([returns for returns, _ in columns]))
        result = {
            "Policy/approx_kl": mean(math.exp(x) - 1 - x for x in self.log_ratios),
            "Policy/clip_fraction": len(far) / len(self.log_ratios),
            "Policy/explained_variance": mean(shares),
        }
        for s, name in enumerate(self.signals):
            estimates = [value for (_, signal), value in self.values.items() if signal == s]
            result[f"Policy/{name.capitalize()} Value Estimate"] = mean(estimates) * self.units[s]
        return result


class SlowPOCA(Slow):
    """Groups begin and end together, so a group's members are the agents with the group's id."""

    def mates(self, agent: int) -> list[int]:
        groups = self.given["groups"].tolist()
        return [other for other in range(len(groups)) if groups[other] == groups[agent]]

    def targets(self, units, *, is_new: bool = True) -> None:
        """Return lambda-returns, baselines and advantages of each row."""
        (unit,) = units
        self.critic.update_largest_group(3)
        self.returns, advantages, self.values, self.baselines = {}, {}, [], []
        for t in self.trajectories:
            end = t.messages[-1] + 1
            everyone = [self.seen(end, mate, after=True)[0] for mate in self.mates(t.agent)]
            after = 0.0 if t.terminated else float(self.value_of(everyone)) * unit
            later = after
            for key in reversed(t.keys):
                mixed = LAMBDA * later + (1 - LAMBDA) * after
                later = self.reward(*key) + GAMMAS["extrinsic"] * mixed
                after = float(self.value(*key)) * unit
                self.returns[key] = later
                self.values.append(after)
                self.baselines.append(float(self.baseline(*key)) * unit)
                advantages[key] = later - self.baselines[-1]
        self.advantages = standardised(advantages)
        if is_new:
            self.measure([list(self.returns.values())])
        self.returns = {key: number / self.units[0] for key, number in self.returns.items()}

    def reward(self, message: int, agent: int) -> float:
        rewards = [self.given["reward"][message + 1, mate] for mate in self.mates(agent)]
        return STRENGTH * float(sum(rewards) + self.given["group_reward"][message + 1, agent])

    def value_of(self, seen: list):
        """Return the value of a group with these observations; one reward signal."""
        return self.critic([torch.cat(seen)], None, None, GroupLayout(size=len(seen)))[0, 0]

    def value(self, message: int, agent: int):
        return self.value_of([self.seen(message, mate)[0] for mate in self.mates(agent)])

    def baseline(self, message: int, agent: int):
        """Return the baseline: the agent's observation, and its mates' observations and actions."""
        mates = self.mates(agent)
        place = 1 + mates.index(agent)
        groups = GroupLayout(size=len(mates), wanted=torch.tensor([place]))
        parts = []
        for mate in mates:
            action = [torch.from_numpy(self.given["continuous"][message, mate])]
            chosen = self.given["discrete"][message, mate]
            for choice, size in zip(chosen, self.spec.action_spec.discrete_branches, strict=True):
                action.append(torch.eye(size)[choice])
            if mate == agent:  # its own action must not change the baseline
                action = [torch.full_like(part, 9.0) for part in action]
            parts.append(torch.cat(action))
        seen = torch.cat([self.seen(message, mate)[0] for mate in mates])
        return self.critic([seen], None, torch.stack(parts), groups)[0, 0]

    def losses(self) -> tuple:
        """Return policy loss, value loss, baseline loss, and the mean entropy."""
        gains, entropies = self.gains()
        values = [(returns - self.value(*key)) ** 2 for key, returns in self.returns.items()]
        baselines = [(returns - self.baseline(*key)) ** 2 for key, returns in self.returns.items()]
        return (-mean(gains), mean(values), mean(baselines)), mean(entropies)

    @staticmethod
    def weighted(policy, value, baseline):
        return policy + 0.5 * (value + 0.5 * baseline)

    def statistics(self) -> dict[str, float]:
        return {
            "Policy/Extrinsic Value Estimate": mean(self.values),
            "Policy/Extrinsic Baseline Estimate": mean(self.baselines),
        }


def assert_updates_agree(training: Training, slow: Slow, names: list[str]) -> None:
    losses = slow.learn()
    training.run()
    fast, means = training.learner.algorithm, training.learner.statistics.period()
    reported = [means[f"Losses/{name} Loss"] for name in names]
    assert reported == pytest.approx(losses, rel=1e-4)
    expected = {"Policy/Learning Rate": slow.rate, "Policy/Epsilon": EPSILON, "Policy/Beta": BETA}
    for tag, number in (expected | slow.statistics()).items():
        assert means[tag] == pytest.approx(number, rel=1e-3, abs=1e-6), tag
    pairs = zip(
        [*slow.policy.parameters(), *slow.critic.parameters()],
        [*fast.policy.parameters(), *fast.critic.parameters()],
        strict=True,
    )
    for expected, actual in pairs:
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=2e-6)
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-3, atol=2e-5)


def training_of(name: str, folder, **hyperparameters) -> Training:
    n_rows = 48 if name.startswith("ppo") else 60
    full_batch = {"num_epoch": N_EPOCHS, "batch_size": n_rows}
    return Training(name, folder, n_blocks=1, **full_batch, **hyperparameters)


def test_ppo_clips_changes_of_values_to_epsilon_standard_deviations_of_each_signals_returns(
    tmp_path,
):
    changes = {"learning_rate": 0.1, "epsilon": 0.2, "epsilon_schedule": "linear"}
    training = training_of("ppo, values clipped", tmp_path, **changes)
    slow, plain = SlowPPO(training), SlowPPO(training)
    slow.clips = True
    losses, otherwise = copy.deepcopy(slow).learn(), plain.learn()
    assert losses[1] > 1.05 * otherwise[1]
    assert_updates_agree(training, slow, ["Policy", "Value"])


OPTIONS = {
    "none": {},
    "recompute_advantages": {"recompute_advantages": True},
    "return_normalization": {"return_normalization": True},
    "a rate that falls": {"desired_kl": 1e-6},
    "a rate that rises": {"desired_kl": 1.0},
    "all": {"recompute_advantages": True, "return_normalization": True, "desired_kl": 1e-6},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["ppo, hybrid", "ppo, memory", "poca, hybrid"])
def test_losses_gradients_and_weights_equal_the_results_of_a_slow_implementation(
    name, option, tmp_path
):
    changes = OPTIONS[option]
    if "desired_kl" in changes:
        linear = {"beta_schedule": "linear", "epsilon_schedule": "linear"}
        changes = {"learning_rate_schedule": "constant", **linear, **changes}
    training = training_of(name, tmp_path, **changes)
    slow = (SlowPPO if name.startswith("ppo") else SlowPOCA)(training)
    slow.revalues = "recompute_advantages" in changes
    if "desired_kl" in changes:
        slow.rate *= 2
        slow.desired_kl = changes["desired_kl"]
    if "return_normalization" in changes:
        slow.earlier = np.random.default_rng(1).normal(2.0, 3.0, (40, len(slow.signals)))
        training.learner.algorithm.return_scale.add(slow.earlier)
    names = ["Policy", "Value"] if name.startswith("ppo") else ["Policy", "Value", "Baseline"]
    assert_updates_agree(training, slow, names)
