"""Reading and writing demonstrations (`.demo` files) as arrays.

Recorders of ML-Agents' Unity package from about version 0.14 on store an observation together with
the action of the previous step. This module writes each observation with the action that was taken
at this observation, because ML-Agents' reader and this module's reader expect this action there.

A file is delimited metadata, brain parameters at byte 33, then one record per step: a pair of agent
info and action, or up to package 0.11 an agent info that stores the action of the previous step.
The metadata have the number of steps. A recorder writes the metadata when it closes the file, and
then also a copy after the last record; until then the number is 0, and the records continue to the
end of the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pipeline.core import specs
from pipeline.core.arrays import BoolArray, FloatArray, IntArray
from pipeline.core.specs import ActionSpec, ActionTuple, BehaviorSpec
from pipeline.core.steps import DecisionSteps
from pipeline.errors import (
    DemonstrationError,
    UnityActionException,
    UnityException,
    brief,
    shell_command,
)
from pipeline.files import foreign, similar, what_is, whole
from pipeline.wire.codec import decoding, records
from pipeline.wire.codec.actions import actions_bytes, decode_entries
from pipeline.wire.codec.encoding import brain_parameters, infos_bytes
from pipeline.wire.codec.generated import messages as m

_log = logging.getLogger(__name__)

# Recorders reserve 32 bytes for the metadata, and one byte for the length of the metadata.
BRAIN_OFFSET = 33
# Versions of the file format that ML-Agents reads; its recorders write version 1.
API_VERSIONS = (0, 1)
_SPATIAL = specs.DimensionProperty.TRANSLATIONAL_EQUIVARIANCE
_CHANNELS_LAST = (_SPATIAL, _SPATIAL, specs.DimensionProperty.NONE)


class DemoMessages(NamedTuple):
    """The messages in a `.demo` file, with one agent info and one action per step."""

    meta: m.DemonstrationMetaProto
    brain: m.BrainParametersProto
    infos: list[m.AgentInfoProto]
    actions: list[m.AgentActionProto]
    n_bytes: int
    """Size of the whole file in bytes."""


def delimited_message(message: Message) -> bytes:
    """Return a serialized message, with its length as a varint before it."""
    data: bytes = message.SerializeToString(deterministic=True)
    return records.varint(len(data)) + data


def parse_demo(path: Path) -> DemoMessages:
    """Return the messages of a `.demo` file.

    Raises:
        DemonstrationError: The file is missing, not a demonstration, cut off, or of an unknown
            version; the error names the first damaged record.
        UnitySpecificationException: The steps would take far more memory than the file has bytes.
    """
    data = _content(path)
    meta, brain = m.DemonstrationMetaProto(), m.BrainParametersProto()
    # `_record` returns None if the data is cut off; the offsets (0, 0) then cause the error below.
    start, stop = _record(data, 0) or (0, 0)
    if not stop or not _parses(meta, data[start:stop]):
        flaw = foreign(data) or "this is not a demonstration: its header cannot be read"
        raise DemonstrationError(f"{path}: {flaw}")
    if meta.api_version not in API_VERSIONS:
        raise DemonstrationError(
            "Can't load Demonstration data from an unsupported version "
            f"({meta.api_version}): {path}"
        )
    # The brain parameters begin after the bytes that are reserved for the metadata.
    start, stop = _record(data, BRAIN_OFFSET) or (0, 0)
    if start == stop or not _parses(brain, data[start:stop]):
        raise DemonstrationError(f"No BrainParameters found in demonstration file at {path}.")
    records = _records(path, data, stop, meta)
    # An empty record takes one byte in the file, but a whole message in memory.
    n = len(records)
    specs.refuse_excess(n * specs.AGENT_BYTES, len(data), f"a recording of {n} steps")
    is_old, old_brain = bool(records) and _is_agent_info(records[0]), m.OldBrainParametersProto()
    # Protobuf keeps the fields of the old format as unknown fields of the present message.
    if is_old and not _parses(old_brain, brain.SerializeToString()):
        raise DemonstrationError(f"No BrainParameters found in demonstration file at {path}.")
    kind = m.OldAgentInfoProto if is_old else m.AgentInfoActionPairProto
    steps: list[Any] = [kind() for _ in records]
    for index, (step, record) in enumerate(zip(steps, records, strict=True)):
        if not _parses(step, record):
            raise _damaged(path, index, meta)
    if is_old:
        infos = [_modern_info(step, old_brain) for step in steps]
        # An old info stores the action of the previous step; the last step has no action.
        previous = [step.stored_vector_actions for step in steps[1:]]
        acted = [m.AgentActionProto(vector_actions_deprecated=action) for action in [*previous, []]]
    else:
        infos, acted = [step.agent_info for step in steps], [step.action_info for step in steps]
    return DemoMessages(meta, brain, infos, acted, len(data))


def _records(path: Path, data: bytes, stop: int, meta: m.DemonstrationMetaProto) -> list[bytes]:
    """Return the records from `stop` on: as many as the metadata say, or all if they say 0."""
    records: list[bytes] = []
    counted = meta.number_steps > 0
    while len(records) < meta.number_steps if counted else stop < len(data):
        bounds = _record(data, stop)
        if bounds is None and counted:
            raise _damaged(path, len(records), meta)
        # The copy of the metadata has no length before it, so its first bytes may be misread as the
        # length of a record.
        if not counted and _is_copy(data, stop, meta):
            break
        if bounds is None:
            _log.warning(
                "%s: its recording was never finished; the last %d bytes are not a whole step, and "
                "are left out.",
                path,
                len(data) - stop,
            )
            break
        start, stop = bounds
        records.append(data[start:stop])
    return records


def _is_copy(data: bytes, stop: int, meta: m.DemonstrationMetaProto) -> bool:
    """Return whether the bytes from `stop` on are a recorder's copy of the metadata."""
    copy = m.DemonstrationMetaProto()
    # Metadata have at most 32 bytes, because they must fit into the header.
    if len(data) - stop >= BRAIN_OFFSET or not _parses(copy, data[stop:]):
        return False
    # The counts are not compared: a copy is only looked for if the header's number of steps is 0.
    same = copy.api_version == meta.api_version
    return same and copy.demonstration_name == meta.demonstration_name


