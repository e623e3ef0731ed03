"""Latency and throughput of a served model, beside a bare FastAPI server of the same model.

The model is that of examples/digits with random weights, in a package as `cloudtrain serve` makes it. Both servers run
on loopback with one model process, and get the same requests in turn: one image of 8 x 8 pixels per connection. The
bare server parses JSON and calls the model: no checks, batches or limits. Needs `pip install 'ray[serve]'`.
"""

from __future__ import annotations

import http.client
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from measure import REPOSITORY, Benchmark, Peer, Session, alternate, markdown_table

from cloudtrain.backends.container.machine import free_port
from cloudtrain.backends.container.model_server import LocalServer
from cloudtrain.bundle.contents import RUNTIME_FOLDER
from cloudtrain_runtime.contract.serving_config import ServingConfig

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a bare FastAPI server of the same model",
    goal="none: the figures show what checks, batches and Ray Serve cost",
    mechanism="each answer had the ten scores of one image",
    rounds=5,
    options={"requests": (200, "requests of each round")},
    packages=("ray", "fastapi", "torch"),
)
EXAMPLE = REPOSITORY / "examples" / "digits"
CLIENTS = (1, 8)
SCORES = 10
BODY = json.dumps({"inputs": [[[[0.5] * 8] * 8]]}).encode()

BARE = """
import sys, torch, uvicorn
from fastapi import FastAPI
sys.path.insert(0, sys.argv[1])
from digits import Digits
model = Digits().model().eval()
app = FastAPI()

@app.post("/invocations")
def invoke(content: dict):
    with torch.inference_mode():
        return {"outputs": model(torch.tensor(content["inputs"])).tolist()}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
"""


def make_package(folder: Path) -> Path:
    """Write the package of the example's model."""
    import torch

    shutil.copytree(EXAMPLE, folder / "code")
    sys.path.insert(0, str(EXAMPLE))
    import digits

    torch.save(digits.Digits().model().state_dict(), folder / "model.pt")
    shutil.copytree(
        RUNTIME_FOLDER, folder / "cloudtrain_runtime", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "serving.json").write_text(
        ServingConfig("benchmark", "digits:Digits").to_json(), encoding="utf-8"
    )
    return folder


@contextmanager
def bare_server(folder: Path) -> Iterator[int]:
    """Serve the model with FastAPI; yield the port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", BARE, str(folder / "code"), str(port)])
    try:
        while True:
            try:
                send(port)
                break
            except OSError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def send(port: int) -> int:
    """Send one request; return the number of scores in its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/invocations", BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != http.HTTPStatus.OK:
            sys.exit(content.decode())
        return len(json.loads(content)["outputs"][0])
    finally:
        connection.close()


def run_round(session: Session, port: int, clients: int) -> Mapping[str, float]:
    """Send the requests of a round; return latencies in milliseconds and requests per second."""
    requests, scores = int(session.options.requests), set[int]()

    def timed(_: int) -> float:
        began = time.perf_counter()
        scores.add(send(port))
        return (time.perf_counter() - began) * 1000

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        found = list(pool.map(timed, range(requests)))
        seconds = time.perf_counter() - began
    session.require(scores == {SCORES}, f"answers have had {scores} scores")
    cuts = statistics.quantiles(found, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "rate": requests / seconds}


def measure(session: Session) -> list[str]:
    """Measure both servers with one and with eight clients; return the table."""
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        folder = make_package(Path(name))
        with bare_server(folder) as bare, LocalServer(folder, Path(name) / "server.log") as own:
            own.wait_until_ready()
            ports = {"bare FastAPI": bare, "cloudtrain serve": own.port}
            peers = [
                Peer(f"{server}, {clients}", partial(run_round, session, port, clients))
                for server, port in ports.items()
                for clients in CLIENTS
            ]
            found = alternate(peers, session.rounds)
    rows = [
        (
            each.name,
            f"{each.median('p50'):.1f}",
            f"{each.median('p99'):.1f}",
            f"{each.median('rate'):.0f}",
        )
        for each in found
    ]
    return markdown_table(["server, clients", "p50 (ms)", "p99 (ms)", "requests per second"], rows)


if __name__ == "__main__":
    BENCHMARK.main(measure)
