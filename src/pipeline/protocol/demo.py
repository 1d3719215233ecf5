"""Demonstrations (`.demo` files) as arrays: read and written.

Recorders of packages from about 0.14 on store the action of the step before beside an observation.
Files written here have the action taken at that observation, which is how the readers of ML-Agents
(and ours) understand a file: a row's action is the action recorded beside its observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.arrays import BoolArray, FloatArray, IntArray
from pipeline.errors import DemonstrationError, UnityActionException, UnityException, brief
from pipeline.files import whole
from pipeline.protocol.actions import actions_bytes, decode_entries
from pipeline.protocol.decoding import (
    behavior_spec_from,
    decode_infos,
    decode_masks,
)
from pipeline.protocol.demo_file import (
    API_VERSIONS,
    BRAIN_OFFSET,
    delimited_message,
    parse_demo,
)
from pipeline.protocol.encoding import brain_parameters, infos_bytes
from pipeline.protocol.generated.messages import (
    AgentActionProto,
    AgentInfoActionPairProto,
    AgentInfoProto,
    DemonstrationMetaProto,
    ReceivedAgentInfosProto,
    UnityRLInputProto,
    UnityRLOutputProto,
)
from pipeline.protocol.specs import ActionSpec, ActionTuple, BehaviorSpec, refuse_excess, row_bytes
from pipeline.protocol.steps import DecisionSteps

# As ML-Agents' recorder cuts it: so the metadata fit into the header.
_NAME_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A demonstration as arrays, one row per recorded pair."""

    metadata: DemonstrationMetaProto
    """The header, as its recorder wrote it: no steps if it did not finish, one episode more than
    have ended, and the mean reward over this number of episodes."""
    behavior_name: str
    """As recorded, without a team."""
    spec: BehaviorSpec
    obs: list[FloatArray]
    """Per observation float32 [n, *shape], images channels first in 0..1."""
    continuous: FloatArray
    """float32 [n, a]."""
    discrete: IntArray
    """int32 [n, branches]."""
    reward: FloatArray
    """float32 [n], gained since the pair before."""
    done: BoolArray
    """[n], True on the last pair of an episode."""
    interrupted: BoolArray
    """[n], True where the episode was cut short rather than finished."""
    group_id: IntArray
    """int32 [n], 0 for agents without a group."""
    group_reward: FloatArray
    """float32 [n]."""
    action_mask: list[BoolArray] | None
    """Per branch bool [n, size], True = forbidden; None without discrete actions."""

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self) -> list[float]:
        """Return the summed reward of each episode that has ended."""
        return returns_of(self.reward, self.done)


def returns_of(reward: FloatArray, done: BoolArray) -> list[float]:
    """Return the summed reward of each episode that has ended, from rows [n].

    A row's reward belongs to the action before it, so an episode's first belongs to none of its.
    """
    ends = np.flatnonzero(done) + 1
    parts = np.split(reward[: ends[-1]], ends[:-1]) if len(ends) else []
    return [float(sum(part[1:].tolist())) for part in parts]


def read_demo(path: Path | str) -> Demonstration:
    """Read one `.demo` file, of any package version.

    Actions that a recorder left out (the last of an episode) are zeros.

    Raises:
        DemonstrationError: The file is not there, not a demonstration, cut off, or of an unknown
            version.
    """
    path = Path(path)
    try:
        meta, brain, infos, acted, n_bytes = parse_demo(path)
        if not infos:
            raise DemonstrationError(
                f"{path}: the demonstration holds no steps; did its recording end before it was "
                "closed?"
            )
        spec = behavior_spec_from(brain, infos[0])
        # Before any array: a pair of a few bytes may stand for large masks and actions.
        refuse_excess(len(infos) * row_bytes(spec), n_bytes, f"a recording of {len(infos)} steps")
        # The decoder takes what comes over the wire, where observations are still bytes.
        listed = UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
        received = list(ReceivedAgentInfosProto.FromString(listed).value)
        batch = decode_infos(received, spec, brain.brain_name)
        actions = decode_entries(acted, spec.action_spec, absent_is_zero=True)
        _check_actions(actions, spec.action_spec)
    except (UnityException, ValueError) as error:
        raise DemonstrationError(f"{path}: {error}") from error
    return Demonstration(
        metadata=meta,
        behavior_name=brain.brain_name.partition("?")[0],
        spec=spec,
        obs=batch.obs,
        continuous=actions.continuous,
        discrete=actions.discrete,
        reward=batch.reward,
        done=batch.done,
        interrupted=batch.done & batch.max_step_reached,
        group_id=batch.group_id,
        group_reward=batch.group_reward,
        action_mask=decode_masks(received, spec.action_spec),
    )


