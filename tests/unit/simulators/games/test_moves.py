"""The state after given actions in a known state: a row for each rule of movement."""

import numpy as np
import pytest
from playing import now, put

from pipeline.core.specs import ActionTuple
from pipeline.simulators import registry
from pipeline.simulators.games import hallway, pong, pyramids, sorter

ANY = np.nan
"""Stands for a number that a row does not check."""
FAR = (9.0, 9.0)
N_AGENTS = {"pong": 2, "push_together": 3, "tag": 3}
USUAL = {
    "collector": {"position": (0, 0), "degrees": 0, "food": FAR, "places": FAR},
    "grid_world": {"agent": (2, 2), "goals": ((0, 0), (4, 4)), "wanted": 0},
    "pong": {"ball": (0, 0, 0.06, 0), "paddle": (0, 0)},
    "sorter": {"position": (0, 0), "heading": 0, "entities": 0, "waits": False},
    "push_together": {"block": 2, "pit": (1, 5), "open": True},
}
"""The state before the actions, except for the values of a row."""
SLANT = 0.5**0.5
SPEED, LIMIT = 0.1 * pong.SPEED_UP, pong.MAX_SPEED
BESIDE = ((1, 3), (0, 2), (4, 2))


def together(cells, actions, moves):
    """Three agents around the block at (1 to 3, 2), which two of them push."""
    after = {"block": 2 + moves, "group_reward": 0.25 * moves, "reward": 0}
    if moves:
        after["cell"] = [(ANY, 2), (ANY, 2), (ANY, ANY)]
    return "push_together", {"cell": cells}, [actions], after


SINE, COSINE = np.sin(np.radians(20)), np.cos(np.radians(20))
# A game, its state, the actions of each step (of all agents in order), and the state after them.
ROWS = [
    # collector: ahead, right and turn; fire. Each step halves the gap to the asked speed.
    *(("collector", {"degrees": degrees}, [(action, 0)] * n, {"position": share * np.array(way)})
      for n, share in ((1, 0.25), (2, 0.625))
      for degrees, action, way in (
          (0, (1, 0, 0), (0, 1)), (0, (0, 1, 0), (1, 0)), (90, (1, 0, 0), (1, 0)),
          (90, (0, -1, 0), (0, 1)), (0, (-0.5, 0, 0), (0, -0.5)), (0, (7, 0, 0), (0, 1)),
          (0, (1, 1, 0), (SLANT, SLANT)))),
    ("collector", {"degrees": 90}, [((1, 0, 0), 0)], {"obs_1": (0, 0.5, 1)}),  # its own frame
    ("collector", {"degrees": 90}, [((0, 1, 0), 0)], {"obs_1": (0.5, 0, 1)}),
    ("collector", {}, [((0, 0, 1), 0)], {"degrees": 20}),
    ("collector", {}, [((0, 0, 1), 0), ((0, 0, -1.5), 0)], {"degrees": 0}),
    ("collector", {"position": (0, 9.4)}, [((1, 0, 0), 0)] * 3, {"position": (0, 9.5)}),
    ("collector", {}, [((1, 0, 0), 1)], {"position": (0, 0.125)}),  # a shot halves the speed
    # grid_world: 0 nothing, 1 up, 2 down, 3 left, 4 right
    *(("grid_world", {}, [[action]], {"agent": cell, "reward": -0.01})
      for action, cell in enumerate([(2, 2), (1, 2), (3, 2), (2, 1), (2, 3)])),
    ("grid_world", {"agent": (0, 2), "goals": ((4, 4), (4, 0))}, [[1]], {"agent": (0, 2)}),
    # pong: 0 stays, 1 up, 2 down
    *(("pong", {}, [np.roll([action, 0], side)], {"paddle": np.roll([y, 0], side)})
      for action, y in ((0, 0.0), (1, 0.06), (2, -0.06)) for side in (0, 1)),
    ("pong", {"paddle": (0.79, -0.79)}, [[1, 2]], {"paddle": (0.8, -0.8)}),
    ("pong", {"ball": (0, 0.95, 0.08, 0.1)}, [[0, 0]], {"ball": (0.08, 0.95, 0.08, -0.1)}),
    *(("pong", {"ball": (0.95, y, 0.1, 0)}, [[0, 0]], {"ball": (1, y, -SPEED, slope * SPEED)})
      for y, slope in ((0.0, 0.0), (0.1, 0.5), (-0.2, -1.0))),
    ("pong", {"ball": (-0.9, 0, -LIMIT, 0)}, [[0, 0]], {"ball": (ANY, ANY, LIMIT, ANY)}),
    # push_together: 0 nothing, 1 up, 2 down, 3 left, 4 right
    *(("push_together", {"cell": ((0, 6), (0, 0), (4, 0))}, [[action, 0, 0]],
       {"cell": [cell, (ANY, ANY), (ANY, ANY)]})
      for action, cell in enumerate([(0, 6), (0, 6), (1, 6), (0, 5)])),
    together(((1, 1), (2, 1), (4, 4)), (4, 4, 0), moves=True),
    together(((3, 1), (3, 1), (4, 4)), (4, 4, 0), moves=True),
    together(((1, 1), (2, 1), (4, 4)), (4, 0, 0), moves=False),
    together(((1, 1), (2, 0), (4, 4)), (4, 4, 0), moves=False),
    together(((1, 1), (0, 1), (4, 4)), (4, 4, 0), moves=False),
    together(((1, 1), (2, 1), (3, 3)), (4, 4, 0), moves=False),
    together(((1, 3), (2, 3), (4, 4)), (3, 3, 0), moves=False),
    *(("push_together", {"cell": ((1, 3), (2, 3), (4, 0)), "block": 4, "open": is_open},
       [[4, 4, 0]], {"block": 4 if is_open else 5}) for is_open in (True, False)),
    ("push_together", {"cell": BESIDE}, [[3, 2, 1]], {"cell": BESIDE}),  # no agent enters the block
    # tag: the speeds of two hunters and of the runner, and the field
    ("tag", {"place": ((-0.5, 0), (-0.5, 0.5), (0.5, 0))}, [((0.25, 0), (3, 4), (0, 0.125))],
     {"place": ((-0.44, 0), (-0.464, 0.548), (0.5, 0.04))}),
    ("tag", {"place": ((-1, 0), (0, 1), (0.99, 0))}, [((-1, 0), (0, 1), (1, 0))],
     {"place": ((-1, 0), (0, 1), (1, 0))}),
    # hallway and pyramids: 0 nothing, 1 forward, 2 back, 3 to the right, 4 to the left
    *((name, {"position": place, "heading": heading}, [[action]],
       {"position": np.array(place) + ahead * np.array(way), "reward": -1 / module.MAX_STEP,
        "heading": (heading + turn) % module.N_HEADINGS})
      for name, module, place, heading, way in (
          ("hallway", hallway, (0, -4), 0, (0, 1)), ("pyramids", pyramids, (4, 4), 3, (1, 0)))
      for action, (ahead, turn) in enumerate([(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)])),
    ("hallway", {"position": (0, -4), "heading": 0}, [[3], [1]],
     {"obs_1": (SINE, COSINE, 0), "position": (SINE, -4 + COSINE)}),
    ("hallway", {"position": (0, -4), "heading": 9}, [[1]] * 5, {"position": (0, -5.5)}),
    ("hallway", {"position": (0, -5.5), "heading": 4}, [[1]] * 9, {"position": (3.5, ANY)}),
    # sorter: ahead (1 forward, 2 back), sideways (1 right, 2 left), turn (1 left, 2 right)
    *(("sorter", {}, [choices], {"position": place, "reward": -1 / sorter.MAX_STEP,
       "obs_1": (place[0] / 10, place[1] / 10, *compass)})
      for choices, place, compass in (
          ((0, 0, 0), (0, 0), (0, 1)), ((1, 0, 0), (0, 1), (0, 1)), ((2, 0, 0), (0, -1), (0, 1)),
          ((0, 1, 0), (1, 0), (0, 1)), ((0, 2, 0), (-1, 0), (0, 1)),
          ((1, 2, 0), (-SLANT, SLANT), (0, 1)), ((1, 0, 2), (SINE, COSINE), (SINE, COSINE)),
          ((1, 0, 1), (-SINE, COSINE), (-SINE, COSINE)))),
    ("sorter", {"position": (0, -9.5)}, [(2, 0, 0)], {"position": (0, -9.5)}),  # in the circle
]  # fmt: skip


