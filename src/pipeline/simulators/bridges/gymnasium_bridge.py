"""Any environment that is registered with Gymnasium, in several copies, as one simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.protocol.parameters import Parameters
from pipeline.protocol.specs import ActionTuple, BehaviorSpec
from pipeline.protocol.steps import DecisionSteps, TerminalSteps
from pipeline.seeding import derive
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.spaces import Actions, Observations
from pipeline.simulators.bridges.states import copy_state, restore_copy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.arrays import AnyArray, BoolArray, FloatArray
    from pipeline.protocol.steps import Steps


class GymnasiumSimulator:
    """Copies of one environment, stepped together; each begins anew when its episode has ended.

    An episode that `terminated` ends with a terminal step, one that was `truncated` with an
    interrupted one, both with the environment's last observation. Environment parameters, when the
    trainer sends any, are the `options` of each following `reset`.

    Args:
        id: as Gymnasium knows it, or `module:id` for a module to import first; or the copies
            themselves, which are called by their id, or by their class without one.
        kwargs: keywords for the environment, and for `gymnasium.make`.
        seed: copy k is seeded once, from this and k; later episodes continue its generator.
        n_agents: number of copies.
        visual: one of `spaces.VISUAL`.
        action_scale: what an action of 1 means where a Box has no finite bounds.
        render_mode: `rgb_array` for copies that can be drawn; None draws nothing.

    Raises:
        SettingsError: The environment cannot be made, or one of its spaces cannot be carried.
    """

    def __init__(
        self,
        *,
        id: str | Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        n_agents: int = 1,
        visual: str = "auto",
        action_scale: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.parameters = Parameters()
        if isinstance(id, str):
            self._envs = [make_environment(id, kwargs or {}, render_mode) for _ in range(n_agents)]
        else:
            self._envs, n_agents = list(id), len(id)
            spec = self._envs[0].spec
            id = type(self._envs[0].unwrapped).__name__ if spec is None else str(spec.id)
        first = self._envs[0]
        self._observations = Observations(first.observation_space, where=id, visual=visual)
        self._actions = Actions(first.action_space, where=id, scale=action_scale)
        self._where = id
        self._behavior = f"{naming.behavior_name(id)}?team=0"
        self._specs = {
            self._behavior: BehaviorSpec(self._observations.specs, self._actions.spec),
        }
        self._seeds: list[int | None] = [derive(seed, "gymnasium", row) for row in range(n_agents)]
        self._agent_id = np.arange(n_agents, dtype=np.int32)
        self._no_group = np.zeros(n_agents, dtype=np.int32)
        self._no_reward = np.zeros(n_agents, dtype=np.float32)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """The one behavior, named after the id."""
        return self._specs

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every copy."""
        n_agents = len(self._envs)
        obs, forbidden = self._observations.empty(n_agents), None
        for row in range(n_agents):
            forbidden = self._begin(row, obs, forbidden)
        decisions = self._decisions(obs, self._no_reward.copy(), forbidden)
        return {self._behavior: (decisions, TerminalSteps.empty(self._specs[self._behavior]))}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Step every copy once.

        Raises:
            ValueError: The number of actions is not that of copies.
            UnityObservationException: An observation does not fit its space.
        """
        n_agents = len(self._envs)
        native = self._actions.native(actions[self._behavior])
        obs, forbidden = self._observations.empty(n_agents), None
        reward = np.zeros(n_agents, dtype=np.float32)
        rows: list[int] = []
        interrupted: list[bool] = []
        last: list[list[FloatArray]] = []
        for row, (env, action) in enumerate(zip(self._envs, native, strict=True)):
            observation, reward[row], terminated, truncated, info = env.step(action)
            if terminated or truncated:
                rows.append(row)
                # An episode that ended in both ways has ended: there is nothing left to
                # bootstrap from.
                interrupted.append(not terminated)
                # Written before the copy begins anew, because environments may reuse their
                # arrays.
                last.append(self._observations.empty(1))
                self._observations.put(last[-1], 0, observation)
                forbidden = self._begin(row, obs, forbidden)
            else:
                self._observations.put(obs, row, observation)
                forbidden = self._forbid(row, info, forbidden)
        terminals = self._terminals(np.array(rows, dtype=np.int64), reward, interrupted, last)
        # The reward belonged to the last step of the old episode; the new one begins without
        # any.
        reward[rows] = 0.0
        return {self._behavior: (self._decisions(obs, reward, forbidden), terminals)}

    def set_parameter(self, name: str, value: float) -> None:
        """Set one of the `options` of the resets from now on."""
        self.parameters.set_value(name, value)

    def render(self, agent: int) -> AnyArray:
        """Return a picture of an agent's copy."""
        from pipeline.simulators.bridges.pictures import picture

        return picture(self._envs[agent], self._where)

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None where a copy does not give it."""
        copies = []
        for env in self._envs:
            copies.append(copy_state(env))
            if copies[-1] is None:
                return None
        begun = [seed is None for seed in self._seeds]
        return {"copies": copies, "begun": begun, "parameters": self.parameters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.parameters.load_state_dict(state["parameters"])
        for row, (env, saved) in enumerate(zip(self._envs, state["copies"], strict=True)):
            env.reset()  # wrappers refuse to step before one
            restore_copy(env, saved)
            # A copy that had begun must not be seeded again.
            if state["begun"][row]:
                self._seeds[row] = None

    def close(self) -> None:
        """Close every copy."""
        for env in self._envs:
            env.close()

    def _begin(
        self, row: int, obs: list[FloatArray], forbidden: BoolArray | None
    ) -> BoolArray | None:
        # Gymnasium's rule: seeded once, later episodes continue the environment's own generator.
        seed, self._seeds[row] = self._seeds[row], None
        options = self.parameters.values() or None
        observation, info = self._envs[row].reset(seed=seed, options=options)
        self._observations.put(obs, row, observation)
        return self._forbid(row, info, forbidden)

    def _forbid(
        self, row: int, info: Mapping[str, Any], forbidden: BoolArray | None
    ) -> BoolArray | None:
        """`forbidden` [N, choices] with this copy's mask, made when the first copy has one."""
        mask = info.get("action_mask")
        branches = self._actions.spec.discrete_branches
        if mask is None or not branches:
            return forbidden
        # Made late: environments without masks send none, and the policy then skips masking.
        if forbidden is None:
            forbidden = np.zeros((len(self._envs), sum(branches)), dtype=np.bool_)
        forbidden[row] = self._actions.forbidden(mask)
        return forbidden

    def _decisions(
        self, obs: list[FloatArray], reward: FloatArray, forbidden: BoolArray | None
    ) -> DecisionSteps:
        masks = None if forbidden is None else self._actions.masks(forbidden)
        return DecisionSteps(obs, reward, self._agent_id, masks, self._no_group, self._no_reward)

    def _terminals(
        self,
        rows: AnyArray,
        reward: FloatArray,
        interrupted: list[bool],
        last: list[list[FloatArray]],
    ) -> TerminalSteps:
        if not len(rows):
            return TerminalSteps.empty(self._specs[self._behavior])
        return TerminalSteps(
            obs=[np.concatenate(leaf) for leaf in zip(*last, strict=True)],
            reward=reward[rows],
            interrupted=np.array(interrupted),
            agent_id=self._agent_id[rows],
            group_id=self._no_group[rows],
            group_reward=self._no_reward[rows],
        )


def make_environment(env_id: str, kwargs: Mapping[str, Any], render_mode: str | None = None) -> Any:
    """Return one environment of Gymnasium, without its checks.

    Raises:
        SettingsError: There is none of that id, or it cannot be made.
    """
    given = naming.keywords(env_id, kwargs, render_mode)
    name = naming.registered(env_id)
    import gymnasium

    try:
        # The checker would look at every step; what does not fit its space the codec refuses.
        return gymnasium.make(name, disable_env_checker=True, **given)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, OSError) as error:
        raise naming.unfit(env_id, error) from error
