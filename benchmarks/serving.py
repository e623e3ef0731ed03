"""Latency, throughput and start of a served model, beside a bare FastAPI server of the same model.

The model is that of examples/digits, trained for an epoch on this machine. All servers run on loopback with one process
that has the model, and get the same requests in turn: one image of 8 x 8 pixels per connection. The bare server parses
JSON and calls the model: no checks, batches, limits or log. The floor is uvicorn with a constant answer: what HTTP and
the client cost. A start is over with the first answer; that of `cloudtrain serve` includes finding the run and making
its package, and the floor of a start is a process that imports PyTorch and the Task, and ends.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import (
    BIN,
    REPOSITORY,
    Benchmark,
    Peer,
    Series,
    Session,
    alternate,
    clean_environ,
    free_port,
    markdown_table,
    seconds_of,
)

BENCHMARK = Benchmark(
    __file__,
    __doc__,
    peers="a bare FastAPI server of the same model; uvicorn with a constant answer",
    goal="half of bare FastAPI's requests per second, 2 ms with one client, a start in 8 s",
    mechanism="each answer had the ten scores of one image",
    rounds=5,
    options={"requests": (200, "requests of each round"), "starts": (3, "counted starts")},
    packages=("fastapi", "uvicorn", "torch"),
)
OWN, BARE, FLOOR = "cloudtrain serve", "bare FastAPI", "constant answer"
CLIENTS = (1, 8)
SCORES = 10
BODY = json.dumps({"inputs": [[[[0.5] * 8] * 8]]}).encode()

BARE_SERVER = """
import sys, torch, uvicorn
from fastapi import FastAPI
from digits import Digits
model = Digits().model()
model.load_state_dict(torch.load(sys.argv[2], weights_only=True))
model.eval()
app = FastAPI()

@app.post("/invocations")
def invoke(content: dict):
    with torch.inference_mode():
        return {"outputs": model(torch.tensor(content["inputs"])).tolist()}

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
FLOOR_SERVER = """
import json, sys, uvicorn
BODY = json.dumps({"outputs": [[0.5] * 10]}).encode()
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]

async def app(scope, receive, send):
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": BODY})

uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@dataclass(frozen=True)
class Trained:
    """A run of the example.

    Attributes:
        run: Its id.
        code: Folder of the example.
        weights: What it has exported.
        environ: Environment of commands.
    """

    run: str
    code: Path
    weights: Path
    environ: Mapping[str, str]


def train(folder: Path) -> Trained:
    """Train the example for an epoch."""
    code = folder / "digits"
    shutil.copytree(REPOSITORY / "examples" / "digits", code)
    environ = clean_environ(CLOUDTRAIN_HOME=str(folder / "home"), OMP_NUM_THREADS="1")
    options = ["--local", "--instances", "1", "--set", "train.epochs=1", "--json"]
    submit = [str(BIN / "cloudtrain"), "submit", "job.yaml", *options]
    run = json.loads(subprocess.check_output(submit, cwd=code, env=environ))["run"]
    subprocess.run(
        [str(BIN / "cloudtrain"), "follow", run],
        cwd=code,
        env=environ,
        check=True,
        capture_output=True,
    )
    return Trained(run, code, folder / "home" / "runs" / run / "model" / "model.pt", environ)


@contextmanager
def running(argv: list[str], port: int, trained: Trained) -> Iterator[None]:
    """Run a server from its start to its first answer; end it afterwards."""
    process = subprocess.Popen(
        argv, cwd=trained.code, env=trained.environ, stdout=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                send(port)
                break
            except OSError:
                if process.poll() is not None:
                    sys.exit(f"{argv} has ended with {process.returncode}")
                time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def commands(trained: Trained) -> dict[str, Callable[[int], list[str]]]:
    """Return the command of each server, by its port."""
    own = [str(BIN / "cloudtrain"), "serve", trained.run, "--port"]
    return {
        OWN: lambda port: [*own, str(port)],
        BARE: lambda port: [sys.executable, "-c", BARE_SERVER, str(port), str(trained.weights)],
        FLOOR: lambda port: [sys.executable, "-c", FLOOR_SERVER, str(port)],
    }


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


def measure_requests(session: Session, trained: Trained) -> list[str]:
    """Measure all servers with one and with eight clients; return the table."""
    ports = {server: free_port() for server in commands(trained)}
    with (
        running(commands(trained)[OWN](ports[OWN]), ports[OWN], trained),
        running(commands(trained)[BARE](ports[BARE]), ports[BARE], trained),
        running(commands(trained)[FLOOR](ports[FLOOR]), ports[FLOOR], trained),
    ):
        peers = [
            Peer(f"{server}, {clients}", partial(run_round, session, port, clients))
            for server, port in ports.items()
            for clients in CLIENTS
        ]
        found = {each.name: each for each in alternate(peers, session.rounds)}
    headings = ["server, clients", "p50 (ms)", "p99 (ms)", "requests per second"]
    headings += [f"x {BARE} (goal: at least 0.5)"]
    rows = [
        (
            each.name,
            f"{each.median('p50'):.1f}",
            f"{each.median('p99'):.1f}",
            f"{each.median('rate'):.0f}",
            f"{each.ratio(found[f'{BARE}, {name_clients(each)}'], 'rate'):.2f}",
        )
        for each in found.values()
    ]
    return markdown_table(headings, rows)


def name_clients(series: Series) -> str:
    """Return the number of clients in a peer's name."""
    return series.name.rpartition(" ")[2]


def measure_starts(session: Session, trained: Trained) -> list[str]:
    """Measure the time from a start to the first answer; return the table."""

    def start(server: str) -> float:
        port = free_port()
        argv = commands(trained)[server](port)
        began = time.perf_counter()
        with running(argv, port, trained):
            return time.perf_counter() - began

    def load() -> float:
        argv = [sys.executable, "-c", "import torch, digits, os; os._exit(0)"]
        return seconds_of(
            lambda: subprocess.run(argv, cwd=trained.code, env=trained.environ, check=True)
        )

    peers = [
        Peer(OWN, partial(start, OWN), "8 s"),
        Peer(BARE, partial(start, BARE)),
        Peer("import of PyTorch and the Task", load),
    ]
    found = alternate(peers, int(session.options.starts))
    rows = [
        (each.name, f"{each.median():.1f}", f"{each.ratio(found[1]):.2f}", each.goal)
        for each in found
    ]
    return markdown_table(["start to the first answer", "median s", f"x {BARE}", "goal"], rows)


def measure(session: Session) -> list[str]:
    """Measure requests and starts; return the tables."""
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        trained = train(Path(name))
        starts = measure_starts(session, trained)
        return [*measure_requests(session, trained), "", *starts]


if __name__ == "__main__":
    BENCHMARK.main(measure)
