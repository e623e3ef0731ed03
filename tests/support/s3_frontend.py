"""HTTP front end of the S3 test server: reads requests, injects faults, executes operations on the storage.

`python -m support.s3_frontend` serves and prints its port. Requests below `/_/` control the server.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import socket
import struct
import sys
import threading
import time
import uuid
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from support.s3_faults import ERROR_RESPONSES, FaultInjector, FaultPlan
from support.s3_storage import RequestError, Storage, StoredObject, Upload, new_etag

_CONDITIONAL = ("If-None-Match", "If-Match")


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rbufsize = 1 << 16
    disable_nagle_algorithm = True
    storage: Storage
    injector: FaultInjector

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)

    def do_any(self) -> None:
        """Serve one request of any method."""
        address = urlsplit(self.path)
        self.query = {
            name: values[0]
            for name, values in parse_qs(address.query, keep_blank_values=True).items()
        }
        bucket, _, key = unquote(address.path).lstrip("/").partition("/")
        self.trailer: dict[str, str] = {}
        self.torn = self.slow = False
        body = self._body()
        if bucket == "_":
            self._control(key, body)
            return
        operation = self._operation(key)
        signed = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        fault = self.injector.next_fault(
            operation,
            signed[1] if signed else "",
            is_conditional=any(self.headers.get(name) for name in _CONDITIONAL),
        )
        self._serve(operation, bucket, key, body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    def _serve(self, operation: str, bucket: str, key: str, body: bytearray, fault: str) -> None:
        if fault == "silent":
            self.injector.wait_while_silent()
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
        except RequestError as error:
            self._send(
                error.status,
                f"<Error><Code>{error.code}</Code><Message>{error.message}</Message></Error>",
            )

    def _body(self) -> bytearray:
        is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "")
        if is_chunked or "aws-chunked" in self.headers.get("Content-Encoding", ""):
            return self._chunks(int(self.headers.get("X-Amz-Decoded-Content-Length", "0")))
        body = bytearray(int(self.headers.get("Content-Length") or 0))
        self._fill(memoryview(body))
        return body

    def _chunks(self, bytes_: int) -> bytearray:
        """Read a chunked body. AWS's chunks with trailing checksums have the format of HTTP's chunks."""
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
                raise ConnectionError("the client closed the connection")
            position += count

    def _check(self, body: bytearray, fault: str) -> None:
        if fault in ERROR_RESPONSES:
            raise RequestError(*ERROR_RESPONSES[fault])
        expected = self.headers.get("x-amz-checksum-crc32") or self.trailer.get(
            "x-amz-checksum-crc32"
        )
        if expected and expected != base64.b64encode(struct.pack(">I", zlib.crc32(body))).decode():
            raise RequestError(400, "BadDigest", "The checksum did not match.")

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
                time.sleep(self.injector.plan.slow_seconds)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

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
        return {
            "GET": "GetObject",
            "HEAD": "HeadObject",
            "PUT": "PutObject",
            "DELETE": "DeleteObject",
        }[method]

    def _CreateBucket(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self.storage.create_bucket(bucket)
        self._send(200, Location=f"/{bucket}")

    def _HeadBucket(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self.storage.bucket(bucket)
        self._send(200, x_amz_bucket_region="us-west-2")

    def _PutObject(self, bucket: str, key: str, body: bytearray) -> None:  # noqa: N802
        etag = self.storage.put(
            bucket, key, [body], *(self.headers.get(name) for name in _CONDITIONAL)
        )
        self._send(200, ETag=etag)

    def _HeadObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        found = self.storage.get(bucket, key)
        self._begin(200, found.bytes_, _object_headers(found))

    def _GetObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        found = self.storage.get(bucket, key)
        total = found.bytes_
        start, end, status = 0, total, 200
        headers = _object_headers(found)
        if requested := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(requested[1])
            end = min(int(requested[2]) + 1 if requested[2] else total, total)
            if start >= total:
                raise RequestError(416, "InvalidRange", "The requested range is not satisfiable")
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{total}"
        self._begin(status, end - start, headers)
        for data in found.read_range(start, end):
            self._write(data)

    def _DeleteObject(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        self.storage.delete(bucket, key)
        self._send(204)

    def _DeleteObjects(self, bucket: str, _key: str, body: bytearray) -> None:  # noqa: N802
        self.storage.bucket(bucket)
        for element in ET.fromstring(bytes(body)).iter():  # noqa: S314
            if element.tag.endswith("Key"):
                self.storage.delete(bucket, element.text or "")
        self._send(200, "<DeleteResult/>")

    def _ListObjectsV2(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = min(int(self.query.get("max-keys", "1000")), 1000)
        with self.storage.lock:
            keys = sorted(k for k in self.storage.bucket(bucket) if k.startswith(prefix))
        entries: dict[str, str] = {}
        for key in keys:
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if cut < 0 else key[: cut + len(delimiter)]
            if name <= after or name in entries:
                continue
            if len(entries) == limit:
                break
            entries[name] = self._entry(bucket, key, name, is_common=cut >= 0)
        is_truncated = bool(entries) and any(
            key > f"{list(entries)[-1]}" and not _is_below_last(key, entries) for key in keys
        )
        token = (
            f"<NextContinuationToken>{escape(list(entries)[-1])}</NextContinuationToken>"
            if is_truncated
            else ""
        )
        encoding = (
            "<EncodingType>url</EncodingType>" if self.query.get("encoding-type") == "url" else ""
        )
        self._send(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(entries)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{encoding}{token}{''.join(entries.values())}</ListBucketResult>",
        )

    def _entry(self, bucket: str, key: str, name: str, *, is_common: bool) -> str:
        if self.query.get("encoding-type") == "url":
            name = quote(name)
        if is_common:
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        found = self.storage.buckets[bucket].get(key)
        if found is None:
            return ""
        when = datetime.fromtimestamp(found.modified, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified>"
            f"<ETag>{escape(found.etag)}</ETag><Size>{found.bytes_}</Size></Contents>"
        )

    def _CreateMultipartUpload(self, bucket: str, key: str, _body: bytearray) -> None:  # noqa: N802
        self.storage.bucket(bucket)
        upload = uuid.uuid4().hex
        self.storage.uploads[upload] = Upload(bucket, key, {})
        self._send(
            200,
            f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
        )

    def _UploadPart(self, _bucket: str, _key: str, body: bytearray) -> None:  # noqa: N802
        etag = new_etag()
        self._upload().parts[int(self.query["partNumber"])] = (etag, body)
        self._send(200, ETag=etag)

    def _CompleteMultipartUpload(self, bucket: str, key: str, body: bytearray) -> None:  # noqa: N802
        parts = self._upload().parts
        numbers = [
            int(element.text or 0)
            for element in ET.fromstring(bytes(body)).iter()  # noqa: S314
            if element.tag.endswith("PartNumber")
        ]
        if (
            not numbers
            or numbers != sorted(set(numbers))
            or any(number not in parts for number in numbers)
        ):
            raise RequestError(400, "InvalidPart")
        pieces = [parts[number][1] for number in numbers]
        etag = self.storage.put(
            bucket, key, pieces, *(self.headers.get(name) for name in _CONDITIONAL)
        )
        self.storage.uploads.pop(self.query["uploadId"], None)
        self._send(
            200,
            f"<CompleteMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>",
        )

    def _AbortMultipartUpload(self, _bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        self._upload()
        self.storage.uploads.pop(self.query["uploadId"], None)
        self._send(204)

    def _ListMultipartUploads(self, bucket: str, _key: str, _body: bytearray) -> None:  # noqa: N802
        rows = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{upload_id}</UploadId></Upload>"
            for upload_id, upload in list(self.storage.uploads.items())
            if upload.bucket == bucket
        )
        self._send(
            200,
            f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{rows}</ListMultipartUploadsResult>",
        )

    def _upload(self) -> Upload:
        return self.storage.upload(self.query["uploadId"])

    def _control(self, name: str, body: bytearray) -> None:
        if name == "faults":
            fields = json.loads(body)
            self.injector.set_plan(
                FaultPlan(**{**fields, "expired_keys": tuple(fields["expired_keys"])})
            )
            self._json({})
        elif name.startswith("reset/"):
            self.storage.reset(name.removeprefix("reset/"))
            self._json({})
        elif name == "counts":
            self._json(dict(self.injector.counts))
        elif name == "keys":
            self._json(list(self.injector.keys))
        elif name == "credentials":
            self._json(self._credentials())

    def _credentials(self) -> dict[str, str]:
        """Return new credentials that expire after 60 s, as the credentials endpoint of a container does."""
        with self.injector.lock:
            self.injector.counts["credentials"] += 1
            number = self.injector.counts["credentials"]
        until = datetime.now(UTC) + timedelta(seconds=60)
        return {
            "AccessKeyId": f"CONTAINER{number}",
            "SecretAccessKey": "secret",
            "Token": "token",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content))


def _object_headers(found: StoredObject) -> dict[str, str]:
    return {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.modified, usegmt=True),
        "Accept-Ranges": "bytes",
    }


def _is_below_last(key: str, entries: dict[str, str]) -> bool:
    last = list(entries)[-1]
    return last.endswith("/") and key.startswith(last)


class _Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, ValueError)):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve until standard input ends. The first line of standard output is the port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    _Request.storage = Storage(options.folder)
    _Request.injector = FaultInjector()
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
