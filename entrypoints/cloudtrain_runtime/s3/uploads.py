"""Streaming uploads of one object. The object becomes visible when it is complete."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypedDict

from cloudtrain_runtime.process.thread_pool import DaemonThreadPool
from cloudtrain_runtime.s3.errors import S3Error, error_code, retry_count, translate_errors

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import CompletedPartTypeDef

_PART_BYTES = 8 << 20
# Parts grow by 8 MiB every 75: 40 GB in parts of up to 64 MiB, and 5 TiB in 10,000 parts, S3's
# limits (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html, 2026-11).
_PARTS_OF_ONE_SIZE = 75
_THREADS = 8
"""S3 sends and receives about 90 MB/s per connection (docs.aws.amazon.com/AmazonS3/latest/userguide/
optimizing-performance-design-patterns.html, 2026-11): 0.7 GB/s per rank."""

Buffer = bytes | bytearray | memoryview


class ObjectPlace(TypedDict):
    """The parameters of a request that name an object."""

    Bucket: str
    Key: str


class MultipartUpload:
    """A multipart upload. It holds one part more in memory than its threads send."""

    def __init__(self, client: S3Client, bucket: str, key: str) -> None:
        self._client = client
        self._place: ObjectPlace = {"Bucket": bucket, "Key": key}
        self._doing = f"writing s3://{bucket}/{key}"
        self._part = bytearray()
        self._upload = ""
        self._total_bytes = 0
        self._sent: list[Future[str]] = []
        self._slots = threading.Semaphore(_THREADS)
        self._threads = DaemonThreadPool(_THREADS, "upload")

    def write(self, buffer: Buffer) -> None:
        """Append bytes; raise an S3Error if this part or an earlier one cannot be uploaded."""
        rest = memoryview(buffer).cast("B")
        self._total_bytes += len(rest)
        while len(rest):
            room = part_bytes(len(self._sent)) - len(self._part)
            self._part += rest[:room]
            rest = rest[room:]
            if len(self._part) == part_bytes(len(self._sent)):
                self._send()

    def complete(self) -> None:
        """Make the object visible.

        Raises:
            S3Error: the upload failed, and the object does not exist.
        """
        if not self._upload:
            with translate_errors(self._doing):
                # The stubs lack bytearray, which botocore takes.
                self._client.put_object(**self._place, Body=self._part)  # type: ignore[arg-type]
            return
        if self._part:
            self._send()
        parts: list[CompletedPartTypeDef] = [
            {"PartNumber": number, "ETag": sent.result()}
            for number, sent in enumerate(self._sent, 1)
        ]
        self._threads.close()
        with translate_errors(self._doing):
            self._finish(parts)

    def abort(self) -> None:
        """Abort the upload; the parts are deleted if S3 can be reached."""
        # A part that arrives later would stay.
        self._threads.close()
        if not self._upload:
            return
        try:
            with translate_errors(self._doing):
                self._client.abort_multipart_upload(**self._place, UploadId=self._upload)
        except S3Error:
            # The error that led to the abort is the one to report, and no object is visible.
            return

    def _send(self) -> None:
        if not self._upload:
            with translate_errors(self._doing):
                self._upload = self._client.create_multipart_upload(**self._place)["UploadId"]
        self._slots.acquire()
        for sent in self._sent[-_THREADS - 1 :]:
            if sent.done():
                sent.result()
        self._sent.append(self._threads.submit(self._send_part, len(self._sent) + 1, self._part))
        self._part = bytearray()

    def _send_part(self, number: int, part: bytearray) -> str:
        try:
            with translate_errors(self._doing):
                answer = self._client.upload_part(
                    **self._place,
                    UploadId=self._upload,
                    PartNumber=number,
                    # The stubs lack bytearray, which botocore takes.
                    Body=part,  # type: ignore[arg-type]
                )
            return str(answer["ETag"])
        finally:
            self._slots.release()

    def _finish(self, parts: list[CompletedPartTypeDef]) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client.complete_multipart_upload(
                **self._place, UploadId=self._upload, MultipartUpload={"Parts": parts}
            )
        except ClientError as error:
            # The first response was lost, and the retry says that the upload does not exist: check
            # the object itself.
            if error_code(error) != "NoSuchUpload" or not retry_count(error):
                raise
            if self._client.head_object(**self._place)["ContentLength"] != self._total_bytes:
                raise


def part_bytes(number: int) -> int:
    """Return the size of a part, counted from 0."""
    return _PART_BYTES * (1 + number // _PARTS_OF_ONE_SIZE)
