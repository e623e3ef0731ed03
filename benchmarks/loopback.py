"""S3 server on loopback for benchmarks, with one bucket."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from measure import REPOSITORY

_MAKE_BUCKET = """
import sys
import boto3
location = {"LocationConstraint": "us-west-2"}
boto3.client("s3").create_bucket(Bucket=sys.argv[1], CreateBucketConfiguration=location)
"""


@contextlib.contextmanager
def serve_bucket(name: str) -> Iterator[str]:
    """Serve S3; yield the URI of a new bucket. Sets the AWS variables of this process's environment."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from support.s3_server import serve_s3

    with serve_s3() as server:
        os.environ.update(
            AWS_ENDPOINT_URL=server.endpoint,
            AWS_ACCESS_KEY_ID="testing",
            AWS_SECRET_ACCESS_KEY="testing",  # noqa: S106 (of a server on loopback)
            AWS_DEFAULT_REGION="us-west-2",
            AWS_EC2_METADATA_DISABLED="true",
        )
        # In a child process: this process may fork later and must hold no connection.
        subprocess.run([sys.executable, "-c", _MAKE_BUCKET, name], check=True)
        yield f"s3://{name}"
