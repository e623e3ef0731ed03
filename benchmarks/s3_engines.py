"""Measure uploads and reads of one object with `S3Objects` and with the clients alone, on a server on loopback.

python benchmarks/s3_engines.py [--rounds 5] [--mib 496]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from measure import describe_machine
from support.s3_server import serve_s3

from cloudtrain_runtime.s3.objects import S3Objects

BUCKET = "bench"
BLOCK = os.urandom(8 << 20)
VARIABLE = "CLOUDTRAIN_S3_ENGINE"


def main() -> None:
    """Print MB/s: medians over the rounds, and ratios of the same round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=496)
    options = parser.parse_args()
    count = options.mib // 8
    with serve_s3() as server, tempfile.NamedTemporaryFile() as file:
        os.environ.update(AWS_ENDPOINT_URL=server.endpoint, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b")  # noqa: S106
        os.environ.update(AWS_DEFAULT_REGION="us-west-2", AWS_EC2_METADATA_DISABLED="true")
        server.reset(BUCKET)
        for _ in range(count):
            file.write(BLOCK)
        file.flush()
        rates = measure_in_turns(ways(server.endpoint, count, file.name), options.rounds, count * len(BLOCK))
    print(f"{count * len(BLOCK) / 1e6:.0f} MB, {describe_machine()}, medians of {options.rounds}")
    base = "raw s3torchconnector"
    for name, own in rates.items():
        ratio = statistics.median(a / b for a, b in zip(own, rates[base], strict=True))
        print(f"{name:32} {statistics.median(own):6.0f} MB/s  {min(own):.0f} to {max(own):.0f}  {ratio:.2f} x {base}")


def measure_in_turns(ways: dict[str, Callable[[], None]], rounds: int, bytes_: int) -> dict[str, list[float]]:
    """Return MB/s by name, without the first round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        # In both orders, so that no variant always follows the slowest one.
        for name, way in list(ways.items())[:: -1 if turn % 2 else 1]:
            began = time.perf_counter()
            way()
            if turn:
                rates[name].append(bytes_ / 1e6 / (time.perf_counter() - began))
    return rates


def ways(endpoint: str, count: int, path: str) -> dict[str, Callable[[], None]]:
    """Return the measured functions by name."""
    import boto3
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    raw = S3Checkpoint("us-west-2", endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
    client = boto3.client("s3")

    def by_connector() -> None:
        with raw.writer(f"s3://{BUCKET}/raw") as writer:
            for _ in range(count):
                writer.write(BLOCK)

    def writing(objects: S3Objects) -> Callable[[], None]:
        def write() -> None:
            with objects.create("ours", count * len(BLOCK)) as writer:
                for _ in range(count):
                    writer.write(BLOCK)

        return write

    def reading(objects: S3Objects) -> Callable[[], None]:
        def read() -> None:
            with objects.open("ours", count * len(BLOCK)) as source:
                for number in range(count):
                    source.read_at(number * len(BLOCK), len(BLOCK))

        return read

    return {
        "raw s3torchconnector": by_connector,
        "Objects, s3torchconnector": writing(objects_with("s3torchconnector")),
        "boto3 upload_file": lambda: client.upload_file(path, BUCKET, "raw"),
        "Objects, boto3": writing(objects_with("boto3")),
        "reading, Objects": reading(objects_with("boto3")),
        "reading, raw s3torchconnector": lambda: len(raw.reader(f"s3://{BUCKET}/ours").read()) and None,
    }


def objects_with(engine: str) -> S3Objects:
    """Return objects of one engine."""
    os.environ[VARIABLE] = engine
    return S3Objects(f"s3://{BUCKET}")


if __name__ == "__main__":
    main()
