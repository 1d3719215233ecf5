"""Finds the process that opened a connection, and decides whether it may be the environment.

Every process and user of the machine can connect to a port, and the first client that greets owns
the conversation. So the kernel is asked for the client's socket before its greeting is accepted.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_log = logging.getLogger(__name__)

Address = tuple[str, int]

MARK = "PIPELINE_ENVIRONMENT"
"""Environment variable that marks the descendants of the environment that was started, even if
their parent process has ended."""
# Constants of Linux' netlink sockets (netlink(7), sock_diag(7)).
_SOCK_DIAG, _DIAG_BY_FAMILY, _REQUEST, _ERROR, _GONE = 4, 20, 1, 2, 2
# A field of 32 bits in which all bits are set: it means any state of the connection, or no cookie.
_ANY = 2**32 - 1
_DISCONNECTED = "the client has disconnected already"
_REMEDY = "If it is your environment, as in a container, start it yourself and give --attach"
_OTHER_USER = (
    "Let it run as the user of the trainer, or forward its port over ssh as that user: "
    "`ssh -N -L PORT:localhost:TRAINER_PORT USER@localhost`"
)


class PeerCheck:
    """Decides whether a client on this machine may be the environment.

    If the trainer starts the environment, the client must be that process, a descendant of it, or a
    process that has inherited the variable PIPELINE_ENVIRONMENT. If a person starts the
    environment, the client must be a process of the trainer's user, or of root.

    Attributes:
        mark: the value of the variable; empty if a person starts the environment.
        pid: the process that the trainer started; None before the start.
    """

    def __init__(self, *, is_started_here: bool = False) -> None:
        self.mark = secrets.token_hex(8) if is_started_here else ""
        self.pid: int | None = None

    def refusal_at(self, accepted: socket.socket) -> str | None:
        """Return why the client of a connection may not be the environment; None if it may."""
        try:
            client, server = accepted.getpeername()[:2], accepted.getsockname()[:2]
        except OSError:
            return _DISCONNECTED
        return self.refusal(client, server)

    def refusal(self, client: Address, server: Address) -> str | None:
        """Return what `refusal_at` returns, for the connection between two addresses."""
        found = _socket_of(client, server)
        if found is None:
            return self._refusal_by_process(client, server)
        uid, inode = found
        if inode == 0:
            return _DISCONNECTED
        if not self.mark:
            return None if uid in (0, os.geteuid()) else self._refused(_process_name(None, uid))
        # The client is nearly always the process that was started, or a descendant. Looking through
        # all processes takes longer.
        if any(_holds(member, inode, uid) for member in self._descendants()):
            return None
        pid = next((pid for pid in psutil.pids() if _holds(pid, inode)), None)
        return None if self._is_marked(pid) else self._refused(_process_name(pid, uid))

    def _refusal_by_process(self, client: Address, server: Address) -> str | None:
        """Return what `refusal` returns, on systems that do not report the user of a socket."""
        pid = None
        with contextlib.suppress(psutil.Error, OSError):
            for connection in psutil.net_connections("tcp"):
                if (connection.laddr, connection.raddr) == (client, server):
                    pid = connection.pid
        if pid is None:
            _log.info(
                "This system does not tell which process connects: the first client is accepted."
            )
            return None
        try:
            if self.mark:
                is_ours = self._is_marked(pid) or pid in self._descendants()
            else:
                is_ours = psutil.Process(pid).username() == psutil.Process().username()
            if is_ours:
                return None
            return self._refused(_process_name(pid, psutil.Process(pid).username()))
        except psutil.Error:
            return f"the client is process {pid}, of which the system tells nothing"

    def _descendants(self) -> Iterator[int]:
        """Yield the id of the process that was started, then the ids of its descendants."""
        if self.pid is None:
            return
        yield self.pid
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                yield process.pid

    def _is_marked(self, pid: int | None) -> bool:
        try:
            return pid is not None and psutil.Process(pid).environ().get(MARK) == self.mark
        except (psutil.Error, OSError):
            return False

    def _refused(self, who: str) -> str:
        if not self.mark:
            return f"the client is {who}. {_OTHER_USER}"
        return (
            f"the client is {who}, which is not the environment that was started (process "
            f"{self.pid}) and was not started by it. {_REMEDY}"
        )


def _socket_of(client: Address, server: Address) -> tuple[int, int] | None:
    """Return user and inode of a client's socket; (0, 0) if the socket is closed.

    None if this system does not tell: only Linux does (sock_diag(7)). The kernel finds a socket in
    constant time; reading /proc/net/tcp takes 4 us for each socket of the machine.
    """
    if sys.platform != "linux":
        return None
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    # The struct inet_diag_req_v2 of linux/inet_diag.h; ports and addresses are big-endian.
    ends = [socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (client, server)]
    query = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ANY)
    query += struct.pack(">HH", client[1], server[1]) + b"".join(ends)
    query += struct.pack("=III", 0, _ANY, _ANY)  # any interface, no cookie
    head = struct.pack("=IHHII", 16 + len(query), _DIAG_BY_FAMILY, _REQUEST, 0, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.send(head + query)
            answer = kernel.recv(4096)
        if struct.unpack_from("=H", answer, 4)[0] == _ERROR:
            return (0, 0) if struct.unpack_from("=i", answer, 16)[0] == -_GONE else None
        uid, inode = struct.unpack_from("=II", answer, 16 + 4 + 48 + 12)
    except (OSError, struct.error):
        return None  # a sandbox may forbid netlink sockets
    return uid, inode


def _holds(pid: int, inode: int, uid: int | None = None) -> bool:
    """Return whether a process has the socket `inode` open.

    If the process's files may not be read, return whether its user is `uid`, the socket's user.
    """
    process, link = Path(f"/proc/{pid}"), f"socket:[{inode}]"
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        try:
            for file in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                    if str(file.readlink()) == link:
                        return True
        except PermissionError:
            return uid is not None and process.stat().st_uid == uid
    return False


def _process_name(pid: int | None, user: int | str) -> str:
    """Return number, name and user of a process as text, as far as they can be read."""
    if isinstance(user, int):
        import pwd

        with contextlib.suppress(KeyError):
            user = pwd.getpwuid(user).pw_name
    if pid is None:
        return f"a process of user {user}"
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        name = "?"
    # The name is quoted, because a process may give itself a name with control characters.
    return f"process {pid} ({name!r}) of user {user}"