def _content(path: Path) -> bytes:
    # A missing file gets the error below, which suggests similar names.
    if path.suffix != ".demo" and not path.is_dir() and path.exists():
        raise DemonstrationError(
            f"{path}: The path provided is not a '.demo' file: it {what_is(path)}"
        )
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        record = shell_command("pipeline", "demo", "record", "ENV", "-o", path)
        hint = similar(path) or f". `{record}` makes one, or Unity's Demonstration Recorder"
        raise DemonstrationError(
            f"The demonstration file or directory {path} does not exist{hint}"
        ) from error
    except OSError as error:
        raise DemonstrationError(f"{path}: cannot be read: {error.strerror}") from error


def _damaged(path: Path, index: int, meta: m.DemonstrationMetaProto) -> DemonstrationError:
    of = f" of {meta.number_steps}" if meta.number_steps > 0 else ""
    return DemonstrationError(
        f"{path}: the file is cut off or damaged at pair {index + 1}{of}; "
        "restore the whole file, or record it again"
    )


def _record(data: bytes, position: int) -> tuple[int, int] | None:
    """Return the offsets at which the message at `position` begins and ends; None if cut off."""
    length = 0
    # A varint of 64 bits has at most ten bytes, with seven bits in each, the lowest bits first.
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


def _is_agent_info(record: bytes) -> bool:
    """Return whether a record is an agent info; a pair only has the messages 1 and 2."""
    anything = Empty()
    # Protobuf accepts unknown fields, so any record parses: the fields' numbers must be compared.
    return _parses(anything, record) and any(
        field.field_number > 2 or field.wire_type != 2
        for field in UnknownFieldSet(anything)  # type: ignore[attr-defined]  # typeshed lacks it
    )


def _modern_info(old: m.OldAgentInfoProto, brain: m.OldBrainParametersProto) -> m.AgentInfoProto:
    """Return the agent info of the present format for one of Unity's packages 0.6 to 0.11."""
    same = ("reward", "done", "max_step_reached", "id", "action_mask", "observations")
    info = m.AgentInfoProto(**{name: getattr(old, name) for name in same})
    # Old infos have images, and then one vector; the brain parameters have the images' sizes.
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


# ML-Agents' recorder shortens names to this length, so that the metadata fit into the header.
_NAME_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration(decoding.AgentInfos):
    """A demonstration as arrays with one row for each of N recorded pairs of info and action.

    A row has the rewards since the previous pair. `done` is True on an episode's last pair.
    """

    metadata: m.DemonstrationMetaProto
    """The header of the file: number of steps, 0 if the recording was not finished; number of ended
    episodes plus one; and mean reward, the sum of rewards divided by the number of ended episodes
    plus one.
    """
    behavior_name: str
    """The recorded behavior name, without a team."""
    spec: BehaviorSpec
    continuous: FloatArray
    """float32 [N, a] continuous actions."""
    discrete: IntArray
    """int32 [N, branches] discrete actions."""
    interrupted: BoolArray
    """[N], True where the episode was cut short, as by a step limit, and did not finish."""
    action_mask: list[BoolArray] | None
    """bool [N, size] per branch, True = forbidden; None without discrete actions."""

    def __len__(self) -> int:
        return len(self.reward)

    def returns(self) -> list[float]:
        """Return the summed reward of each episode that has ended."""
        return returns_of(self.reward, self.done)


def returns_of(reward: FloatArray, done: BoolArray) -> list[float]:
    """Return the summed reward of each ended episode, without the reward before its first action.

    The reward of an action is in the next of the rows [n].
    """
    ends = np.flatnonzero(done) + 1
    # Rows after the last end belong to an open episode, which has no return yet.
    parts = np.split(reward[: ends[-1]], ends[:-1]) if len(ends) else []
    return [float(sum(part[1:].tolist())) for part in parts]


