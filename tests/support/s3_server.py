"""A light S3 server on loopback, in a process of its own, with weather.

It keeps what checkpoints need of S3: conditional writes, multipart uploads, chunked bodies with trailing checksums,
ranges and listings. It checks no signatures. moto is the more exact one; this one is fast, lasts on disk and can fail.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

_PIECE_BYTES = 1 << 20
_CONDITIONAL = ("If-None-Match", "If-Match")


@dataclass(frozen=True)
class Weather:
    """What goes wrong, as shares of the requests from 0 to 1.

    Attributes:
        seed: Of the dice.
        only: Pattern of the operations that it befalls, such as `UploadPart|PutObject`; every one without.
        faults: How many may go wrong until the sky is clear for good; without it, no end.
        skip: How many of these operations pass untouched before.
        throttled: 503 SlowDown.
        broken: 500 InternalError.
        conflict: 409 ConditionalRequestConflict for conditional writes.
        reset: The connection is reset in place of an answer, and nothing is done.
        lost: What was asked is done, and the connection is reset in place of an answer.
        torn: The connection is reset in the middle of the answer's body.
        slow: The answer's body comes in pieces, `slow_seconds` apart.
        slow_seconds: Between two pieces.
        truncated: Half of an upload is stored, and answered with 200.
        silent: Nothing is done, and no answer comes for `silent_seconds`; then the connection ends.
        silent_seconds: Of that silence.
        expired: 403 ExpiredToken.
        denied: 403 AccessDenied.
        expired_keys: Access keys that get 403 ExpiredToken, by dice or not.
    """

    seed: int = 0
    only: str = ""
    faults: int | None = None
    skip: int = 0
    throttled: float = 0.0
    broken: float = 0.0
    conflict: float = 0.0
    reset: float = 0.0
    lost: float = 0.0
    torn: float = 0.0
    slow: float = 0.0
    slow_seconds: float = 0.05
    truncated: float = 0.0
    silent: float = 0.0
    silent_seconds: float = 60.0
    expired: float = 0.0
    denied: float = 0.0
    expired_keys: tuple[str, ...] = ()


_KINDS = (
    *("throttled", "broken", "conflict", "reset", "lost", "torn", "slow", "truncated", "silent"),
    *("expired", "denied"),
)
_REFUSALS = {
    "throttled": (503, "SlowDown", "Please reduce your request rate."),
    "broken": (500, "InternalError", "We encountered an internal error. Please try again."),
    "conflict": (409, "ConditionalRequestConflict", "A conflicting operation is in progress."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "denied": (403, "AccessDenied", "Access Denied"),
}


class S3Server:
    """The running server, seen from the test.

    Args:
        folder: Where the objects lie; in memory without one.
        weather: From the start on.
    """

    def __init__(self, folder: Path | None, weather: Weather) -> None:
        self.folder = folder
        self.port = 0
        self.start(weather)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, weather: Weather | None = None) -> None:
        """Start the process; again after `kill`, at the same address."""
        command = [sys.executable, "-S", "-E", __file__, "--port", str(self.port)]
        command += ["--folder", str(self.folder)] if self.folder else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.set_weather(weather or Weather())

    def kill(self) -> None:
        """End the process at once, as a power cut does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def set_weather(self, weather: Weather) -> None:
        """Change the weather from the next request on."""
        self._ask("weather", json.dumps(dataclasses.asdict(weather)).encode())

    def reset(self, bucket: str) -> None:
        """Forget everything, and make one empty bucket. The counts go on."""
        self._ask(f"reset/{bucket}", b"")
        self.set_weather(Weather())

    def counts(self) -> Counter[str]:
        """Return how often each operation was asked for, and each fault was given."""
        return Counter(self._ask("counts"))

    def access_keys(self) -> list[str]:
        """Return the access keys seen so far, each once, in order."""
        return list(self._ask("keys"))

    def _ask(self, name: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(f"{self.endpoint}/_/{name}", data, timeout=30) as answer:  # noqa: S310
            return json.load(answer)


@contextlib.contextmanager
def serve_s3(folder: Path | None = None, weather: Weather | None = None) -> Iterator[S3Server]:
    """Serve S3 on loopback until the block ends."""
    server = S3Server(folder, weather or Weather())
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()


# ---------------------------------------------------------------- the server's process


class _Refused(Exception):  # noqa: N818
    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message or code


@dataclass
class _Object:
    etag: str
    modified: float
    pieces: list[bytearray]  # in memory
    path: Path | None = None  # or in a file

    @property
    def bytes_(self) -> int:
        return self.path.stat().st_size if self.path else sum(len(piece) for piece in self.pieces)


class _Store:
    """Buckets, objects and uploads; below a folder they outlive the process."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.uploads: dict[str, tuple[str, str, dict[int, tuple[str, bytearray]]]] = {}
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            for bucket in (path for path in folder.iterdir() if path.is_dir()):
                self.buckets[bucket.name] = {
                    unquote(path.name): _Object(_etag(), path.stat().st_mtime, [], path)
                    for path in bucket.iterdir()
                    if not path.name.startswith(".")
                }

    def create_bucket(self, bucket: str) -> None:
        with self.lock:
            self.buckets.setdefault(bucket, {})
        if self.folder:
            (self.folder / bucket).mkdir(exist_ok=True)

    def reset(self, bucket: str) -> None:
        for name, objects in list(self.buckets.items()):
            for key in list(objects):
                self.delete(name, key)
        self.uploads.clear()
        self.create_bucket(bucket)

    def bucket(self, name: str) -> dict[str, _Object]:
        if name not in self.buckets:
            raise _Refused(404, "NoSuchBucket", "The specified bucket does not exist")
        return self.buckets[name]

    def get(self, bucket: str, key: str) -> _Object:
        found = self.bucket(bucket).get(key)
        if found is None:
            raise _Refused(404, "NoSuchKey", "The specified key does not exist.")
        return found

    def put(self, bucket: str, key: str, pieces: list[bytearray], none_match: str | None, match: str | None) -> str:
        made = _Object(_etag(), time.time(), pieces)
        if self.folder:
            made.path = self.folder / bucket / quote(key, safe="")
            draft = made.path.with_name(f".{uuid.uuid4().hex}")
            with draft.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
            made.pieces = []
        with self.lock:
            objects = self.bucket(bucket)
            there = objects.get(key)
            if match is not None and there is None:
                raise _Refused(404, "NoSuchKey")
            if (none_match == "*" and there) or (match is not None and there and there.etag != match):
                raise _Refused(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
            if made.path:
                draft.rename(made.path)
            objects[key] = made
        return made.etag

    def delete(self, bucket: str, key: str) -> None:
        with self.lock:
            gone = self.bucket(bucket).pop(key, None)
            if gone and gone.path:
                gone.path.unlink()


def _etag() -> str:
    return f'"{uuid.uuid4().hex}"'


class _Sky:
    """Rolls the dice of the weather, and counts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, None] = {}
        self.set(Weather())

    def set(self, weather: Weather) -> None:
        with self.lock:
            self.weather = weather
            self.dice = random.Random(weather.seed)  # noqa: S311
            self.skip, self.left = weather.skip, weather.faults

    def fault(self, operation: str, key: str, *, is_conditional: bool) -> str:
        """Return what befalls a request: one of _KINDS, or an empty string."""
        with self.lock:
            self.counts[operation] += 1
            self.keys[key] = None
            if key in self.weather.expired_keys:
                return "expired"
            if self.left == 0 or not re.fullmatch(self.weather.only or ".*", operation):
                return ""
            if self.skip > 0:
                self.skip -= 1
                return ""
            for kind in _KINDS:
                share = getattr(self.weather, kind)
                if share and (kind != "conflict" or is_conditional) and self.dice.random() < share:
                    self.left = None if self.left is None else self.left - 1
                    self.counts[kind] += 1
                    return kind
        return ""


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rbufsize = 1 << 16
    disable_nagle_algorithm = True
    store: _Store
    sky: _Sky

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)

    def do_any(self) -> None:
        """Answer one request of any method."""
        address = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(address.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        self.trailer: dict[str, str] = {}
        self.torn = self.slow = False
        body = self._body()
        if bucket == "_":
            self._control(key, body)
            return
        operation = self._operation(key)
        signed = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        fault = self.sky.fault(
            operation,
            signed[1] if signed else "",
            is_conditional=any(self.headers.get(name) for name in _CONDITIONAL),
        )
        self._answer(operation, bucket, key, body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    def _answer(self, operation: str, bucket: str, key: str, body: bytearray, fault: str) -> None:
        if fault == "silent":
            time.sleep(self.sky.weather.silent_seconds)
        if fault in ("reset", "silent"):
            self._reset()
            return
        self.torn, self.slow, self.lost = fault == "torn", fault == "slow", fault == "lost"
        if fault == "truncated" and operation in ("PutObject", "UploadPart"):
            del body[len(body) // 2 :]
        try:
            if fault != "truncated":
                self._check(body, fault)
            getattr(self, f"_{operation}")(bucket, key, body)
        except _Refused as refused:
            self._send(
                refused.status, f"<Error><Code>{refused.code}</Code><Message>{refused.message}</Message></Error>"
            )

    # ---------------- bodies

    def _body(self) -> bytearray:
        is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        if is_chunked or "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return self._chunks(int(self.headers.get("X-Amz-Decoded-Content-Length", "0")))
        body = bytearray(int(self.headers.get("Content-Length") or 0))
        self._fill(memoryview(body))
        return body

    def _chunks(self, bytes_: int) -> bytearray:
        """Read a chunked body; AWS's chunks with trailing checksums look like HTTP's own."""
        body, position = bytearray(bytes_), 0
        while count := int(self.rfile.readline().partition(b";")[0], 16):
            if position + count > len(body):
                body.extend(bytes(position + count - len(body)))
            with memoryview(body) as view:
                self._fill(view[position : position + count])
            position += count
            self.rfile.readline()
        while line := self.rfile.readline().strip():
            name, _, value = line.decode().partition(":")
            self.trailer[name.lower()] = value.strip()
        return body

    def _fill(self, view: memoryview) -> None:
        position = 0
        while position < len(view):
            count = self.rfile.readinto(view[position:])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("the client went away")
            position += count

    def _check(self, body: bytearray, fault: str) -> None:
        if fault in _REFUSALS:
            raise _Refused(*_REFUSALS[fault])
        expected = self.headers.get("x-amz-checksum-crc32") or self.trailer.get("x-amz-checksum-crc32")
        if expected and expected != base64.b64encode(struct.pack(">I", zlib.crc32(body))).decode():
            raise _Refused(400, "BadDigest", "The checksum did not match.")

    # ---------------- answers

    def _send(self, status: int, text: str | bytes = "", **headers: str) -> None:
        data = text.encode() if isinstance(text, str) else text
        self._begin(status, len(data), headers)
        if data and self.command != "HEAD":
            self._write(memoryview(data))

    def _begin(self, status: int, bytes_: int, headers: dict[str, str]) -> None:
        if getattr(self, "lost", False):
            self._reset()
            raise ConnectionError
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(bytes_))
        self.end_headers()

    def _write(self, data: memoryview) -> None:
        if self.torn:
            self.wfile.write(data[: len(data) // 2])
            self._reset()
            raise ConnectionError
        step = max(len(data) // 8, 1) if self.slow else len(data)
        for start in range(0, len(data), step):
            self.wfile.write(data[start : start + step])
            if self.slow:
                time.sleep(self.sky.weather.slow_seconds)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    # ---------------- operations

    def _operation(self, key: str) -> str:
        query, method = self.query, self.command
        if not key:
            if method == "POST":
                return "DeleteObjects"
            if method == "GET":
                return "ListMultipartUploads" if "uploads" in query else "ListObjectsV2"
            return {"PUT": "CreateBucket", "HEAD": "HeadBucket"}[method]
        if method == "POST":
            return "CreateMultipartUpload" if "uploads" in query else "CompleteMultipartUpload"
        if "uploadId" in query:
            return {"PUT": "UploadPart", "DELETE": "AbortMultipartUpload"}[method]
        return {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}[method]

    def _CreateBucket(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self.store.create_bucket(bucket)
        self._send(200, Location=f"/{bucket}")

    def _HeadBucket(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self.store.bucket(bucket)
        self._send(200, x_amz_bucket_region="us-west-2")

    def _PutObject(self, bucket: str, key: str, body: bytearray) -> None:  # noqa: N802
        etag = self.store.put(bucket, key, [body], *(self.headers.get(name) for name in _CONDITIONAL))
        self._send(200, ETag=etag)

    def _HeadObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        found = self.store.get(bucket, key)
        self._begin(200, found.bytes_, _stamps(found))

    def _GetObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        found = self.store.get(bucket, key)
        total = found.bytes_
        start, end, status = 0, total, 200
        headers = _stamps(found)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(wanted[1])
            end = min(int(wanted[2]) + 1 if wanted[2] else total, total)
            if start >= total:
                raise _Refused(416, "InvalidRange", "The requested range is not satisfiable")
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{total}"
        self._begin(status, end - start, headers)
        for data in _cut(found, start, end):
            self._write(data)

    def _DeleteObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        self.store.delete(bucket, key)
        self._send(204)

    def _DeleteObjects(self, bucket: str, _key: str, body: bytearray) -> None:  # noqa: N802
        self.store.bucket(bucket)
        for element in ET.fromstring(bytes(body)).iter():  # noqa: S314
            if element.tag.endswith("Key"):
                self.store.delete(bucket, element.text or "")
        self._send(200, "<DeleteResult/>")

    def _ListObjectsV2(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = min(int(self.query.get("max-keys", "1000")), 1000)
        with self.store.lock:
            keys = sorted(k for k in self.store.bucket(bucket) if k.startswith(prefix))
        entries: dict[str, str] = {}
        for key in keys:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            if name <= after or name in entries:
                continue
            if len(entries) == limit:
                break
            entries[name] = self._entry(bucket, key, name, is_common=cut >= 0)
        is_cut = bool(entries) and any(key > f"{list(entries)[-1]}" and not _under(key, entries) for key in keys)
        token = f"<NextContinuationToken>{escape(list(entries)[-1])}</NextContinuationToken>" if is_cut else ""
        encoding = "<EncodingType>url</EncodingType>" if self.query.get("encoding-type") == "url" else ""
        self._send(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(entries)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(is_cut).lower()}</IsTruncated>{encoding}{token}{''.join(entries.values())}</ListBucketResult>",
        )

    def _entry(self, bucket: str, key: str, name: str, *, is_common: bool) -> str:
        if self.query.get("encoding-type") == "url":
            name = quote(name)
        if is_common:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        found = self.store.buckets[bucket].get(key)
        if found is None:
            return ""
        when = datetime.fromtimestamp(found.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag><Size>{found.bytes_}</Size></Contents>"
        )

    def _CreateMultipartUpload(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        self.store.bucket(bucket)
        upload = uuid.uuid4().hex
        self.store.uploads[upload] = (bucket, key, {})
        self._send(
            200,
            f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
        )

    def _UploadPart(self, _bucket: str, _key: str, body: bytearray) -> None:  # noqa: N802
        etag = _etag()
        self._upload()[2][int(self.query["partNumber"])] = (etag, body)
        self._send(200, ETag=etag)

    def _CompleteMultipartUpload(self, bucket: str, key: str, body: bytearray) -> None:  # noqa: N802
        parts = self._upload()[2]
        numbers = [
            int(element.text or 0)
            for element in ET.fromstring(bytes(body)).iter()  # noqa: S314
            if element.tag.endswith("PartNumber")
        ]
        if not numbers or numbers != sorted(set(numbers)) or any(number not in parts for number in numbers):
            raise _Refused(400, "InvalidPart")
        pieces = [parts[number][1] for number in numbers]
        etag = self.store.put(bucket, key, pieces, *(self.headers.get(name) for name in _CONDITIONAL))
        self.store.uploads.pop(self.query["uploadId"], None)
        self._send(
            200,
            f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>",
        )

    def _AbortMultipartUpload(self, _bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self._upload()
        self.store.uploads.pop(self.query["uploadId"], None)
        self._send(204)

    def _ListMultipartUploads(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        rows = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>"
            for upload, (of, key, _) in list(self.store.uploads.items())
            if of == bucket
        )
        self._send(
            200, f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{rows}</ListMultipartUploadsResult>"
        )

    def _upload(self) -> tuple[str, str, dict[int, tuple[str, bytearray]]]:
        found = self.store.uploads.get(self.query["uploadId"])
        if found is None:
            raise _Refused(404, "NoSuchUpload", "The specified upload does not exist.")
        return found

    # ---------------- what the test asks

    def _control(self, name: str, body: bytearray) -> None:
        if name == "weather":
            fields = json.loads(body)
            self.sky.set(Weather(**{**fields, "expired_keys": tuple(fields["expired_keys"])}))
            self._json({})
        elif name.startswith("reset/"):
            self.store.reset(name.removeprefix("reset/"))
            self._json({})
        elif name == "counts":
            self._json(dict(self.sky.counts))
        elif name == "keys":
            self._json(list(self.sky.keys))
        elif name == "credentials":
            self._json(self._credentials())

    def _credentials(self) -> dict[str, str]:
        """Return credentials as a container's credentials address does: new ones each time, soon to be renewed."""
        with self.sky.lock:
            self.sky.counts["credentials"] += 1
            number = self.sky.counts["credentials"]
        until = datetime.now(UTC) + timedelta(seconds=60)
        return {
            "AccessKeyId": f"CONTAINER{number}",
            "SecretAccessKey": "secret",
            "Token": "token",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content))


def _stamps(found: _Object) -> dict[str, str]:
    return {"ETag": found.etag, "Last-Modified": formatdate(found.modified, usegmt=True), "Accept-Ranges": "bytes"}


def _cut(found: _Object, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of a range, piece by piece."""
    if found.path:
        with found.path.open("rb") as file:
            file.seek(start)
            while start < end and (data := file.read(min(_PIECE_BYTES, end - start))):
                start += len(data)
                yield memoryview(data)
        return
    position = 0
    for piece in found.pieces:
        first, last = max(start - position, 0), min(end - position, len(piece))
        if first < last:
            yield memoryview(piece)[first:last]
        position += len(piece)


def _under(key: str, entries: dict[str, str]) -> bool:
    last = list(entries)[-1]
    return last.endswith("/") and key.startswith(last)


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, ValueError)):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve; the first line of standard output is the port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    _Request.store = _Store(options.folder)
    _Request.sky = _Sky()
    server = _Server(("127.0.0.1", options.port), _Request)
    print(server.server_address[1], flush=True)
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
