"""The trainer's end of the state side channel (`protocol.state`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.envs.side_channels import SideChannel
from pipeline.protocol import state as codec
from pipeline.protocol.side_channels import STATE, IncomingMessage
from pipeline.protocol.state import Kind

_SILENT = "it does not speak the state side channel (docs/explanation/resume.md)"
# A run that never asks for states stops recording messages when it has this many bytes of them.
_MAX_RECORDED_BYTES = 64_000_000


class StateChannel(SideChannel):
    """Asks for states, and records messages, so that a failed environment can be replayed.

    The last state and the messages since then reproduce where the environment is now. Register the
    channel after those that change the environment, so that a state has their changes in it.

    Attributes:
        refusal: why the environment does not give its state; None if it does.
        state: the last that came, as `take` returns it; None before the first.
        has_first: whether `messages` begins with the first message ever sent, so that they can be
            replayed without a state by an environment with the same seed.
        messages: recorded since `state`, oldest first; the last may be without an answer.
    """

    def __init__(self) -> None:
        super().__init__(STATE)
        # Until an answer comes: an environment without the channel does not answer at all.
        self.refusal: str | None = _SILENT
        self.state: Mapping[str, Any] | None = None
        self.has_first = True
        self.messages: list[bytes] = []
        self._n_bytes = 0
        self._asked_at: int | None = None  # how many messages were sent before
        self._extra: Mapping[str, Any] = {}
        self._answer: dict[str, Any] | None = None
        self._is_restored = False
        self._send(Kind.CAN)

    def sent(self, message: bytes) -> None:
        """Record a message for a replay."""
        if self.state is None and self._asked_at is None and (self.messages or not self.has_first):
            self.give_up()  # no state was asked for after the first reset
            return
        self.messages.append(message)
        self._n_bytes += len(message)
        if self._n_bytes > _MAX_RECORDED_BYTES:
            self.give_up()

    def give_up(self) -> None:
        """Drop state and messages: until the next state comes, no replay is possible."""
        self.state, self._asked_at, self.has_first = None, None, False
        self.messages, self._n_bytes = [], 0

    def know(self, state: Mapping[str, Any]) -> None:
        """Keep a state that came, and drop the messages from before it was asked for."""
        if self._asked_at is not None:
            self.state, self.has_first = state, False
            del self.messages[: self._asked_at]
            self._asked_at = None
            self._n_bytes = sum(map(len, self.messages))

    def ask(self, kept: Mapping[str, Any]) -> None:
        """Ask for the state before the next step, if the environment gives it.

        `take` returns `kept` with it.
        """
        if self.refusal is not None:
            if self.state is None:  # it has never given one
                self.give_up()
            return
        self._extra, self._answer = kept, None
        self._asked_at = len(self.messages)
        self._send(Kind.STATE)

    def take(self) -> dict[str, Any] | None:
        """Return the state of the last `ask`, with what `ask` was given, once; else None."""
        answer, self._answer = self._answer, None
        return answer

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Send a state of `take` with the next reset, which restores it and begins no episodes."""
        self._is_restored = False
        self._send(Kind.RESTORE, saved["environment"].tobytes())

    def check_restored(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError, with the reason, if the environment has not taken up the state."""
        if not self._is_restored:
            raise ValueError(self.refusal or "the environment has not taken up its state")
        # As if it had been asked for now: the effects of all earlier messages are in it.
        self._asked_at = len(self.messages)
        self.know(saved)

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Handle an answer: that there is a state, the state, that it is restored, or a refusal."""
        kind, content = codec.read(msg.get_raw_bytes())
        if kind == Kind.CAN:
            self.refusal = None
        elif kind == Kind.STATE:
            # As an array, because checkpoints hold plain values and arrays only.
            data = np.frombuffer(content, dtype=np.uint8).copy()
            self._answer = {"environment": data, **self._extra}
            self.know(self._answer)
        elif kind == Kind.RESTORE:
            self._is_restored = True
        else:
            # Cut off, since it comes from another process and goes into messages.
            self.refusal = content.decode(errors="replace")[:1000]

    def _send(self, kind: Kind, content: bytes = b"") -> None:
        self.message_queue.append(codec.message(kind, content))
