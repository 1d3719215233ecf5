"""The messages of a demonstration file, in the layouts of every package version.

A file is delimited metadata, brain parameters at byte 33, then one record per step: a pair of agent
info and action, or up to package 0.11 an agent info that stores the action of the step before. The
metadata count the steps. A recorder writes them when it closes the file, then also a copy behind
the last record; until then they count none, and the records go on to the end of the file.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from pipeline.errors import DemonstrationError, shell_command
from pipeline.files import foreign, similar, what_is
from pipeline.protocol import wire
from pipeline.protocol.generated.messages import (
    PNG,
    AgentActionProto,
    AgentInfoActionPairProto,
    AgentInfoProto,
    BrainParametersProto,
    DemonstrationMetaProto,
    OldAgentInfoProto,
    OldBrainParametersProto,
)
from pipeline.protocol.specs import AGENT_BYTES, DimensionProperty, refuse_excess

_log = logging.getLogger(__name__)

# Recorders reserve 32 bytes for the metadata, and one for their length.
BRAIN_OFFSET = 33
# What ML-Agents reads; its recorders write 1.
API_VERSIONS = (0, 1)
_CHANNELS_LAST = (
    DimensionProperty.TRANSLATIONAL_EQUIVARIANCE,
    DimensionProperty.TRANSLATIONAL_EQUIVARIANCE,
    DimensionProperty.NONE,
)


class DemoMessages(NamedTuple):
    """What a file holds; one info and one action per step."""

    meta: DemonstrationMetaProto
    brain: BrainParametersProto
    infos: list[AgentInfoProto]
    actions: list[AgentActionProto]
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
    meta, brain = DemonstrationMetaProto(), BrainParametersProto()
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
    pairs = [AgentInfoActionPairProto() for _ in records]
    for index, (pair, record) in enumerate(zip(pairs, records, strict=True)):
        if not _parses(pair, record):
            raise _damaged(path, index, meta)
    infos = [pair.agent_info for pair in pairs]
    return DemoMessages(meta, brain, infos, [pair.action_info for pair in pairs], len(data))


def _records(path: Path, data: bytes, stop: int, meta: DemonstrationMetaProto) -> list[bytes]:
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


def _is_copy(data: bytes, stop: int, meta: DemonstrationMetaProto) -> bool:
    """Return whether the last bytes are the metadata that a recorder leaves at the end."""
    copy = DemonstrationMetaProto()
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


def _damaged(path: Path, index: int, meta: DemonstrationMetaProto) -> DemonstrationError:
    of = f" of {meta.number_steps}" if meta.number_steps > 0 else ""
    return DemonstrationError(
        f"{path}: the file is cut off or damaged at pair {index + 1}{of}; "
        "restore the whole file, or record it again"
    )


def _record(data: bytes, position: int) -> tuple[int, int] | None:
    """Return where the message at `position` starts and stops, None if it is cut off."""
    head = _varint(data, position)
    if head is None or sum(head) > len(data):
        return None
    length, start = head
    return start, start + length


def _varint(data: bytes, position: int) -> tuple[int, int] | None:
    """Return a varint's value and where it ends, None if it does not within 64 bits."""
    value = 0
    # Ten bytes are the most that 64 bits take, seven in each.
    for shift, byte in zip(range(0, 64, 7), data[position : position + 10], strict=False):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + shift // 7 + 1
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
    meta: DemonstrationMetaProto,
    brain: BrainParametersProto,
    records: list[bytes],
    n_bytes: int,
) -> DemoMessages:
    """Return today's messages for the agent infos of packages 0.6 to 0.11.

    An info stores the action of the step before, so a step's action comes from the info after it;
    the last step has none.
    """
    old_brain = OldBrainParametersProto()
    # Fields that today's announcement does not have come through it as unknown ones.
    if not _parses(old_brain, brain.SerializeToString()):
        raise DemonstrationError(f"No BrainParameters found in demonstration file at {path}.")
    infos, actions = [], []
    for index, record in enumerate(records):
        old = OldAgentInfoProto()
        if not _parses(old, record):
            raise _damaged(path, index, meta)
        infos.append(_modern_info(old, old_brain))
        actions.append(AgentActionProto(vector_actions_deprecated=old.stored_vector_actions))
    return DemoMessages(meta, brain, infos, [*actions[1:], AgentActionProto()], n_bytes)


def _modern_info(old: OldAgentInfoProto, brain: OldBrainParametersProto) -> AgentInfoProto:
    info = AgentInfoProto(
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
            compression_type=PNG,
            compressed_data=image,
        )
    if old.stacked_vector_observation:
        vector = info.observations.add(shape=[len(old.stacked_vector_observation)])
        vector.float_data.data.extend(old.stacked_vector_observation)
    return info