def _check_actions(actions: ActionTuple, spec: ActionSpec) -> None:
    choices = actions.discrete
    wrong = ~np.isfinite(actions.continuous).all(axis=1)
    wrong |= ((choices < 0) | (choices >= np.array(spec.discrete_branches))).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise UnityActionException(
            f"the action of step {row + 1}, {actions.continuous[row]} and {choices[row]}, is none "
            f"of the behavior's ({spec}); record it again"
        )


def describe(demo: Demonstration) -> str:
    """Return what a demonstration holds, for a person."""
    ends = int(demo.done.sum())
    returns = demo.returns()
    scope = "per ended episode" if ends else "in all, no episode ended"
    mean = np.mean(returns) if ends else demo.reward[1:].sum()
    lines = [
        f"behavior      {brief(demo.behavior_name)}",
        f"name          {brief(demo.metadata.demonstration_name) or '(none)'}",
        f"steps         {len(demo)}",
        f"episodes      {ends} ended ({int(demo.interrupted.sum())} of them cut short)",
        f"mean reward   {mean:.4g} {scope} (the header says {demo.metadata.mean_reward:.4g}: Unity "
        "counts one episode more, and rewards before an episode's first action)",
        *([f"returns       {min(returns):.4g} to {max(returns):.4g}"] if ends else []),
        f"actions       {demo.spec.action_spec}",
    ]
    for index, obs in enumerate(demo.spec.observation_specs):
        lines.append(f"observation {index} {brief(obs.name) or '(no name)'} {tuple(obs.shape)}")
    return "\n".join(lines)


@contextmanager
def writing_demo(
    path: Path | str, behavior_name: str, spec: BehaviorSpec, *, name: str = ""
) -> Iterator[DemoWriter]:
    """Write one demonstration within the `with` block, whole or not at all.

    If the block raises, no file is left. Equal calls give equal bytes.

    Args:
        path: the file, ending in `.demo`.
        behavior_name: a team (`?team=0`) is left out.
        spec: of the behavior.
        name: of the demonstration; the behavior's if empty.

    Raises:
        DemonstrationError: `path` does not end in `.demo`.
    """
    if Path(path).suffix != ".demo":
        raise DemonstrationError(f"{path}: a demonstration's name must end in '.demo'")
    behavior = behavior_name.partition("?")[0]
    text = "".join(c for c in name or behavior if c.isascii() and (c.isalnum() or c in " -"))
    brain = brain_parameters(behavior, spec, old_fields=True)
    # As recorders write it; in the conversation it is True.
    brain.is_training = False
    with whole(path) as temporary, temporary.open("wb") as file:
        # Room for the header, whose counts are known at the end only.
        file.write(bytes(BRAIN_OFFSET))
        file.write(delimited_message(brain))
        writer = DemoWriter(file, spec)
        yield writer
        # As Unity's recorder counts, which adds one at its close.
        episodes = writer.n_done + 1
        meta = DemonstrationMetaProto(
            api_version=API_VERSIONS[-1],
            demonstration_name=text[:_NAME_LENGTH],
            number_steps=writer.n_steps,
            number_episodes=episodes,
            mean_reward=writer.reward / episodes,
        )
        file.seek(0)
        file.write(delimited_message(meta))


class DemoWriter:
    """Appends steps to a demonstration that is being written; `writing_demo` makes it."""

    def __init__(self, file: BinaryIO, spec: BehaviorSpec) -> None:
        self._file = file
        self._spec = spec
        self.n_steps = self.n_done = 0
        self.reward = 0.0

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
        n = len(reward)
        zeros = np.zeros(n, dtype=np.int32)
        steps = DecisionSteps(list(obs), reward, zeros, None, zeros, zeros.astype(np.float32))
        cut = np.False_ if interrupted is None else interrupted
        infos = UnityRLOutputProto.ListAgentInfoProto.FromString(
            infos_bytes(steps, self._spec, done=done, interrupted=cut, action_mask=action_mask)
        )
        acted = UnityRLInputProto.ListAgentActionProto.FromString(
            actions_bytes(actions, self._spec.action_spec)
        )
        for action in acted.value:
            # For old players only; recorders of today leave it empty.
            action.ClearField("vector_actions_deprecated")
        self.append_messages(infos.value, acted.value)

    def append_messages(
        self, infos: Sequence[AgentInfoProto], actions: Sequence[AgentActionProto]
    ) -> None:
        """Write consecutive steps of one agent as `parse_demo` gives them, images compressed."""
        for info, action in zip(infos, actions, strict=True):
            pair = AgentInfoActionPairProto(agent_info=info, action_info=action)
            self._file.write(delimited_message(pair))
        self.n_steps += len(infos)
        self.n_done += sum(info.done for info in infos)
        self.reward += float(np.sum([info.reward for info in infos], dtype=np.float64))
