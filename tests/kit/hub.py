"""A stand-in for the Hugging Face hub: one data set, a folder, over HTTP as its client asks for it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"
IDENTITY = "somebody/routing"


@contextmanager
def hub_of(folder: Path) -> Iterator[str]:
    """Its address while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith(f"/api/datasets/{IDENTITY}/tree/"):
                self._answer(json.dumps([_listed(file, folder) for file in _files(folder)]).encode())
            elif path.startswith(f"/api/datasets/{IDENTITY}"):
                names = [{"rfilename": file.relative_to(folder).as_posix()} for file in _files(folder)]
                self._answer(json.dumps({"id": IDENTITY, "sha": COMMIT, "siblings": names}).encode())
            elif path.startswith(f"/datasets/{IDENTITY}/resolve/"):
                self._send(folder / path.split("/", 6)[6])
            else:
                self._answer(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def _send(self, file: Path) -> None:
            if not file.is_file():
                self._answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
                return
            data = file.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            self._answer(data, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _listed(file: Path, folder: Path) -> dict[str, object]:
    size, name = file.stat().st_size, file.relative_to(folder).as_posix()
    return {"type": "file", "oid": "0" * 40, "size": size, "path": name}
