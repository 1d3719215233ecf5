"""A server on loopback with the parts of the Hugging Face Hub's API that push and pull use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGE = (".onnx", ".png", ".gif")
"""Suffixes of binary files, which the Hub wants to be uploaded separately from the commit."""
TOKEN = "hf_ours"  # noqa: S105  # not a secret
_REPO = r"(?P<repo>[^/]+/[^/]+)"


class Hub:
    """Repositories with one branch, and the received requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.errors: dict[str, int] = {}
        """HTTP status for requests with a path that contains the key."""

    def revision(self, repo: str) -> str:
        """Return a commit id that depends on the content alone."""
        content = sorted((name, data.hex()) for name, data in self.repos[repo].items())
        return hashlib.sha1(json.dumps(content).encode(), usedforsecurity=False).hexdigest()

    def commit(self, repo: str, lines: list[dict]) -> None:
        """Apply the lines of a commit to a repository."""
        files = self.repos[repo]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self._path()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, 401)
        if status := self._error(self.path):
            return self._json({"error": "told so"}, status)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            exists = name in self.hub.repos
            self.hub.repos.setdefault(name, {".gitattributes": b"*.onnx filter=lfs\n"})
            return self._json(
                {"url": f"{self.hub.url}/{name}", "name": name}, 409 if exists else 200
            )
        if match := re.fullmatch(rf"/api/models/{_REPO}/preupload/main", path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if match := re.fullmatch(rf"/{_REPO}\.git/info/lfs/objects/batch", path):
            objects = [
                {
                    "oid": entry["oid"],
                    "size": entry["size"],
                    "actions": {"upload": {"href": f"{self.hub.url}/objects/{entry['oid']}"}},
                }
                for entry in json.loads(body)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(rf"/api/models/{_REPO}/commit/main", path):
            self.hub.commit(match["repo"], [json.loads(line) for line in body.splitlines()])
            revision = self.hub.revision(match["repo"])
            url = f"{self.hub.url}/{match['repo']}/commit/{revision}"
            return self._json({"success": True, "commitUrl": url, "commitOid": revision})
        return self._json({"error": path}, 404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        oid = self._path().rpartition("/")[2]
        if status := self._error(self.path):
            return self._json({"error": "told so"}, status)
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        return self._json({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self._path()
        if status := self._error(path):
            return self._json({"error": "told so"}, status)
        if match := re.fullmatch(rf"/api/models/{_REPO}(/revision/[^/]+)?", path):
            if match["repo"] not in self.hub.repos:
                return self._json({"error": "Repository not found"}, 404, "RepoNotFound")
            names = [{"rfilename": name} for name in self.hub.repos[match["repo"]]]
            revision = self.hub.revision(match["repo"])
            return self._json({"id": match["repo"], "sha": revision, "siblings": names})
        if match := re.fullmatch(rf"/api/models/{_REPO}/tree/[^/]+(/.*)?", path):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.hub.repos[match["repo"]].items()
            ]
            return self._json(entries)
        if match := re.fullmatch(rf"/{_REPO}/resolve/[^/]+/(?P<name>.+)", path):
            data = self.hub.repos[match["repo"]][match["name"]]
            etag = f'"{hashlib.sha256(data).hexdigest()}"'
            headers = {"X-Repo-Commit": self.hub.revision(match["repo"]), "ETag": etag}
            return self._send(200, data, headers)
        return self._json({"error": path}, 404)

    def _path(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        return path

    def _error(self, path: str) -> int:
        return next((code for part, code in self.hub.errors.items() if part in path), 0)

    def _json(self, value: object, status: int = 200, code: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, json.dumps(value).encode(), headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub() -> Iterator[Hub]:
    """Run the server on a port that the system chooses."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    _Handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield _Handler.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
