"""The trainer's end of the conversation on the general gRPC runtime (grpcio).

ML-Agents uses this runtime, so try it when an environment has trouble with
`pipeline.wire.transport.server`. It takes more time per exchange; see docs/reference/protocol.md.
"""

import contextlib
import logging
import math
import os
import queue
import socket
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import psutil

from pipeline.errors import UnityCommunicationException
from pipeline.wire.channels.state import MAX_STATE_BYTES
from pipeline.wire.transport import calls
from pipeline.wire.transport.peers import PeerCheck

_log = logging.getLogger(__name__)

# One thread waits with the environment's call. The other threads answer a client that reconnects,
# and calls that are refused.
_N_THREADS = 4
_OPTIONS = (
    # With SO_REUSEPORT, a second server could take the same port without an error.
    ("grpc.so_reuseport", 0),
    # The limit is twice that of a state, because a message may also have the observations of the
    # agents.
    ("grpc.max_receive_message_length", 2 * MAX_STATE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_allowed_incoming_connections", 16),
    ("grpc.max_concurrent_streams", 2),
)
_OTHER_OWNER = "another environment has this conversation"
_NOT_OVER = "the previous conversation has not ended yet: start the environment once more"
# Seconds between two checks that the owner's connection is open.
_OWNER_CHECK_S = 0.5


class GrpcServer(calls.CallServer):
    """A server with the interface of `transport.server.Server` that uses gRPC's own threads.

    A call waits in a thread of the runtime until `reply` gives the answer. This server does not
    notice an environment that disconnects between two calls, or just before an answer is sent. Then
    the launcher notices the end of the process, or the time-out ends the wait. A connection is
    identified by the client's address and port.
    """

    def __init__(self, port: int = 0, *, peers: PeerCheck | None = None) -> None:
        """Start listening; arguments and errors are those of `Server`."""
        # The runtime's fork handlers break environments that we launch while the runtime is in use.
        # Only child processes that use the runtime need the handlers (grpc/grpc:
        # doc/fork_support.md).
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        import grpc

        self._calls: queue.SimpleQueue[tuple[bytes, Future[bytes]]] = queue.SimpleQueue()
        self._pending: Future[bytes] | None = None
        self._latest: Future[bytes] | None = None
        self._owner: str | None = None
        self._peers = peers or PeerCheck()
        self._next_owner_check = 0.0
        self._lock = threading.Lock()
        self._closed = False
        self._pool = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="protocol-grpc")
        service, method = calls.METHOD.strip("/").split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(self._answer)}
        self._server = grpc.server(
            self._pool,
            handlers=[grpc.method_handlers_generic_handler(service, handlers)],
            options=_OPTIONS,
        )
        try:
            self.port = self._bind(port)
        except (RuntimeError, OSError) as error:
            self._server.stop(None)
            self._pool.shutdown()
            raise OSError(str(error)) from error
        self._server.start()

    @property
    def has_greeted(self) -> bool:
        """Whether an environment has greeted."""
        return self._owner is not None

    def _await_call(self, wait_s: float, now: float) -> tuple[bytes | None, bool]:
        del now  # `now` times the refusal of other clients, which the runtime's threads do here
        try:
            return self._next_call(wait_s), False
        except queue.Empty:
            return None, True

    def reply(self, message: bytes) -> None:
        """Answer the pending call; the runtime does not tell whether the answer was received."""
        if self._pending is None:
            raise UnityCommunicationException(calls.NO_CALL)
        # The condition is False if the client has cancelled the call in the meantime.
        if self._pending.set_running_or_notify_cancel():
            self._pending.set_result(message)
        self._pending = None

    def is_called(self, wait_s: float) -> bool:
        """Wait up to `wait_s` for an environment's greeting, and return whether one has come."""
        try:
            # The call is taken and put back for `receive`, because a queue cannot be inspected.
            self._calls.put(self._calls.get(timeout=wait_s))
        except queue.Empty:
            return False
        return True

    def release(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, and accept the next one that greets after this call."""
        self._take_last_call(wait_s)
        self._stop_calls()
        with self._lock:
            self._pending = self._latest = self._owner = self._lost_at = None

    def close(self, wait_s: float = 1.0) -> None:
        """Tell the environment to stop, wait up to `wait_s` until it reads this, free the port."""
        if self._closed:
            return
        self._take_last_call(wait_s)
        self._closed = True  # from now on, each call is answered at once with STOPPED
        self._stop_calls()
        self._server.stop(wait_s).wait()
        self._pool.shutdown()

    def _take_last_call(self, wait_s: float) -> None:
        # The environment may be about to call. This call is awaited, so that the answer can tell
        # the environment to stop; otherwise the call would fail.
        if self._pending is None and self._owner is not None and self._lost_at is None:
            with contextlib.suppress(queue.Empty):
                self._next_call(wait_s)

    def _stop_calls(self) -> None:
        if self._pending is not None:
            self.reply(calls.STOPPED)
        with contextlib.suppress(queue.Empty):
            while True:
                self._pending = self._calls.get_nowait()[1]
                self.reply(calls.STOPPED)

    def _bind(self, port: int) -> int:
        """Bind to both loopback addresses, or only to that of IPv4 if the machine has no IPv6."""
        bound: int = self._server.add_insecure_port(f"127.0.0.1:{port}")
        if bound == 0:  # older runtimes return 0 instead of raising an error
            raise OSError(f"port {port} cannot be bound")
        # The runtime would log an error if the address could not be bound.
        with contextlib.suppress(RuntimeError, OSError):
            socket.create_server(("::1", bound), family=socket.AF_INET6).close()
            self._server.add_insecure_port(f"[::1]:{bound}")
        return bound

    def _answer(self, request: bytes, context: Any) -> bytes:
        """Pass a call to `receive` and wait for `reply`, in a thread of the runtime."""
        if self._closed:
            return calls.STOPPED
        if refusal := self._refusal(request, context.peer()):
            from grpc import StatusCode

            context.abort(StatusCode.FAILED_PRECONDITION, refusal)
        reply: Future[bytes] = Future()
        self._latest = reply
        context.add_callback(lambda: self._on_call_end(reply))
        self._calls.put((request, reply))
        try:
            return reply.result()
        except CancelledError:
            return b""  # the client has gone, so nobody reads the answer

    def _refusal(self, request: bytes, peer: str) -> str | None:
        """Return why a call is refused; None accepts it, and its client becomes the owner."""
        with self._lock:
            if peer == self._owner:
                return None
            if self._owner is not None and self._is_owner_connected():
                return _OTHER_OWNER
            if not calls.can_start_or_resume(request, has_begun=self._owner is not None):
                return calls.NO_GREETING
            if self._owner is not None and calls.is_handshake(request):
                # The environment was started again, so its old conversation cannot continue.
                self._lost_at = -math.inf
                return _NOT_OVER
            if foreign := self._foreign(peer):
                _log.warning("A call on port %d is refused: %s.", self.port, foreign)
                return calls.FOREIGN
            self._owner = peer
            return None

    def _foreign(self, peer: str) -> str | None:
        """Return why the client at address `peer` may not be the environment; None if it may."""
        client, _, port = unquote(peer.partition(":")[2]).rpartition(":")
        client = client.strip("[]")
        server = "::1" if ":" in client else "127.0.0.1"
        return self._peers.refusal((client, int(port)), (server, self.port))

    def _is_owner_connected(self) -> bool:
        """Return whether the owner's connection is open; ask the system twice a second at most."""
        now = time.monotonic()
        if now < self._next_owner_check:
            return True
        # The runtime does not tell when a connection breaks, so the system is asked.
        port = int(str(self._owner).rpartition(":")[2])
        is_connected = any(
            connection.status == psutil.CONN_ESTABLISHED
            and (connection.laddr.port, connection.raddr.port) == (self.port, port)
            for connection in psutil.Process().net_connections("tcp")
        )
        if is_connected:
            self._next_owner_check = now + _OWNER_CHECK_S
        return is_connected

    def _on_call_end(self, reply: Future[bytes]) -> None:
        """Handle the end of a call; if it has no answer yet, the environment has disconnected."""
        # A future with a result cannot be cancelled.
        if reply.cancel() and reply is self._latest:
            self._lost_at = time.monotonic()

    def _next_call(self, seconds: float) -> bytes:
        request, reply = self._calls.get(timeout=seconds)
        if reply.cancelled():
            raise queue.Empty
        self._pending, self._lost_at = reply, None
        return request
