"""S3Server: the requests of S3 that s3fs makes for small files, answered from memory on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_TIME = "2026-01-31T12:00:00.000Z"
_HTTP_TIME = "Sat, 31 Jan 2026 12:00:00 GMT"


class S3Server:
    """A server while the context lasts; `objects` maps "bucket/key" to bytes.

    `before`, if set, is called with the method and "bucket/key" of each request; the request fails with the status that
    it returns.
    """

    def __init__(self, *buckets: str) -> None:
        self.buckets, self.objects = set(buckets), dict[str, bytes]()
        self.before: Callable[[str, str], int | None] = lambda method, name: None

    def __enter__(self) -> S3Server:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which clients of AWS find the server."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_MAX_ATTEMPTS": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    store: S3Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Callable[[], None]) -> None:
        url = urlsplit(self.path)
        self.name = unquote(url.path).strip("/")
        self.query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status = self.store.before(self.command, self.name)
        if status is not None:
            self._error(status, "AccessDenied" if status == 403 else "InternalError")
        elif self.name.partition("/")[0] not in self.store.buckets:
            self._error(404, "NoSuchBucket")
        else:
            method()

    def _get(self) -> None:
        if "/" not in self.name:
            self._list(self.query.get("prefix", ""), self.query.get("delimiter", ""))
        elif self.name not in self.store.objects:
            self._error(404, "NoSuchKey")
        else:
            content, given = self.store.objects[self.name], self.headers.get("Range")
            if given is None:
                self._send(200, content)
                return
            first, last = given.removeprefix("bytes=").split("-")
            end = min(int(last or len(content)) + 1, len(content))
            headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(content)}"}
            self._send(206, content[int(first) : end], headers)

    def _put(self) -> None:
        if "/" in self.name:
            self.store.objects[self.name] = self.body
        self._send(200)

    def _delete(self) -> None:
        self.store.objects.pop(self.name, None)
        self._send(204)

    def _list(self, prefix: str, delimiter: str) -> None:
        keys, folders = [], set()
        for name in sorted(self.store.objects):
            bucket, _, key = name.partition("/")
            if bucket == self.name and key.startswith(prefix):
                head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                folders.add(prefix + head + found) if found else keys.append(key)
        rows = [
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_TIME}</LastModified><ETag>x</ETag>"
            f"<Size>{len(self.store.objects[f'{self.name}/{key}'])}</Size></Contents>"
            for key in keys
        ]
        rows += [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        count = f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._send(200, f"<ListBucketResult>{count}{''.join(rows)}</ListBucketResult>".encode())

    def _error(self, status: int, code: str) -> None:
        self._send(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        tag = md5(content, usedforsecurity=False).hexdigest()
        for key, value in {"ETag": f'"{tag}"', "Last-Modified": _HTTP_TIME, **(headers or {})}.items():
            self.send_header(key, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
