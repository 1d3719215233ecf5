"""A simulator of several copies of any environment that is registered with Gymnasium."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core.specs import ActionTuple, BehaviorSpec
from pipeline.core.steps import Steps
from pipeline.errors import SettingsError
from pipeline.seeding import derive
from pipeline.simulators.bridges import naming
from pipeline.simulators.bridges.batches import MISUSE, Batch, Bridge, Codec, refuse_returned
from pipeline.simulators.bridges.states import copy_state, restore_copy


class GymnasiumSimulator(Bridge):
    """Copies of one environment, stepped together; each is reset when its episode has ended.

    An episode that `terminated` ends with a terminal step; an episode that was `truncated` ends
    with an interrupted terminal step. Both have the environment's last observation. Environment
    parameters that the trainer sends are the `options` of each following `reset`.

    Args:
        id: Gymnasium's id, or `module:id` for a module to import first; or a list of environments,
            one for each copy. The behavior is named after their id, or else after their class.
        kwargs: keywords for the environment, and for `gymnasium.make`.
        seed: copy k is seeded once, from this seed and k; later episodes continue its generator.
        n_agents: number of copies.
        first: number of the first copy, if other copies are in other processes.
        visual: one of `spaces.VISUAL`.
        action_scale: value that an action of 1 becomes in a Box's dimensions without finite bounds.
        render_mode: `rgb_array` for copies that can be drawn; None draws nothing.

    Raises:
        SettingsError: The environment cannot be made, or one of its spaces is not supported.
    """

    def __init__(
        self,
        *,
        id: str | Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        n_agents: int = 1,
        first: int = 0,
        visual: str = "auto",
        action_scale: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(id, str):
            envs = [make_environment(id, kwargs or {}, render_mode) for _ in range(n_agents)]
        else:
            envs = list(id)
            spec = envs[0].spec
            id = type(envs[0].unwrapped).__name__ if spec is None else str(spec.id)
        super().__init__(envs, id)
        spaces = (envs[0].observation_space, envs[0].action_space)
        self._codec = Codec(*spaces, where=id, visual=visual, scale=action_scale)
        self._behavior = f"{naming.behavior_name(id)}?team=0"
        # A copy's seed becomes None at its first reset, because a copy is seeded only once.
        self._seeds: list[int | None] = [
            derive(seed, "gymnasium", first + k) for k in range(len(envs))
        ]
        self._first = first

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Specification of the only behavior, which is named after the environment's id."""
        return {self._behavior: self._codec.spec}

    def reset(self) -> Mapping[str, Steps]:
        """Begin a new episode in every copy of the environment."""
        batch = Batch(self._codec, len(self._envs))
        for row in range(len(self._envs)):
            self._begin(row, batch)
        return {self._behavior: batch.steps()}

    def step(self, actions: Mapping[str, ActionTuple]) -> Mapping[str, Steps]:
        """Step every copy once; raise ValueError for another number of actions."""
        native = self._codec.actions.native(actions[self._behavior])
        batch = Batch(self._codec, len(self._envs))
        for row, (env, action) in enumerate(zip(self._envs, native, strict=True)):
            result, agent = None, self._first + row
            try:
                result = env.step(action)
                # The result is unpacked inside of `try`, so that a wrong number of values is
                # reported as a mistake of the environment.
                obs, reward, terminated, truncated, info = result
                if is_over := terminated or truncated:
                    # An episode that is terminated and truncated counts as terminated: its last
                    # state has no value to bootstrap from.
                    batch.end(obs, not terminated, (float(reward), agent, 0, 0.0))
                else:
                    # Each copy has one agent with the copy's number as its id, and no group (0).
                    batch.decide(obs, info, (float(reward), agent, 0, 0.0))
            except MISUSE as error:
                refuse_returned(env, "step", result, error, where=self._where)
            if is_over:
                self._begin(row, batch)
        return {self._behavior: batch.steps()}

    def state_dict(self) -> dict[str, Any] | None:
        """Return everything that later steps depend on; None if a copy cannot give its state."""
        copies = list(map(copy_state, self._envs))
        if None in copies:
            return None
        begun = [seed is None for seed in self._seeds]
        return {"copies": copies, "begun": begun, "parameters": self.parameters.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` has returned."""
        self.parameters.load_state_dict(state["parameters"])
        for row, (env, saved) in enumerate(zip(self._envs, state["copies"], strict=True)):
            env.reset()  # Gymnasium's wrappers refuse to step before a reset
            restore_copy(env, saved)
            # A copy that had been seeded must not be seeded again.
            if state["begun"][row]:
                self._seeds[row] = None

    def _begin(self, row: int, batch: Batch) -> None:
        # Gymnasium asks for a seed at the first reset only; later episodes continue the generator
        # (https://gymnasium.farama.org/api/env/#gymnasium.Env.reset).
        seed, self._seeds[row] = self._seeds[row], None
        options = self.parameters.values() or None
        env, result = self._envs[row], None
        try:
            result = env.reset(seed=seed, options=options)
            obs, info = result
            batch.decide(obs, info, (0.0, self._first + row, 0, 0.0))
        except MISUSE as error:
            refuse_returned(env, "reset", result, error, where=self._where)


def envs_of(vector: Any) -> list[Any]:
    """Close a Gymnasium vector environment; make its single environments again and return them."""
    if vector is not vector.unwrapped or not (hasattr(vector, "env_fns") or vector.spec):
        raise SettingsError(
            f"{type(vector).__name__}: its single environments cannot be made again, because it is "
            "wrapped or does not tell how; pass a function that makes one environment instead"
        )
    vector.close()
    if hasattr(vector, "env_fns"):
        return [make() for make in vector.env_fns]
    of_vectors = ("num_envs", "vectorization_mode")
    kwargs = {name: value for name, value in vector.spec.kwargs.items() if name not in of_vectors}
    return [make_environment(vector.spec.id, kwargs) for _ in range(vector.num_envs)]


def make_environment(env_id: str, kwargs: Mapping[str, Any], render_mode: str | None = None) -> Any:
    """Return one environment of Gymnasium, without Gymnasium's checks of each step."""
    arguments = naming.keywords(env_id, kwargs, render_mode)
    name = naming.registered(env_id)
    import gymnasium

    try:
        # Gymnasium's checker costs time in every step; the codec refuses values outside a space.
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError, OSError) as error:
        raise naming.unfit(env_id, error) from error
