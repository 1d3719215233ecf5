"""Demonstrations (`.demo` files) as arrays: read and written.

Recorders of packages from about 0.14 on store the action of the step before beside an observation.
Files written here have the action taken at that observation, which is how the readers of ML-Agents
(and ours) understand a file: a row's action is the action recorded beside its observation.

A file is delimited metadata, brain parameters at byte 33, then one record per step: a pair of agent
info and action, or up to package 0.11 an agent info that stores the action of the step before. The
metadata count the steps. A recorder writes them when it closes the file, then also a copy behind
the last record; until then they count none, and the records go on to the end of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pipeline.arrays import BoolArray, FloatArray, IntArray
from pipeline.errors import (
    DemonstrationError,
    UnityActionException,
    UnityException,
    brief,
    shell_command,
)
from pipeline.files import foreign, similar, what_is, whole
from pipeline.protocol import wire
from pipeline.protocol.actions import actions_bytes, decode_entries
from pipeline.protocol.decoding import behavior_spec_from, decode_infos, decode_masks
from pipeline.protocol.encoding import brain_parameters, infos_bytes
from pipeline.protocol.generated import messages as m
from pipeline.protocol.specs import (
    AGENT_BYTES,
    ActionSpec,
    ActionTuple,
    BehaviorSpec,
    DimensionProperty,
    refuse_excess,
    row_bytes,
)
from pipeline.protocol.steps import DecisionSteps

_log = logging.getLogger(__name__)

# Recorders reserve 32 bytes for the metadata, and one for their length.
BRAIN_OFFSET = 33
# What ML-Agents reads; its recorders write 1.
API_VERSIONS = (0, 1)
_SPATIAL = DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
_CHANNELS_LAST = (_SPATIAL, _SPATIAL, DimensionProperty.NONE)


class DemoMessages(NamedTuple):
    """What a file holds; one info and one action per step."""

    meta: m.DemonstrationMetaProto
    brain: m.BrainParametersProto
    infos: list[m.AgentInfoProto]
    actions: list[m.AgentActionProto]
    n_bytes: int
    """Of the whole file."""


def delimited_message(message: Message) -> bytes:
    """Return a message behind its length."""
    data: bytes = message.SerializeToString(deterministic=True)
    return wire.varint(len(data)) + data


def parse_demo(path: Path) -> DemoMessages:
    """Return the messages of a file.

    Raises:
        DemonstrationError: The file is not there, not a demonstration, cut off, or of an unknown
            version; says where it stops making sense.
        UnitySpecificationException: It has far more steps than bytes for them.
    """
    data = _content(path)
    meta, brain = m.DemonstrationMetaProto(), m.BrainParametersProto()
    start, stop = _record(data, 0) or (0, 0)
    if not stop or not _parses(meta, data[start:stop]):
        flaw = foreign(data) or "this is not a demonstration: its header makes no sense"
        raise DemonstrationError(f"{path}: {flaw}")
    if meta.api_version not in API_VERSIONS:
        raise DemonstrationError(
            "Can't load Demonstration data from an unsupported version "
            f"({meta.api_version}): {path}"
        )
    # Not from `stop` on: what the metadata leave of the reserved bytes is padding.
    start, stop = _record(data, BRAIN_OFFSET) or (0, 0)
    if start == stop or not _parses(brain, data[start:stop]):
        raise DemonstrationError(f"No BrainParameters found in demonstration file at {path}.")
    records = _records(path, data, stop, meta)
    # A record without content is one byte of the file, but a whole message in memory.
    refuse_excess(len(records) * AGENT_BYTES, len(data), f"a recording of {len(records)} steps")
    if records and _is_old(records[0]):
        return _old_steps(path, meta, brain, records, len(data))
    pairs = [m.AgentInfoActionPairProto() for _ in records]
    for index, (pair, record) in enumerate(zip(pairs, records, strict=True)):
        if not _parses(pair, record):
            raise _damaged(path, index, meta)
    infos = [pair.agent_info for pair in pairs]
    return DemoMessages(meta, brain, infos, [pair.action_info for pair in pairs], len(data))


def _records(path: Path, data: bytes, stop: int, meta: m.DemonstrationMetaProto) -> list[bytes]:
    """Return the records from `stop` on: as many as the metadata count, or all if none."""
    records: list[bytes] = []
    counted = meta.number_steps > 0
    while len(records) < meta.number_steps if counted else stop < len(data):
        bounds = _record(data, stop)
        if bounds is None and counted:
            raise _damaged(path, len(records), meta)
        # The copy has no length before it, so it may look like a record, whole or cut off.
        if not counted and _is_copy(data, stop, meta):
            break
        if bounds is None:
            _log.warning(
                "%s: its recording was never finished; the last %d bytes are no whole step, and "
                "are left out.",
                path,
                len(data) - stop,
            )
            break
        start, stop = bounds
        records.append(data[start:stop])
    return records


def _is_copy(data: bytes, stop: int, meta: m.DemonstrationMetaProto) -> bool:
    """Return whether the last bytes are the metadata that a recorder leaves at the end."""
    copy = m.DemonstrationMetaProto()
    # Metadata have 32 bytes at most, or they would not fit into the header.
    if len(data) - stop >= BRAIN_OFFSET or not _parses(copy, data[stop:]):
        return False
    # The counts are left out, since those of the header were never written.
    same = copy.api_version == meta.api_version
    return same and copy.demonstration_name == meta.demonstration_name


def _content(path: Path) -> bytes:
    # A path that is not there has a better error below, which knows similar names.
    if path.suffix != ".demo" and not path.is_dir() and path.exists():
        text = f"The path provided is not a '.demo' file: it {what_is(path)}"
        raise DemonstrationError(f"{path}: {text}")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        record = shell_command("pipeline", "demo", "record", "ENV", "-o", path)
        hint = similar(path) or f". `{record}` makes one, or Unity's Demonstration Recorder"
        raise DemonstrationError(
            f"The demonstration file or directory {path} does not exist{hint}"
        ) from error
    except OSError as error:
        raise DemonstrationError(f"{path}: {error.strerror}") from error


def _damaged(path: Path, index: int, meta: m.DemonstrationMetaProto) -> DemonstrationError:
    of = f" of {meta.number_steps}" if meta.number_steps > 0 else ""
    return DemonstrationError(
        f"{path}: the file is cut off or damaged at pair {index + 1}{of}; "
        "restore the whole file, or record it again"
    )


def _record(data: bytes, position: int) -> tuple[int, int] | None:
    """Return where the message at `position` starts and stops, None if it is cut off."""
    length = 0
    # Ten bytes are the most that 64 bits take, seven in each.
    for shift, byte in zip(range(0, 64, 7), data[position : position + 10], strict=False):
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            start = position + shift // 7 + 1
            return (start, start + length) if start + length <= len(data) else None
    return None


def _parses(message: Message, data: bytes) -> bool:
    try:
        message.ParseFromString(data)
    except DecodeError:
        return False
    return True


def _is_old(record: bytes) -> bool:
    """Return whether a record is an agent info; a pair has two fields, both messages."""
    anything = Empty()
    if not _parses(anything, record):
        return False
    fields = UnknownFieldSet(anything)
    return any(f.field_number > 2 or f.wire_type != 2 for f in fields)  # type: ignore[attr-defined]  # typeshed lacks it


def _old_steps(
    path: Path,
    meta: m.DemonstrationMetaProto,
    brain: m.BrainParametersProto,
    records: list[bytes],
    n_bytes: int,
) -> DemoMessages:
    """Return today's messages for the agent infos of packages 0.6 to 0.11.

    An info stores the action of the step before, so a step's action comes from the info after it;
    the last step has none.
    """
    old_brain = m.OldBrainParametersProto()
    # Fields that today's announcement does not have come through it as unknown ones.
    if not _parses(old_brain, brain.SerializeToString()):
        raise DemonstrationError(f"No BrainParameters found in demonstration file at {path}.")
    infos, actions = [], []
    for index, record in enumerate(records):
        old = m.OldAgentInfoProto()
        if not _parses(old, record):
            raise _damaged(path, index, meta)
        infos.append(_modern_info(old, old_brain))
        actions.append(m.AgentActionProto(vector_actions_deprecated=old.stored_vector_actions))
    return DemoMessages(meta, brain, infos, [*actions[1:], m.AgentActionProto()], n_bytes)


def _modern_info(old: m.OldAgentInfoProto, brain: m.OldBrainParametersProto) -> m.AgentInfoProto:
    info = m.AgentInfoProto(
        reward=old.reward,
        done=old.done,
        max_step_reached=old.max_step_reached,
        id=old.id,
        action_mask=old.action_mask,
        observations=old.observations,
    )
    for camera, image in zip(brain.camera_resolutions, old.visual_observations, strict=False):
        channels = 1 if camera.gray_scale else 3
        info.observations.add(
            shape=[camera.height, camera.width, channels],
            dimension_properties=_CHANNELS_LAST,
            compression_type=m.PNG,
            compressed_data=image,
        )
    if old.stacked_vector_observation:
        vector = info.observations.add(shape=[len(old.stacked_vector_observation)])
        vector.float_data.data.extend(old.stacked_vector_observation)
    return info


# As ML-Agents' recorder cuts it: so the metadata fit into the header.
_NAME_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A demonstration as arrays, one row per recorded pair."""

    metadata: m.DemonstrationMetaProto
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
        listed = m.UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
        received = list(m.ReceivedAgentInfosProto.FromString(listed).value)
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
        meta = m.DemonstrationMetaProto(
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
        infos = m.UnityRLOutputProto.ListAgentInfoProto.FromString(
            infos_bytes(steps, self._spec, done=done, interrupted=cut, action_mask=action_mask)
        )
        acted = m.UnityRLInputProto.ListAgentActionProto.FromString(
            actions_bytes(actions, self._spec.action_spec)
        )
        for action in acted.value:
            # For old players only; recorders of today leave it empty.
            action.ClearField("vector_actions_deprecated")
        self.append_messages(infos.value, acted.value)

    def append_messages(
        self, infos: Sequence[m.AgentInfoProto], actions: Sequence[m.AgentActionProto]
    ) -> None:
        """Write consecutive steps of one agent as `parse_demo` gives them, images compressed."""
        for info, action in zip(infos, actions, strict=True):
            pair = m.AgentInfoActionPairProto(agent_info=info, action_info=action)
            self._file.write(delimited_message(pair))
        self.n_steps += len(infos)
        self.n_done += sum(info.done for info in infos)
        self.reward += float(np.sum([info.reward for info in infos], dtype=np.float64))
