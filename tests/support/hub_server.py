"""A model hub on the loopback address: the part of the Hugging Face Hub's HTTP API for pushing and loading.

It keeps files in memory, accepts all uploads as "regular" files inside the commit (no LFS, no Xet), and answers writes
without the right token with 401. Unknown requests get 404 and are recorded in `unknown`. Commits are atomic, as on the
Hub.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import ModelCard

_REVISION = "[^/]+"
_REPO = "(?P<repo>[^/]+/[^/]+)"


@dataclass
class Hub:
    """Contents of the server: the files of each repository, and the summaries of all commits.

    Args:
        failures: Pairs of a part of a path and a status. A request whose path has the first pair's part gets its
            status and removes the pair. The client gives up after 403 and 501, and would retry after 500 five times.
    """

    token: str
    endpoint: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    failures: list[tuple[str, int]] = field(default_factory=list)

    @property
    def head(self) -> str:
        """Return the revision of all files: a fake git hash."""
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()

    def forget(self) -> None:
        """Delete all contents."""
        for kept in (self.files, self.commits, self.unknown, self.failures):
            kept.clear()

    # ---- handlers of requests: each takes the body and named parts of the path, and returns JSON

    def create(self, body: bytes) -> dict[str, Any]:
        wanted = json.loads(body)
        repo = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        self.files.setdefault(repo, {})
        return {"url": f"{self.endpoint}/{repo}", "name": repo, "id": repo}

    def validate(self, body: bytes) -> dict[str, Any]:
        """Reject metadata with local paths in place of Hub ids, as the Hub does."""
        metadata = ModelCard(json.loads(body)["content"]).data.to_dict()
        assert metadata, "a model card starts with its metadata"
        named = [metadata.get("base_model", []), metadata.get("datasets", [])]
        ids = [each for value in named for each in (value if isinstance(value, list) else [value])]
        wrong = [each for each in ids if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", each)]
        return {"errors": [{"message": f"{each!r} is not a valid id"} for each in wrong], "warnings": []}

    def preupload(self, body: bytes, repo: str) -> dict[str, Any]:
        paths = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}

    def commit(self, body: bytes, repo: str) -> dict[str, Any]:
        files = dict(self.files[repo])
        summary = ""
        for line in body.splitlines():
            item = json.loads(line)
            if item["key"] == "header":
                summary = item["value"]["summary"]
            elif item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            else:
                raise ValueError(f"a commit line of an unexpected kind: {item['key']}")
        self.files[repo] = files
        self.commits.append((repo, summary))
        return {"success": True, "commitUrl": f"{self.endpoint}/{repo}/commit/{self.head}", "commitOid": self.head}

    def whoami(self, body: bytes) -> dict[str, Any]:
        return {"type": "user", "name": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def info(self, body: bytes, repo: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in self.files[repo]]
        return {"id": repo, "sha": self.head, "private": False, "siblings": siblings, "tags": []}

    def tree(self, body: bytes, repo: str) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in self.files[repo].items()
        ]


_ROUTES = {
    ("POST", "/api/repos/create"): Hub.create,
    ("POST", "/api/validate-yaml"): Hub.validate,
    ("GET", "/api/whoami-v2"): Hub.whoami,
    ("POST", f"/api/models/{_REPO}/preupload/{_REVISION}"): Hub.preupload,
    ("POST", f"/api/models/{_REPO}/commit/{_REVISION}"): Hub.commit,
    ("GET", f"/api/models/{_REPO}"): Hub.info,
    ("GET", f"/api/models/{_REPO}/revision/{_REVISION}"): Hub.info,
    ("GET", f"/api/models/{_REPO}/tree/{_REVISION}"): Hub.tree,
}
_FILE = re.compile(f"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if self.command == "POST" and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, b'{"error": "Invalid token"}')
        if self.hub.failures and self.hub.failures[0][0] in path:
            _, status = self.hub.failures.pop(0)
            return self._send(status, b'{"error": "the hub is having a bad day"}')
        if (file := _FILE.fullmatch(path)) is not None:
            return self._send_file(**file.groupdict())
        for (method, pattern), answer in _ROUTES.items():
            if method == self.command and (match := re.fullmatch(pattern, path)) is not None:
                repo = match.groupdict().get("repo")
                if repo is not None and repo not in self.hub.files:
                    return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
                answered = answer(self.hub, body, **match.groupdict())
                rejected = isinstance(answered, dict) and answered.get("errors")
                return self._send(400 if rejected else 200, json.dumps(answered).encode())
        if path != "/api/agent-harnesses":  # huggingface_hub sometimes requests it on its own
            self.hub.unknown.append(f"{self.command} {path}")
        return self._send(404, b'{"error": "not here"}')

    def _send_file(self, repo: str, path: str) -> None:
        content = self.hub.files.get(repo, {}).get(path)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.head})
        etag = hashlib.sha1(content).hexdigest()
        return self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.head})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_POST = do_GET = do_HEAD = _answer


@contextmanager
def serve(token: str) -> Iterator[Hub]:
    """Run a hub at ``endpoint`` during the context; writes need ``token``."""
    hub = Hub(token)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
