"""The environments that the tables are about: every built-in simulator, and some of others.

`environments.py` runs each, `interoperability.py` lets `mlagents-learn` train in each.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.simulators.pack import pack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One environment of the tables."""

    name: str
    """Built-in simulator, or `gymnasium:ID` or `pettingzoo:ID`."""
    exercises: str
    """Features of the trainer and of the wire that it needs."""
    configs: tuple[str, ...] = ()
    """Files in `config/`, those written for it; without one, a general one is used."""
    solved: str = ""
    """Mean return from which it counts as solved; Gymnasium's own threshold is looked up."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keywords of the simulator."""
    n_episodes: int = 600
    """Of each behavior, for the scores; fewer where an episode takes long."""

    @property
    def source(self) -> str:
        """Name in the registry."""
        return self.name.partition(":")[0]

    @property
    def env_id(self) -> str:
        """ID that the bridge runs; empty for a built-in simulator."""
        return self.name.partition(":")[2]

    @property
    def page(self) -> str:
        """The page that describes it."""
        return f"{self.source}.md"

    def threshold(self) -> str:
        """Return `solved`, or else the threshold of Gymnasium's registration."""
        if self.solved or self.source != "gymnasium":
            return self.solved
        import gymnasium

        threshold = gymnasium.spec(self.env_id).reward_threshold
        return "" if threshold is None else f"{threshold:g}"

    def build(self, folder: Path) -> Path:
        """Pack it into an executable in `folder`."""
        target = folder / self.name.replace(":", "-").replace("/", "-")
        keywords = {"id": self.env_id, **self.options} if self.env_id else self.options
        return pack(self.source, target, **keywords)


BUILT_IN = (
    Listed(
        name="balance_ball",
        exercises="continuous, curriculum",
        configs=("ppo/3DBall.yaml", "ppo/3DBall_curriculum.yaml"),
        solved="100",
    ),
    Listed(
        name="grid_world",
        exercises="visual, masks, goal signal",
        configs=("ppo/GridWorld.yaml",),
        solved="0.8",
    ),
    Listed(name="hallway", exercises="memory", configs=("ppo/Hallway.yaml",), solved="0.7"),
    Listed(
        name="pyramids",
        exercises="sparse reward: demonstrations, curiosity, RND",
        configs=("ppo/Pyramids.yaml", "ppo/PyramidsRND.yaml", "imitation/Pyramids.yaml"),
        solved="1.75",
    ),
    Listed(
        name="sorter",
        exercises="entities, curriculum, several branches",
        configs=("ppo/Sorter.yaml",),
        solved="9.45",
    ),
    Listed(
        name="collector",
        exercises="hybrid actions, masks",
        configs=("ppo/FoodCollector.yaml",),
        solved="10",
    ),
    Listed(
        name="couriers",
        exercises="asynchronous decisions, masks, agents that come and go",
        configs=("ppo/Couriers.yaml",),
        solved="11.5",
    ),
    Listed(
        name="pong",
        exercises="symmetric competition",
        configs=("ppo/Pong.yaml",),
        solved="0 against the scripted player",
    ),
    Listed(
        name="push_together",
        exercises="group reward, agents that leave their group",
        configs=("poca/PushTogether.yaml",),
        solved="1.2",
        n_episodes=6000,
    ),
    Listed(
        name="tag",
        exercises="asymmetric competition, several behaviors, continuous, group reward",
        configs=("ppo/Tag.yaml",),
        solved="0 against the scripted side",
    ),
)
BRIDGED = (
    Listed(
        name="gymnasium:CartPole-v1",
        exercises="discrete",
        configs=("ppo/CartPole.yaml",),
    ),
    Listed(
        name="gymnasium:Pendulum-v1",
        exercises="continuous, never terminated",
        configs=("ppo/Pendulum.yaml",),
    ),
    Listed(name="gymnasium:LunarLander-v3", exercises="discrete, physics by Box2D"),
    Listed(
        name="gymnasium:Hopper-v5",
        exercises="continuous, physics by MuJoCo",
        configs=("ppo/Hopper.yaml",),
    ),
    Listed(
        name="gymnasium:CarRacing-v3",
        exercises="visual (96 x 96, colour), continuous",
        options={"n_agents": 1},
        n_episodes=5,
    ),
    Listed(name="gymnasium:Taxi-v4", exercises="masks, one-hot observation"),
    Listed(
        name="pettingzoo:classic.tictactoe_v3",
        exercises="turns, masks, symmetric competition",
        options={"teams": "index"},
    ),
    Listed(
        name="pettingzoo:mpe2.simple_tag_v3",
        exercises="several behaviors, asymmetric competition",
    ),
    Listed(
        name="pettingzoo:butterfly.knights_archers_zombies_v11",
        exercises="several behaviors, agents that drop out",
        n_episodes=100,
    ),
)
ALL = BUILT_IN + BRIDGED


def chosen(names: Sequence[str]) -> tuple[Listed, ...]:
    """Return the environments called `names`, or all if there are none.

    An unknown name ends the program with a list of the choices.
    """
    known = {listed.name: listed for listed in ALL}
    for name in names:
        if name not in known:
            sys.exit(f"unknown environment '{name}'; choose among {', '.join(known)}")
    return tuple(known[name] for name in names) or ALL
