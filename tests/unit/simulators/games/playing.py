"""Episodes of built-in simulators for tests: their policies, returns and observations."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from pipeline.core.specs import ActionTuple
from pipeline.simulators import registry


def uniform(spec, rng):
    """Return a policy that draws uniformly among the allowed actions."""

    def act(decisions):
        action = spec.action_spec.random_action(len(decisions), rng)
        if not decisions.action_mask:
            return action
        draws = [np.where(mask, -1.0, rng.random(mask.shape)) for mask in decisions.action_mask]
        chosen = np.stack([draw.argmax(axis=1) for draw in draws], axis=1)
        return ActionTuple(action.continuous, chosen)

    return act


def policies(name, simulator, *, scripted=(), seed=0):
    """Return a policy per behavior: the expert for behaviors in `scripted`, else a random one."""
    rng = np.random.default_rng(seed)
    return {
        behavior: registry.expert(name, behavior) if behavior in scripted else uniform(spec, rng)
        for behavior, spec in simulator.behavior_specs.items()
    }


def step(simulator, *choices):
    """Step a game with one behavior; return its steps. `choices` are the actions of all agents."""
    ((behavior, spec),) = simulator.behavior_specs.items()
    discrete = np.array(choices).reshape(-1, spec.action_spec.discrete_size)
    return simulator.step({behavior: ActionTuple(discrete=discrete)})[behavior]


def walk(simulator, *choices):
    """Step once for each choice, which every agent makes; return the last result."""
    for choice in choices:
        result = step(simulator, *[choice] * len(simulator.state_dict()["streams"]))
    return result


def now(simulator):
    """Return copies of the arrays of a game's state."""
    return SimpleNamespace(**simulator.state_dict()["arrays"])


def put(simulator, **values):
    """Fill these arrays of a game's state, and return the game."""
    state = simulator.state_dict()
    for name, value in values.items():
        state["arrays"][name][:] = value
    simulator.load_state_dict(state)
    return simulator


def begun(kind, n_agents=1, **options):
    simulator = kind(n_agents=n_agents, **options)
    simulator.reset()
    return simulator


def acted(steps, by):
    return {name: by[name](decisions) for name, (decisions, _) in steps.items()}


def returns(name, *scripted, episodes, seed=0):
    """Return [n, 4] by behavior: own return, group return, decisions and interrupted by agent."""
    simulator = registry.make(name, seed=seed)
    by = policies(name, simulator, scripted=scripted)
    steps = simulator.reset()
    running = defaultdict(lambda: np.zeros(3))
    ended = {behavior: [] for behavior in steps}
    while True:
        for behavior, (decisions, terminals) in steps.items():
            for row, agent in enumerate(terminals.agent_id.tolist()):
                running[agent] += (terminals.reward[row], terminals.group_reward[row], 0)
                ended[behavior].append((*running.pop(agent), terminals.interrupted[row]))
            for row, agent in enumerate(decisions.agent_id.tolist()):
                running[agent] += (decisions.reward[row], decisions.group_reward[row], 1)
        if min(map(len, ended.values())) >= episodes:
            return {behavior: np.array(rows, dtype=float) for behavior, rows in ended.items()}
        steps = simulator.step(acted(steps, by))


def sights(obs, n_tags, length):
    """Return the tag of each ray of one agent, -1 for none, and the distances."""
    values = obs.reshape(-1, n_tags + 2)
    tag = np.where(values[:, n_tags] == 1, -1, values[:, :n_tags].argmax(axis=1))
    return tag.tolist(), values[:, -1] * length


def rows_of(steps):
    """Return everything in a game's steps, one array per behavior and kind of step."""
    rows = []
    for behavior, (decisions, terminals) in steps.items():
        for batch in (decisions, terminals):
            if not len(batch):
                continue
            columns = [*batch.obs, batch.reward, batch.agent_id, batch.group_id, batch.group_reward]
            columns += [batch.interrupted] if batch is terminals else batch.action_mask or []
            flat = [column.reshape(len(batch), -1).astype(np.float64) for column in columns]
            rows.append((behavior, type(batch).__name__, np.concatenate(flat, axis=1).tolist()))
    return rows


def trajectory(simulator, by, n_steps, steps=None):
    """Return the rows of `n_steps` steps, after `steps` or a reset, and the last steps."""
    steps = simulator.reset() if steps is None else steps
    seen = [rows_of(steps)]
    for _ in range(n_steps):
        steps = simulator.step(acted(steps, by))
        seen.append(rows_of(steps))
    return seen, steps