def given(name, behaviors, action):
    """Return the actions of a step as an `ActionTuple` for each behavior."""
    if name == "collector":
        moves, fire = action
        made = [ActionTuple(np.float32([moves]), np.array([[fire]]))]
    elif name == "sorter":
        made = [ActionTuple(discrete=np.array([action]))]
    else:
        rows = np.array(action)
        parts = np.split(rows, [N_AGENTS[name] - 1]) if name in ("pong", "tag") else [rows]
        made = [
            ActionTuple(continuous=part) if name == "tag" else ActionTuple(discrete=part[:, None])
            for part in parts
        ]
    return dict(zip(behaviors, made, strict=True))


@pytest.mark.parametrize(("name", "state", "actions", "after"), ROWS)
def test_actions_change_the_state_as_the_rules_of_the_game_say(name, state, actions, after):
    simulator = registry.make(name, n_agents=N_AGENTS.get(name, 1))
    simulator.reset()
    put(simulator, **USUAL.get(name, {}) | state)
    for action in actions:
        steps = simulator.step(given(name, simulator.behavior_specs, action))
        assert not any(len(terminals) for _, terminals in steps.values())
    decisions = next(iter(steps.values()))[0]
    seen = {f"obs_{k}": obs for k, obs in enumerate(decisions.obs)} | vars(now(simulator))
    seen |= {"reward": decisions.reward, "group_reward": decisions.group_reward}
    for array, values in after.items():
        actual = seen[array] if "reward" in array else seen[array][:1]  # of the first area
        expected = np.broadcast_to(np.array(values, float), actual.shape)
        is_said = ~np.isnan(expected)
        assert actual[is_said] == pytest.approx(expected[is_said], abs=1e-5), array
