"""Episodes of built-in simulators for tests: who plays, what was returned, and what was seen."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from pipeline.protocol.specs import ActionTuple
from pipeline.simulators import registry


def uniform(spec, rng):
    """A policy that chooses among what is allowed, each alike."""

    def act(decisions):
        action = spec.action_spec.random_action(len(decisions), rng)
        if not decisions.action_mask:
            return action
        draws = [np.where(mask, -1.0, rng.random(mask.shape)) for mask in decisions.action_mask]
        chosen = np.stack([draw.argmax(axis=1) for draw in draws], axis=1)
        return ActionTuple(action.continuous, chosen)

    return act


def policies(name, simulator, *, scripted=(), seed=0):
    """A policy per behavior: the expert of those in `scripted`, a uniform one for the others."""
    rng = np.random.default_rng(seed)
    return {
        behavior: registry.expert(name, behavior) if behavior in scripted else uniform(spec, rng)
        for behavior, spec in simulator.behavior_specs.items()
    }


def step(simulator, *choices):
    """What one step of a game with one behavior brings; the choices are those of all agents."""
    ((behavior, spec),) = simulator.behavior_specs.items()
    discrete = np.array(choices).reshape(-1, spec.action_spec.discrete_size)
    return simulator.step({behavior: ActionTuple(discrete=discrete)})[behavior]


def walk(simulator, *choices):
    """What the last of several steps brings, in each of which every agent does the same."""
    for choice in choices:
        brought = step(simulator, *[choice] * len(simulator.state_dict()["streams"]))
    return brought


def now(simulator):
    """Copies of the arrays that are a game's state."""
    return SimpleNamespace(**simulator.state_dict()["arrays"])


def put(simulator, **values):
    """Fill these arrays of a game's state, and give the game."""
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
    """Per behavior [n, 4]: own and group return, decisions and interrupted of every agent."""
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
    """Tag of each ray of one agent, -1 for none, and its distance."""
    values = obs.reshape(-1, n_tags + 2)
    tag = np.where(values[:, n_tags] == 1, -1, values[:, :n_tags].argmax(axis=1))
    return tag.tolist(), values[:, -1] * length


def rows_of(steps):
    """Everything that a step says, one array per agent and kind of step."""
    rows = []
    for behavior, (decisions, terminals) in steps.items():
        for one in (decisions, terminals):
            if not len(one):
                continue
            columns = [*one.obs, one.reward, one.agent_id, one.group_id, one.group_reward]
            columns += [one.interrupted] if one is terminals else one.action_mask or []
            flat = [column.reshape(len(one), -1).astype(np.float64) for column in columns]
            rows.append((behavior, type(one).__name__, np.concatenate(flat, axis=1).tolist()))
    return rows


def trajectory(simulator, by, n_steps, steps=None):
    """What `n_steps` steps say, after `steps` or from a reset, and the last of them."""
    steps = simulator.reset() if steps is None else steps
    seen = [rows_of(steps)]
    for _ in range(n_steps):
        steps = simulator.step(acted(steps, by))
        seen.append(rows_of(steps))
    return seen, steps
