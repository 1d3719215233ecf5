"""Writes modern demonstration files (`.demo`).

Recorders of packages from about 0.14 on put beside an observation the action of the step before.
What is written here has the action taken at that observation, which is how the readers of ML-Agents
(and ours) understand a file.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import DemonstrationError
from pipeline.files import whole
from pipeline.protocol.demo_file import API_VERSIONS, BRAIN_OFFSET, delimited_message
from pipeline.protocol.encoding import actions_bytes, brain_parameters, infos_bytes
from pipeline.protocol.generated.messages import (
    AgentInfoActionPairProto,
    DemonstrationMetaProto,
    UnityRLInputProto,
    UnityRLOutputProto,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO, Self

    from pipeline.arrays import BoolArray, FloatArray
    from pipeline.protocol.specs import ActionTuple, BehaviorSpec

NAME_LENGTH = 16


class DemoWriter:
    """Writes one demonstration within a `with` block, whole or not at all.

    If the block raises, no file is left. Equal calls give equal bytes.
    """

    def __init__(
        self, path: Path | str, behavior_name: str, spec: BehaviorSpec, *, name: str = ""
    ) -> None:
        """Prepare to write.

        Args:
            path: the file, ending in `.demo`.
            behavior_name: a team (`?team=0`) is left out.
            spec: of the behavior.
            name: of the demonstration; the behavior's if empty.

        Raises:
            DemonstrationError: `path` does not end in `.demo`.
        """
        self._path = Path(path)
        if self._path.suffix != ".demo":
            raise DemonstrationError(f"{path}: a demonstration's name must end in '.demo'")
        self._behavior = behavior_name.split("?")[0]
        self._spec = spec
        text = "".join(
            c for c in name or self._behavior if c.isascii() and (c.isalnum() or c in " -")
        )
        self._name = text[:NAME_LENGTH]
        self._stack = ExitStack()
        self._file: BinaryIO | None = None
        self._n_steps = self._n_done = 0
        self._reward = 0.0

    def append(
        self,
        *,
        obs: Sequence[FloatArray],
        actions: ActionTuple,
        reward: FloatArray,
        done: BoolArray,
        interrupted: BoolArray | None = None,
        action_mask: Sequence[BoolArray] | None = None,
    ) -> None:
        """Write consecutive steps of one agent.

        Args:
            obs: per observation [n, *shape].
            actions: taken at these observations; any values where `done`.
            reward: [n], gained since the step before.
            done: [n], True where an episode has ended and the observation is its last.
            interrupted: [n], True where it was cut short; None for nowhere.
            action_mask: per branch [n, size], True = forbidden; None for no mask.
        """
        if self._file is None:
            raise ValueError("append works inside the `with` block of a DemoWriter")
        n = len(reward)
        zeros = np.zeros(n, dtype=np.int32)
        infos = UnityRLOutputProto.ListAgentInfoProto.FromString(
            infos_bytes(
                spec=self._spec,
                obs=obs,
                reward=reward,
                agent_id=zeros,
                group_id=zeros,
                group_reward=np.zeros(n, dtype=np.float32),
                done=done,
                interrupted=np.False_ if interrupted is None else interrupted,
                action_mask=action_mask,
            )
        )
        acted = UnityRLInputProto.ListAgentActionProto.FromString(
            actions_bytes(actions, self._spec.action_spec)
        )
        for info, action in zip(infos.value, acted.value, strict=True):
            action.ClearField("vector_actions_deprecated")
            pair = AgentInfoActionPairProto(agent_info=info, action_info=action)
            self._file.write(delimited_message(pair))
        self._n_steps += n
        self._n_done += int(np.sum(done))
        self._reward += float(np.sum(reward, dtype=np.float64))

    def __enter__(self) -> Self:
        temporary = self._stack.enter_context(whole(self._path))
        self._file = self._stack.enter_context(temporary.open("wb"))
        self._file.write(bytes(BRAIN_OFFSET))
        brain = brain_parameters(self._behavior, self._spec, old_fields=True)
        brain.is_training = False
        self._file.write(delimited_message(brain))
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None and self._file is not None:
            self._finish(self._file)
        self._file = None
        self._stack.__exit__(*error)  # type: ignore[arg-type]  # the three that `with` gives

    def _finish(self, file: BinaryIO) -> None:
        episodes = self._n_done + 1
        meta = DemonstrationMetaProto(
            api_version=API_VERSIONS[-1],
            demonstration_name=self._name,
            number_steps=self._n_steps,
            number_episodes=episodes,
            mean_reward=self._reward / episodes,
        )
        file.seek(0)
        file.write(delimited_message(meta))
        file.flush()
