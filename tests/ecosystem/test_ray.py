"""The package of a model in real Ray Serve, as AWS's image of endpoints runs it. `make test-all`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import EXAMPLES
from support.serving import (
    JSON,
    Content,
    digit_requests,
    environment,
    malformed_requests,
    send_all,
    sender,
    train_digits,
)

from cloudtrain.backends.container.machine import free_port
from cloudtrain.backends.container.model_server import LocalServer

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="NOT TESTED: Ray is not installed here (make test-all)",
    ),
]

PACKAGE = """
import sys
from pathlib import Path
import cloudtrain
from cloudtrain.features.serving.package import ServingOptions, make_package
make_package(cloudtrain.get_run(sys.argv[1]), Path(sys.argv[2]), ServingOptions())
"""
IMAGE = """
import importlib, os, sys
import ray, yaml
from ray import serve

package, port = sys.argv[1], int(sys.argv[2])
os.chdir(package)
(described,) = yaml.safe_load(open("config.yaml"))["applications"]
module, _, name = described["import_path"].partition(":")
ray.init(
    address="local", include_dashboard=False, num_cpus=2, object_store_memory=80 * 2**20,
    configure_logging=False,
)
serve.start(http_options={"host": "127.0.0.1", "port": port})
application = getattr(importlib.import_module(module), name)
serve.run(application, name=described["name"], route_prefix=described["route_prefix"])
print("ready", flush=True)
sys.stdin.read()
"""
"""What AWS's image does with a package, on loopback."""


@pytest.fixture(scope="module")
def package() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        home = Path(folder)
        shutil.copytree(EXAMPLES / "digits", home / "digits")
        made = home / "package"
        arguments = [sys.executable, "-c", PACKAGE, train_digits(home), str(made)]
        subprocess.run(arguments, env=environment(home), check=True)
        yield made


@pytest.fixture(scope="module")
def image(package: Path) -> Iterator[str]:
    """The address of Ray Serve with the package."""
    port = free_port()
    environ = {
        **os.environ,
        "PYTHONPATH": str(package),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to use loopback
        "RAY_TMPDIR": str(package.parent),
    }
    program = [sys.executable, "-c", IMAGE, str(package), str(port)]
    with subprocess.Popen(
        program, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert any(line == "ready\n" for line in process.stdout)
        yield f"http://127.0.0.1:{port}"
        process.stdin.close()


def test_ray_gives_the_answers_of_a_server_here(package: Path, image: str, tmp_path: Path) -> None:
    """Also to what AWS's adapter sends to another path, and to what is refused."""
    contents = [
        *digit_requests(200),
        *malformed_requests(50),
        Content(JSON, b""),
        Content(JSON, bytes(7 * 2**20)),
    ]
    with LocalServer(package, tmp_path / "server.log") as server:
        server.wait_until_ready()
        # One at a time: answers of batches may differ in their last bits.
        here = [sender(server.url)(each) for each in contents]
    there = [sender(image)(each) for each in contents]
    assert there == here
    assert {status for status, _ in here} == {200, 400, 413, 415}


def test_ray_answers_many_clients(image: str) -> None:
    answers = send_all(sender(image), digit_requests(200))
    assert {status for status, _ in answers} == {200}
