"""Several environments as one, stepped in lockstep and in a fixed order."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from pipeline.envs.base import ControlledEnv, SplitEnv
from pipeline.envs.unity import UnityEnvironment
from pipeline.errors import UnityActionException
from pipeline.protocol.steps import DecisionSteps, TerminalSteps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from pipeline.envs.base import BaseEnv, Stats
    from pipeline.envs.side_channels import SideChannel
    from pipeline.protocol.parameters import Sampler
    from pipeline.protocol.specs import ActionTuple, BehaviorSpec
    from pipeline.protocol.steps import Steps


class WorkerSet:
    """Environments that step together; those in processes of their own do so at the same time.

    Attributes:
        envs: the environments, worker by worker.
    """

    def __init__(self, envs: Sequence[BaseEnv]) -> None:
        """Take ownership of `envs`; `close` closes them all."""
        if not envs:
            raise ValueError("a worker set needs at least one environment")
        self.envs = tuple(envs)
        self._split = [env for env in envs if isinstance(env, SplitEnv)]
        self._controlled = [env if isinstance(env, ControlledEnv) else None for env in envs]
        self._whole = [env for env in envs if not isinstance(env, SplitEnv)]

    def __len__(self) -> int:
        return len(self.envs)

    def reset(self) -> None:
        """Begin a new episode for every agent of every worker."""
        for env in self._split:
            env.reset_send()
        for whole in self._whole:
            whole.reset()
        for env in self._split:
            env.reset_wait()

    def step(self) -> None:
        """Send every worker's actions, then wait for every worker."""
        self.step_send()
        self.step_wait()

    def step_send(self) -> None:
        """First half of `step`: workers in processes of their own begin to work."""
        for env in self._split:
            env.step_send()

    def step_wait(self) -> None:
        """Second half of `step`: every worker is done with it."""
        for whole in self._whole:
            whole.step()
        for env in self._split:
            env.step_wait()

    def state_dict(self) -> list[dict[str, Any]] | None:
        """What `load_state_dict` takes up; None when a worker cannot be restored."""
        states = [env.state_dict() for env in self.envs]
        known = [state for state in states if state is not None]
        return known if len(known) == len(states) else None

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; the next call is `step`.

        Raises:
            ValueError: The states are of other workers.
        """
        for env, state in zip(self.envs, states, strict=True):
            env.load_state_dict(state)

    def set_parameter(self, name: str, value: float | Sampler) -> bool:
        """Set an environment parameter of every worker, with the next step or reset.

        Samplers get the same seed everywhere. To be called between two steps.

        Returns:
            False if a worker cannot be sent parameters.
        """
        sent = [env is not None and env.set_parameter(name, value) for env in self._controlled]
        return all(sent)

    def take_stats(self) -> list[Stats]:
        """The statistics that each worker has reported since the last call."""
        return [{} if env is None else env.take_stats() for env in self._controlled]

    @property
    def codec_seconds(self) -> float:
        """Time spent so far on turning messages into arrays and back."""
        return sum(env.codec_seconds for env in self.envs)

    @property
    def behavior_specs(self) -> Mapping[str, BehaviorSpec]:
        """Behaviors that any worker knows, each as its first worker specified it."""
        specs: dict[str, BehaviorSpec] = {}
        for env in self.envs:
            for name, spec in env.behavior_specs.items():
                specs.setdefault(name, spec)
        return specs

    def get_steps(self, behavior_name: str) -> list[Steps]:
        """What the behavior's agents sent last, by worker; empty where a worker has none.

        Raises:
            UnityActionException: No worker knows the behavior.
        """
        spec = self._spec(behavior_name)
        return [
            env.get_steps(behavior_name)
            if behavior_name in env.behavior_specs
            else (DecisionSteps.empty(spec), TerminalSteps.empty(spec))
            for env in self.envs
        ]

    def set_actions(self, behavior_name: str, actions: Sequence[ActionTuple]) -> None:
        """Set the actions of all agents that asked, one ActionTuple per worker.

        Raises:
            UnityActionException: No worker knows the behavior, or a shape is wrong.
        """
        self._spec(behavior_name)
        for env, action in zip(self.envs, actions, strict=True):
            if behavior_name in env.behavior_specs:
                env.set_actions(behavior_name, action)

    def close(self) -> None:
        """Close every worker, also when closing another fails."""
        with ExitStack() as stack:
            for env in reversed(self.envs):
                stack.callback(env.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:
            for env in reversed(self.envs):
                stack.push(env)

    def _spec(self, behavior_name: str) -> BehaviorSpec:
        for env in self.envs:
            if behavior_name in env.behavior_specs:
                return env.behavior_specs[behavior_name]
        raise UnityActionException(
            f"The group {behavior_name} does not correspond to an existing agent group in any of "
            f"{len(self.envs)} environments; they have {sorted(self.behavior_specs)}"
        )


def launch_workers(
    file_name: str | Path | None,
    n_workers: int,
    *,
    seed: int,
    base_port: int | None = None,
    args: Sequence[str] = (),
    side_channels: Sequence[Sequence[SideChannel]] | None = None,
    log_folder: str | Path | None = None,
    no_graphics: bool = False,
    no_graphics_monitor: bool = False,
    timeout_wait: float = 60,
    num_areas: int = 1,
) -> WorkerSet:
    """Start `n_workers` processes at the same time; worker k gets the seed `seed` + k.

    Args:
        file_name: executable; None waits for the Unity Editor, with one worker.
        n_workers: number of processes.
        seed: of worker 0.
        base_port: TCP port of worker 0; None lets the system choose each.
        args: additional arguments for every process.
        side_channels: for each worker its channels.
        log_folder: where the players write their logs.
        no_graphics: run without a display.
        no_graphics_monitor: the same, except for worker 0.
        timeout_wait: seconds to wait for each message.
        num_areas: training areas per process, if the environment replicates them.

    Raises:
        UnityException: A worker could not be started; then all are closed.
    """
    with ExitStack() as stack:
        envs = [
            stack.enter_context(
                UnityEnvironment(
                    file_name,
                    worker_id=worker,
                    base_port=base_port,
                    seed=seed + worker,
                    no_graphics=no_graphics,
                    no_graphics_monitor=no_graphics_monitor,
                    timeout_wait=timeout_wait,
                    additional_args=args,
                    side_channels=side_channels[worker] if side_channels else (),
                    log_folder=log_folder,
                    num_areas=num_areas,
                    connect=False,
                )
            )
            for worker in range(n_workers)
        ]
        for env in envs:
            env.connect()
        workers = WorkerSet(envs)
        stack.pop_all()
    return workers
