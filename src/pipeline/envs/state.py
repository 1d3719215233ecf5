"""The trainer's end of the state side channel (`protocol.state`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.envs.side_channels import SideChannel
from pipeline.protocol import state as codec
from pipeline.protocol.side_channels import STATE, OutgoingMessage
from pipeline.protocol.state import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.protocol.side_channels import IncomingMessage

_SILENT = "it does not speak the state side channel (docs/explanation/resume.md)"


# Bytes of messages that are kept, before they are given up: of a run that never asks for states.
_MOST = 64_000_000


class StateChannel(SideChannel):
    """Asks with the first message whether the environment can give its state.

    The last known state and what the environment has been sent since say where it is now. Register
    the channel after those that change the environment, so that a state has what they say.

    Attributes:
        refusal: why the environment does not give its state; None if it does.
        state: the last that came, as `take` gives it; None where it is not known.
        from_start: whether the messages begin with the first one that it was sent.
        messages: sent since then, oldest first; the last may be without an answer.
    """

    def __init__(self) -> None:
        super().__init__(STATE)
        # Until an answer comes: an environment without the channel says nothing at all.
        self.refusal: str | None = _SILENT
        self.state: Mapping[str, Any] | None = None
        self.from_start = True
        self.messages: list[bytes] = []
        self._n_bytes = 0
        self._asked_at: int | None = None  # how many messages were sent before
        self._kept: Mapping[str, Any] = {}
        self._given: dict[str, Any] | None = None
        self._is_restored = False
        self._send(Kind.CAN)

    def sent(self, message: bytes) -> None:
        """Note what has been sent."""
        if self.state is None and self._asked_at is None and (self.messages or not self.from_start):
            self.give_up()  # nobody has asked for a state after the first reset
            return
        self.messages.append(message)
        self._n_bytes += len(message)
        if self._n_bytes > _MOST:
            self.give_up()

    def give_up(self) -> None:
        """Forget everything, until a state is asked for."""
        self.state, self._asked_at, self.from_start = None, None, False
        self.messages, self._n_bytes = [], 0

    def know(self, state: Mapping[str, Any]) -> None:
        """Take in the state that was asked for, and forget what was sent before."""
        if self._asked_at is not None:
            self.state, self.from_start = state, False
            del self.messages[: self._asked_at]
            self._asked_at = None
            self._n_bytes = sum(map(len, self.messages))

    def ask(self, kept: Mapping[str, Any]) -> None:
        """Ask for the state as it is before the next step, if the environment gives it.

        `take` returns `kept` with it.
        """
        if self.refusal is not None:
            if self.state is None:  # it has never given one
                self.give_up()
            return
        self._kept, self._given = kept, None
        self._asked_at = len(self.messages)
        self._send(Kind.STATE)

    def take(self) -> dict[str, Any] | None:
        """Return the state that came after the last `ask`, and what was kept; once."""
        given, self._given = self._given, None
        return given

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give back what `take` returned, with the next reset, which then begins no episodes.

        Raises:
            ValueError: It is no state.
        """
        self._is_restored = False
        self._send(Kind.RESTORE, saved["environment"].tobytes())

    def check_restored(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError, with its reason, if the environment has not taken the state up."""
        if not self._is_restored:
            raise ValueError(self.refusal or "the environment has not taken up its state")
        # As if it had been asked for now: what was sent before is in it.
        self._asked_at = len(self.messages)
        self.know(saved)

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Take an answer in."""
        kind, content = codec.read(msg.get_raw_bytes())
        if kind == Kind.CAN:
            self.refusal = None
        elif kind == Kind.STATE:
            # As an array, because checkpoints hold plain values and arrays only.
            given = np.frombuffer(content, dtype=np.uint8).copy()
            self._given = {"environment": given, **self._kept}
            self.know(self._given)
        elif kind == Kind.RESTORE:
            self._is_restored = True
        else:
            # Cut off, since it comes from another process and goes into messages.
            self.refusal = content.decode(errors="replace")[:1000]

    def _send(self, kind: Kind, content: bytes = b"") -> None:
        message = OutgoingMessage()
        message.set_raw_bytes(codec.message(kind, content))
        self.queue_message_to_send(message)
