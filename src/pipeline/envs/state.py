"""The trainer's end of the state side channel (`protocol.state`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.envs.side_channels import SideChannel
from pipeline.protocol import state
from pipeline.protocol.side_channels import STATE, OutgoingMessage
from pipeline.protocol.state import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.protocol.side_channels import IncomingMessage

_SILENT = "it does not speak the state side channel (docs/explanation/resume.md)"


class StateChannel(SideChannel):
    """Asks with the first message whether the environment can give its state.

    Register it after the channels that change the environment, so that a state has what they say.

    Attributes:
        refusal: why the environment does not give its state; None if it does.
    """

    def __init__(self) -> None:
        super().__init__(STATE)
        # Until an answer comes: an environment without the channel says nothing at all.
        self.refusal: str | None = _SILENT
        self._kept: Mapping[str, Any] | None = None
        self._given: bytes | None = None
        self._is_restored = False
        self._send(Kind.CAN)

    def ask(self, kept: Mapping[str, Any]) -> None:
        """Ask for the state as it is before the next step.

        Args:
            kept: what `take` returns with it.
        """
        self._kept, self._given = kept, None
        self._send(Kind.STATE)

    def take(self) -> dict[str, Any] | None:
        """Return the state that came after the last `ask`, and what was kept; once."""
        kept, given = self._kept, self._given
        if kept is None or given is None:
            return None
        self._kept = self._given = None
        # As an array, because checkpoints hold plain values and arrays only.
        return {"environment": np.frombuffer(given, dtype=np.uint8).copy(), **kept}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give back what `take` returned, with the next reset, which then begins no episodes.

        Raises:
            ValueError: It is no state.
        """
        self._is_restored = False
        self._send(Kind.RESTORE, saved["environment"].tobytes())

    def check_restored(self) -> None:
        """Refuse an environment that has not taken the state up.

        Raises:
            ValueError: It said why not, or nothing.
        """
        if not self._is_restored:
            raise ValueError(self.refusal or "the environment has not taken up its state")

    def on_message_received(self, msg: IncomingMessage) -> None:
        """Take an answer in.

        Raises:
            UnitySideChannelException: It cannot be read.
        """
        kind, content = state.read(msg.get_raw_bytes())
        if kind == Kind.CAN:
            self.refusal = None
        elif kind == Kind.STATE:
            self._given = content
        elif kind == Kind.RESTORE:
            self._is_restored = True
        else:
            # Cut off, since it comes from another process and goes into messages.
            self.refusal = content.decode(errors="replace")[:1000]

    def _send(self, kind: Kind, content: bytes = b"") -> None:
        message = OutgoingMessage()
        message.set_raw_bytes(state.message(kind, content))
        self.queue_message_to_send(message)
