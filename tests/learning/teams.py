"""Toys for teams: rewards belong to the group, so that learning must find who earned them."""

import numpy as np
from steps import decision_steps, terminal_steps
from toys import BEHAVIOR, Toy

from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec, ObservationSpec
from pipeline.core.steps import TerminalSteps


class Teamed:
    """A toy's agents in groups of three, which get the mean of their rewards as group reward.

    An agent with an ended episode waits for the ends of its mates' episodes; then all begin again.
    """

    size = 3

    def __init__(self, toy: type[Toy], *, seed: int = 0, n_agents: int = 24) -> None:
        self.toy = toy(seed=seed, n_agents=n_agents)
        self.n = n_agents
        self.team = np.arange(n_agents) // self.size
        self.playing = np.ones(n_agents, dtype=np.bool_)
        self.spec = self.toy.spec
        self.parameters: dict[str, float] = {}

    @property
    def behavior_specs(self):
        return self.toy.behavior_specs

    def reset(self):
        self.playing[:] = True
        self.toy.reset()
        return self._steps(np.zeros(self.n), np.zeros(self.n, bool), np.zeros(self.n, bool), None)

    def step(self, actions):
        playing_action = actions[BEHAVIOR]
        action = ActionTuple(
            np.zeros((self.n, playing_action.continuous.shape[1]), np.float32),
            np.zeros((self.n, playing_action.discrete.shape[1]), np.int32),
        )
        action.continuous[self.playing] = playing_action.continuous
        action.discrete[self.playing] = playing_action.discrete
        before = self.playing.copy()
        reward, terminated = self.toy.advance(action)
        self.toy.age += 1
        gain = np.bincount(self.team, weights=reward * before) / self.size
        late = self.toy.age >= self.toy.length
        ended = before & (terminated | late)
        last = [values[ended].astype(np.float32) for values in self.toy.observe()]
        self.playing &= ~ended
        over = np.flatnonzero(np.bincount(self.team, weights=self.playing) == 0)
        restarting = np.isin(self.team, over)
        self.toy._begin(np.flatnonzero(restarting))
        self.playing |= restarting
        return self._steps(
            gain[self.team] * ~restarting, ended, terminated, (last, gain[self.team])
        )

    def set_parameter(self, name, value):
        self.parameters[name] = value

    def close(self):
        self.toy.close()

    def _steps(self, gain, ended, terminated, last):
        terminal = TerminalSteps.empty(self.spec)
        if ended.any():
            obs, gained = last
            terminal = terminal_steps(
                obs,
                self.toy.ids[ended],
                interrupted=~terminated[ended],
                group_id=self.team[ended] + 1,
                group_reward=gained[ended],
            )
        playing = self.playing
        masks = self.toy.masks()
        asking = decision_steps(
            [values[playing] for values in self.toy.observe()],
            self.toy.ids[playing],
            masks=None if masks is None else [mask[playing] for mask in masks],
            group_id=self.team[playing] + 1,
            group_reward=gain[playing],
        )
        return {BEHAVIOR: (asking, terminal)}


class Door:
    """Groups of three: one agent can open a door for its mates, which ends its own episode.

    While the door is shut, the agent with the key may use it (action 1 of 3), which costs the agent
    0.2 and ends its episode. With an open door the others observe a sign, and the group gains 0.5
    for each agent that answers it (actions 1 and 2). While the door is shut, a step gives 0.1.
    Episodes end after 8 decisions. The best return of the group is 7, if the key is used at once;
    it is 0.8 if the key is never used.
    """

    spec = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_discrete([3]))
    length, size = 8, 3
    price, shut, answered = -0.2, 0.1, 0.5

    def __init__(self, *, seed: int = 0, n_agents: int = 24) -> None:
        self.rng = np.random.default_rng([seed, 78])
        self.n_teams = n_agents // self.size
        shape = self.n_teams, self.size
        self.holder = np.zeros(self.n_teams, dtype=np.int64)
        self.open = np.zeros(self.n_teams, dtype=np.bool_)
        self.sign = np.zeros(shape, dtype=np.int64)
        self.inside = np.ones(shape, dtype=np.bool_)
        self.age = 0
        self.parameters: dict[str, float] = {}

    @property
    def behavior_specs(self):
        return {BEHAVIOR: self.spec}

    def reset(self):
        self._begin()
        none = np.zeros_like(self.inside)
        return self._steps(none.astype(float), none.astype(float), none, None)

    def step(self, actions):
        choice = np.zeros(self.inside.shape, dtype=np.int64)
        choice[self.inside] = actions[BEHAVIOR].discrete[:, 0]
        is_holder = np.arange(self.size) == self.holder[:, None]
        right = self.inside & (choice == self.sign + 1)
        gain = np.where(self.open, self.answered * right.sum(1), self.shut)
        uses = is_holder & self.inside & ~self.open[:, None] & (choice == 1)
        self.age += 1
        over = self.age == self.length
        ended = (uses | over) & self.inside
        reward = np.where(uses, self.price, 0.0)
        gained = np.repeat(gain[:, None], self.size, axis=1)
        self.open |= uses.any(1)
        self.inside &= ~uses
        self.sign = self.rng.integers(0, 2, self.sign.shape)
        last = self._observe()[ended], reward[ended], gained[ended]
        if over:
            self._begin()
            reward, gained = np.zeros_like(reward), np.zeros_like(gained)
        return self._steps(reward, gained, ended, last)

    def set_parameter(self, name, value):
        self.parameters[name] = value

    def close(self):
        pass

    def _begin(self):
        self.holder = self.rng.integers(0, self.size, self.n_teams)
        self.open[:] = False
        self.inside[:] = True
        self.age = 0
        self.sign = self.rng.integers(0, 2, self.sign.shape)

    def _observe(self):
        is_holder = np.arange(self.size) == self.holder[:, None]
        is_open = np.repeat(self.open[:, None], self.size, axis=1)
        sign = np.where(is_open, 2.0 * self.sign - 1.0, 0.0)
        return np.stack((is_holder, is_open, sign), axis=2).astype(np.float32)

    def _steps(self, reward, gained, ended, last):
        terminal = TerminalSteps.empty(self.spec)
        if last is not None and ended.any():
            obs, agent_reward, group = last
            teams = np.nonzero(ended)[0] + 1
            rewards = {"reward": agent_reward, "group_reward": group}
            terminal = terminal_steps([obs], np.flatnonzero(ended), group_id=teams, **rewards)
        inside = self.inside
        asking = decision_steps(
            [self._observe()[inside]],
            np.flatnonzero(inside),
            masks=[np.zeros((int(inside.sum()), 3), dtype=np.bool_)],
            reward=reward[inside],
            group_id=np.nonzero(inside)[0] + 1,
            group_reward=gained[inside],
        )
        return {BEHAVIOR: (asking, terminal)}
