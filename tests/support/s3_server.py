"""S3 server on loopback, in its own process, with fault injection.

The server supports what checkpoints need of S3: conditional writes, multipart uploads, chunked bodies with trailing
checksums, ranges and listings. It does not verify signatures. moto is more complete. This server is faster, keeps
objects on disk, and can inject faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.s3_faults import FaultPlan

_TESTS = Path(__file__).resolve().parents[1]


class S3Server:
    """A running server.

    Args:
        folder: Folder of the objects; in memory without one.
        plan: Faults from the start on.
    """

    def __init__(self, folder: Path | None, plan: FaultPlan) -> None:
        self.folder = folder
        self.port = 0
        self.start(plan)

    @property
    def endpoint(self) -> str:
        """Address for AWS_ENDPOINT_URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, plan: FaultPlan | None = None) -> None:
        """Start the process. After `kill`, the address stays the same."""
        # Without site packages and environment variables, Python starts fast. `-m` finds `support` in the folder.
        command = [
            sys.executable,
            "-S",
            "-E",
            "-m",
            "support.s3_frontend",
            "--port",
            str(self.port),
        ]
        command += ["--folder", str(self.folder.absolute())] if self.folder else []
        self.process = subprocess.Popen(
            command, cwd=_TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.set_faults(plan or FaultPlan())

    def kill(self) -> None:
        """Kill the process, as a power failure does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def set_faults(self, plan: FaultPlan) -> None:
        """Replace the fault plan from the next request on."""
        self._control("faults", json.dumps(dataclasses.asdict(plan)).encode())

    def reset(self, bucket: str) -> None:
        """Delete everything, create one empty bucket, and inject no faults. The counts continue."""
        self._control(f"reset/{bucket}", b"")
        self.set_faults(FaultPlan())

    def counts(self) -> Counter[str]:
        """Return the number of requests by operation, and of faults by kind."""
        return Counter(self._control("counts"))

    def access_keys(self) -> list[str]:
        """Return the access keys of all requests so far, each once, in order."""
        return list(self._control("keys"))

    def _control(self, name: str, data: bytes | None = None) -> Any:
        with urllib.request.urlopen(f"{self.endpoint}/_/{name}", data, timeout=30) as response:  # noqa: S310
            return json.load(response)


@contextlib.contextmanager
def serve_s3(folder: Path | None = None, plan: FaultPlan | None = None) -> Iterator[S3Server]:
    """Serve S3 on loopback until the block ends."""
    server = S3Server(folder, plan or FaultPlan())
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.kill()
