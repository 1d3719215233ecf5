"""Small environments with a known best policy, which is learned within seconds."""

import numpy as np
from steps import decision_steps, terminal_steps

from pipeline.core.specs import ActionSpec, BehaviorSpec, ObservationSpec, ObservationType
from pipeline.core.steps import TerminalSteps

NAME = "Toy"
BEHAVIOR = f"{NAME}?team=0"


class Environment:
    """Base of environments that keep their state in arrays and in the stream `rng`."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.parameters: dict[str, float] = {}
        self.is_closed = False

    def set_parameter(self, name, value):
        self.parameters[name] = value

    def close(self):
        self.is_closed = True

    def state_dict(self):
        arrays = {name: value for name, value in vars(self).items() if type(value) is np.ndarray}
        plain = {"rng": self.rng.bit_generator.state, "parameters": dict(self.parameters)}
        return {**plain, **{k: v.copy() for k, v in arrays.items()}}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.parameters = dict(state["parameters"])
        for name in state.keys() - {"rng", "parameters"}:
            setattr(self, name, state[name].copy())


class Toy(Environment):
    """N agents with ids 0 to N - 1; episodes end by termination or after `length` decisions.

    A subclass defines `spec`; `begin`, which draws new situations for agents; `observe`, which
    returns the observations [N, *shape]; and `advance`, which applies the actions of all agents,
    and returns rewards [N] and whether each task ended [N].
    """

    spec: BehaviorSpec
    length = 4

    def __init__(self, *, seed: int = 0, n_agents: int = 16) -> None:
        super().__init__(np.random.default_rng([seed, 77]))
        self.n = n_agents
        self.ids = np.arange(n_agents, dtype=np.int32)
        self.age = np.zeros(n_agents, dtype=np.int64)

    @property
    def behavior_specs(self):
        return {BEHAVIOR: self.spec}

    def reset(self):
        self._begin(np.arange(self.n))
        return {BEHAVIOR: (self._decisions(np.zeros(self.n)), TerminalSteps.empty(self.spec))}

    def step(self, actions):
        reward, terminated = self.advance(actions[BEHAVIOR])
        self.age += 1
        ended = np.flatnonzero(terminated | (self.age >= self.length))
        terminal = terminal_steps(
            [values[ended] for values in self.observe()],
            self.ids[ended],
            interrupted=~terminated[ended],
            reward=reward[ended],
        )
        self._begin(ended)
        reward = np.where(np.isin(self.ids, ended), 0.0, reward)
        return {BEHAVIOR: (self._decisions(reward), terminal)}

    def masks(self):
        """Return action masks [N, L] per branch, True where forbidden."""
        branches = self.spec.action_spec.discrete_branches
        return [np.zeros((self.n, size), dtype=np.bool_) for size in branches] or None

    def _begin(self, rows):
        self.age[rows] = 0
        self.begin(rows)

    def _decisions(self, reward):
        return decision_steps(self.observe(), self.ids, masks=self.masks(), reward=reward)


class Chase(Toy):
    """Continuous: steer a drifting point to the middle. Best return about -0.5."""

    spec = BehaviorSpec([ObservationSpec.vector(4)], ActionSpec.create_continuous(2))
    length = 12

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.position = np.zeros((self.n, 2))
        self.velocity = np.zeros((self.n, 2))

    def begin(self, rows):
        self.position[rows] = self.rng.uniform(-1, 1, (len(rows), 2))
        self.velocity[rows] = self.rng.uniform(-0.1, 0.1, (len(rows), 2))

    def observe(self):
        return [np.concatenate((self.position, self.velocity), axis=1)]

    def advance(self, action):
        self.position += 0.5 * action.continuous + self.velocity
        distance = np.abs(self.position).mean(axis=1)
        return -np.minimum(distance, 2.0), np.zeros(self.n, dtype=np.bool_)


class Corridor(Toy):
    """Discrete: walk five cells to the right; reward only at the end. Best return 0.96."""

    spec = BehaviorSpec([ObservationSpec.vector(6)], ActionSpec.create_discrete([3]))
    length = 24

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.cell = np.zeros(self.n, dtype=np.int64)

    def begin(self, rows):
        self.cell[rows] = 0

    def observe(self):
        return [np.eye(6)[self.cell]]

    def advance(self, action):
        self.cell = np.clip(self.cell + action.discrete[:, 0] - 1, 0, 5)
        arrived = self.cell == 5
        return np.where(arrived, 1.0, -0.01), arrived


class Both(Toy):
    """Hybrid: answer with a choice whether x is positive, and with a number the value of x.

    Each of four answers gives up to 1; a wrong choice costs 0.5, and so does an error of 1.
    """

    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_hybrid(1, [2]))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.x = np.zeros((self.n, 1))

    def begin(self, rows):
        self.x[rows] = self.rng.uniform(-1, 1, (len(rows), 1))

    def observe(self):
        return [self.x]

    def advance(self, action):
        right = action.discrete[:, 0] == (self.x[:, 0] > 0)
        off = np.abs(action.continuous[:, 0] - self.x[:, 0])
        self.begin(np.arange(self.n))
        return 0.5 * right + 0.5 * (1.0 - off), np.zeros(self.n, dtype=np.bool_)


class Quadrant(Toy):
    """Visual: answer the quarter of a 20 x 20 image with the bright spot. Best return 4."""

    spec = BehaviorSpec([ObservationSpec.visual(3, 20, 20)], ActionSpec.create_discrete([4]))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.where = np.zeros((self.n, 2), dtype=np.int64)

    def begin(self, rows):
        quarters = self.rng.integers(0, 2, (len(rows), 2))
        self.where[rows] = quarters * 10 + self.rng.integers(0, 6, (len(rows), 2))

    def observe(self):
        image = np.zeros((self.n, 3, 20, 20))
        for agent, (row, column) in enumerate(self.where):
            image[agent, agent % 3, row : row + 4, column : column + 4] = 1.0
        return [image]

    def advance(self, action):
        quarter = self.where // 10
        right = action.discrete[:, 0] == 2 * quarter[:, 0] + quarter[:, 1]
        self.begin(np.arange(self.n))
        return right.astype(float), np.zeros(self.n, dtype=np.bool_)


class Forbidden(Toy):
    """Masked discrete: the largest allowed choice has the largest reward. Best return 4.

    The mask is not observed, so that a good policy has to rank the choices. A forbidden choice
    raises an error.
    """

    spec = BehaviorSpec([ObservationSpec.vector(1)], ActionSpec.create_discrete([5]))

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.mask = np.zeros((self.n, 5), dtype=np.bool_)

    def begin(self, rows):
        ranks = self.rng.random((len(rows), 5)).argsort(axis=1)
        self.mask[rows] = ranks < self.rng.integers(0, 5, (len(rows), 1))

    def observe(self):
        return [np.ones((self.n, 1))]

    def masks(self):
        return [self.mask.copy()]

    def advance(self, action):
        choice = action.discrete[:, 0]
        if self.mask[np.arange(self.n), choice].any():
            raise ValueError("a forbidden action was taken")
        best = 4 - np.argmin(self.mask[:, ::-1], axis=1)
        self.begin(np.arange(self.n))
        return 1.0 - (best - choice) / 4, np.zeros(self.n, dtype=np.bool_)


class Wish(Toy):
    """Goal signal: answer whether the selected one of two numbers is positive. Best return 4."""

    spec = BehaviorSpec(
        [ObservationSpec.vector(2), ObservationSpec.vector(2, "goal", ObservationType.GOAL_SIGNAL)],
        ActionSpec.create_discrete([2]),
    )

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.x = np.zeros((self.n, 2))
        self.wish = np.zeros(self.n, dtype=np.int64)

    def begin(self, rows):
        self.x[rows] = self.rng.uniform(-1, 1, (len(rows), 2))
        self.wish[rows] = self.rng.integers(0, 2, len(rows))

    def observe(self):
        return [self.x, np.eye(2)[self.wish]]

    def advance(self, action):
        right = action.discrete[:, 0] == (self.x[np.arange(self.n), self.wish] > 0)
        self.begin(np.arange(self.n))
        return right.astype(float), np.zeros(self.n, dtype=np.bool_)


MOOD = BehaviorSpec([ObservationSpec.vector(3)], ActionSpec.create_continuous(1))
CHOICE = BehaviorSpec([ObservationSpec.vector(2)], ActionSpec.create_discrete([3]))


class Crowd:
    """Agents of two behaviors that join and leave, and the experience that a trainer should count.

    Every agent has its own id, requests a decision in about two of three steps, and leaves with a
    terminal step that is interrupted in half of the cases. At times there are no agents of
    `Choice`. Some agents disappear without a terminal step. `expected` has the sent experience by
    behavior.
    """

    def __init__(self, *, seed: int = 0, horizon: int = 8, n_agents: int = 6) -> None:
        self.rng = np.random.default_rng([seed, 78])
        self.behavior_specs = {"Mood?team=0": MOOD, "Choice?team=0": CHOICE}
        self.horizon = horizon
        self.n_agents = n_agents
        self.next_id = 0
        self.alive: dict[str, dict[int, Life]] = {name: {} for name in self.behavior_specs}
        self.asked: dict[str, list[int]] = {name: [] for name in self.behavior_specs}
        self.expected = {name: Expected() for name in self.behavior_specs}
        self.n_steps = self.n_empty = 0
        self.is_closed = False

    def reset(self):
        return self._steps()

    def step(self, actions):
        assert set(actions) == {name for name, agent_ids in self.asked.items() if agent_ids}
        for name, action in actions.items():
            n_rows = len(self.asked[name])
            assert len(action.continuous) == len(action.discrete) == n_rows
        self.n_steps += 1
        return self._steps()

    def set_parameter(self, name, value):
        raise AssertionError((name, value))

    def close(self):
        self.is_closed = True

    def _steps(self):
        self.n_empty += self.n_steps % 5 == 4
        if self.n_steps % 5 == 4:  # no agents in this message
            self.asked = {name: [] for name in self.behavior_specs}
            return {}
        return {name: self._behavior(name, spec) for name, spec in self.behavior_specs.items()}

    def _behavior(self, name, spec):
        alive, expected = self.alive[name], self.expected[name]
        ended = [agent for agent in alive if self.rng.random() < 0.1]
        reward = {agent: round(float(self.rng.normal()), 3) for agent in alive}
        interrupted = self.rng.random(len(ended)) < 0.5
        for agent in ended:
            life = alive.pop(agent)
            life.outcome(reward[agent])
            expected.ended(life, reward[agent])
        for agent in [agent for agent in alive if self.rng.random() < 0.005]:
            expected.left.append(alive.pop(agent))
        n_alive = self.n_agents if name.startswith("Mood") or self.n_steps % 40 < 30 else 0
        while len(alive) < n_alive:
            alive[self.next_id] = Life()
            self.next_id += 1
        asking = [agent for agent in alive if self.rng.random() < 0.66]
        for agent in asking:
            alive[agent].outcome(reward.get(agent, 0.0))
            alive[agent].waits = True
        self.asked[name] = asking
        obs = self._obs(spec, asking)
        masks = [self.rng.random((len(asking), 3)) < 0.3] if spec is CHOICE else None
        rewards = [reward.get(agent, 0.0) for agent in asking]
        decisions = decision_steps(obs, asking, masks=masks, reward=rewards)
        obs, rewards = self._obs(spec, ended), [reward[agent] for agent in ended]
        return decisions, terminal_steps(obs, ended, interrupted=interrupted, reward=rewards)

    def _obs(self, spec, agents):
        size = spec.observation_specs[0].shape[0]
        return [self.rng.normal(size=(len(agents), size)).astype(np.float32)]


class Life:
    """Number of an agent's experiences, and the return so far."""

    def __init__(self) -> None:
        self.waits = False
        self.n = 0
        self.total = 0.0

    def outcome(self, reward):
        if self.waits:
            self.n += 1
            self.total += reward
        self.waits = False


class Expected:
    """Experience of one behavior that a trainer should have counted."""

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.left: list[Life] = []

    def ended(self, life, reward):
        if not life.n:  # without a decision the last reward is the return
            life.total = reward
        self.lives.append(life)

    def n_steps(self, horizon, alive):
        cut = [*self.left, *alive]
        return sum(life.n for life in self.lives) + sum(life.n // horizon * horizon for life in cut)
