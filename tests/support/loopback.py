"""A web server on this machine that serves ranges, and on request fails or drops connections."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Site:
    """The server's files, its faults, and the received requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.etag: str | None = '"one"'
        self.drops: list[int] = []
        """Bytes of the body after which the connection breaks, for each of the next requests."""
        self.errors: list[int] = []
        """HTTP status of the answer, for each of the next requests."""
        self.hold = threading.Event()
        """While the event is not set, bodies wait after their first byte."""
        self.hold.set()
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each received request."""
        self.arrived = threading.Semaphore(0)

    def add(self, name: str, content: bytes) -> str:
        """Serve a file, and return its URL."""
        self.files[f"/{name}"] = content
        return f"{self.url}/{name}"


@contextmanager
def site() -> Iterator[Site]:
    """Run the server on a port that the system chooses."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked_range = self.headers.get("Range")
            served.asked.append((self.path, asked_range))
            served.arrived.release()
            content = served.files.get(self.path.partition("?")[0])
            status = served.errors.pop(0) if served.errors else 404 if content is None else 0
            if status or content is None:
                self.send_error(status)
                return
            start = 0
            if asked_range and self.headers.get("If-Range") == served.etag:
                start = int(asked_range.removeprefix("bytes=").removesuffix("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header(
                    "Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}"
                )
            else:
                self.send_response(200)
            if served.etag:
                self.send_header("ETag", served.etag)
            body = content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if served.drops:
                body = body[: served.drops.pop(0)]
                self.close_connection = True
            self.wfile.write(body[:1])
            served.hold.wait(30)
            self.wfile.write(body[1:])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = Site(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            served.hold.set()
            server.shutdown()
            thread.join()