def read_demo(path: Path | str) -> Demonstration:
    """Read one `.demo` file, from any version of Unity's package.

    Actions that a recorder left out (the last action of an episode) are zeros.

    Raises:
        DemonstrationError: The file is missing, not a demonstration, cut off, or of an unknown
            version, or has no steps or an impossible action.
    """
    path = Path(path)
    try:
        meta, brain, infos, acted, n_bytes = parse_demo(path)
        if not infos:
            raise DemonstrationError(
                f"{path}: the demonstration has no steps; record it again, and close the recorder "
                "at the end"
            )
        spec = decoding.behavior_spec_from(brain, infos[0])
        # A step of a few bytes may have large masks, so the memory is checked first.
        n = len(infos)
        specs.refuse_excess(n * specs.row_bytes(spec), n_bytes, f"a recording of {n} steps")
        # The decoder reads received messages, in which observations are still serialized, so the
        # infos are converted to such messages.
        listed = m.UnityRLOutputProto.ListAgentInfoProto(value=infos).SerializeToString()
        received = list(m.ReceivedAgentInfosProto.FromString(listed).value)
        batch = decoding.decode_infos(received, spec, brain.brain_name)
        actions = decode_entries(acted, spec.action_spec, absent_is_zero=True)
        _check_actions(actions, spec.action_spec)
    except (UnityException, ValueError) as error:
        raise DemonstrationError(f"{path}: {error}") from error
    return Demonstration(
        **{field.name: getattr(batch, field.name) for field in fields(batch)},
        metadata=meta,
        behavior_name=brain.brain_name.partition("?")[0],
        spec=spec,
        continuous=actions.continuous,
        discrete=actions.discrete,
        # The flag `max_step_reached` has a meaning only at the end of an episode.
        interrupted=batch.done & batch.max_step_reached,
        action_mask=decoding.decode_masks(received, spec.action_spec),
    )


def _check_actions(actions: ActionTuple, spec: ActionSpec) -> None:
    choices = actions.discrete
    # Without this check, a NaN would first appear as a NaN loss, far from its cause.
    wrong = ~np.isfinite(actions.continuous).all(axis=1)
    wrong |= ((choices < 0) | (choices >= np.array(spec.discrete_branches))).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        raise UnityActionException(
            f"the action of step {row + 1}, {actions.continuous[row]} and {choices[row]}, is not "
            f"possible in the behavior ({spec}); record the demonstration again"
        )


def describe(demo: Demonstration) -> str:
    """Return a summary of a demonstration as lines of text."""
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
    """Write one demonstration within the `with` block; if the block raises, no file is left.

    Equal calls give equal bytes.

    Args:
        path: the file, ending in `.demo`.
        behavior_name: name of the behavior; a team (`?team=0`) is left out.
        spec: specification of the behavior.
        name: name of the demonstration; if empty, the behavior's name.

    Raises:
        DemonstrationError: `path` does not end in `.demo`.
    """
    if Path(path).suffix != ".demo":
        raise DemonstrationError(f"{path}: a demonstration's name must end in '.demo'")
    behavior = behavior_name.partition("?")[0]
    # `text` has only the characters that ML-Agents' recorder keeps in a name.
    text = "".join(c for c in name or behavior if c.isascii() and (c.isalnum() or c in " -"))
    brain = brain_parameters(behavior, spec, old_fields=True)
    # Unity's recorder writes False into the file; `brain_parameters` sets True, as in the message
    # that announces a behavior to the trainer.
    brain.is_training = False
    with whole(path) as temporary, temporary.open("wb") as file:
        # These bytes are reserved for the header, which is written at the end, when the counts are
        # known.
        file.write(bytes(BRAIN_OFFSET))
        file.write(delimited_message(brain))
        writer = DemoWriter(file, spec)
        yield writer
        # One episode more is counted, as Unity's recorder does when it closes the file.
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
    """Appends steps to a demonstration; made by `writing_demo`."""

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
            obs: [n, *shape] per observation.
            actions: actions taken at these observations; any values where `done`.
            reward: [n], sum of rewards since the previous step.
            done: [n], True where an episode has ended and the observation is its last.
            interrupted: [n], True where the episode was cut short; None if no episode was.
            action_mask: [n, size] per branch, True = forbidden; None for no mask.
        """
        n = len(reward)
        # A demonstration has one agent without a group, so all ids and group rewards are 0.
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
            # Recorders of the present format leave the deprecated field empty.
            action.ClearField("vector_actions_deprecated")
        self.append_messages(infos.value, acted.value)

    def append_messages(
        self, infos: Sequence[m.AgentInfoProto], actions: Sequence[m.AgentActionProto]
    ) -> None:
        """Write consecutive steps of one agent, as messages; compressed images stay compressed."""
        for info, action in zip(infos, actions, strict=True):
            pair = m.AgentInfoActionPairProto(agent_info=info, action_info=action)
            self._file.write(delimited_message(pair))
        self.n_steps += len(infos)
        self.n_done += sum(info.done for info in infos)
        # The sum is float64, because float32 would lose small rewards in a long recording.
        self.reward += float(np.sum([info.reward for info in infos], dtype=np.float64))
