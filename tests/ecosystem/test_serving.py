"""Models of runs behind real Ray Serve processes. `make test-all`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.jobs import EXAMPLES, command, until
from support.serving import JSON, Content, digit_requests, malformed_requests, send_all, sender

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="NOT TESTED: Ray is not installed here (make test-all)",
    ),
]

REQUESTS = 1000
INVOCATIONS = 1000
MALFORMED = 200
SLOW = 80


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="serving-", dir="/tmp") as folder:
        shutil.copytree(EXAMPLES / "digits", Path(folder) / "digits")
        yield Path(folder)


def environment(home: Path) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CLOUDTRAIN_", "RAY_"))
    }
    return {**own, "HOME": str(home), "CLOUDTRAIN_HOME": str(home / ".cloudtrain")}


@pytest.fixture(scope="module", autouse=True)
def example() -> Iterator[subprocess.Popen[str]]:
    """examples/digits/endpoint.py with one epoch, which runs beside the other tests in a sandbox of its own."""
    with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as folder:
        shutil.copytree(EXAMPLES / "digits", Path(folder) / "digits")
        environ, job = environment(Path(folder)), Path(folder) / "digits" / "job.yaml"
        job.write_text(
            job.read_text(encoding="utf-8").replace("epochs: 12", "epochs: 1"), encoding="utf-8"
        )
        program = [sys.executable, "endpoint.py"]
        started = subprocess.Popen(
            program,
            cwd=Path(folder) / "digits",
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        yield started
        if started.poll() is None:
            started.kill()
            started.communicate()
        subprocess.run(
            [str(command()), "sandbox", "--stop"], env=environ, check=False, capture_output=True
        )


@pytest.fixture(scope="module")
def run(home: Path) -> str:
    """A finished run of the example on this machine."""
    options = [
        "--set",
        "train.epochs=1",
        "--set",
        "train.export=best",
        "--set",
        "cluster.processes_per_instance=1",
    ]
    options += ["--set", "code.env.OMP_NUM_THREADS='1'"]  # as in direct_answers
    submit = [
        str(command()),
        "submit",
        "job.yaml",
        "--local",
        "--instances",
        "1",
        *options,
        "--json",
    ]
    started = subprocess.check_output(submit, cwd=home / "digits", env=environment(home), text=True)
    name = str(json.loads(started)["run"])
    subprocess.check_output(
        [str(command()), "follow", name], cwd=home / "digits", env=environment(home)
    )
    return name


@pytest.fixture(scope="module")
def server(home: Path, run: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`cloudtrain serve` with its address; its end by Ctrl-C is a test of its own."""
    started = subprocess.Popen(
        [str(command()), "serve", run, "--json", "--log", str(home / "server.log")],
        env=environment(home),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    lines = iter(started.stdout.readline, "}\n")
    text = "".join([*lines, "}"])
    assert text != "}", (home / "server.log").read_text(encoding="utf-8")[-3000:]
    yield json.loads(text)["url"], started
    if started.poll() is None:
        started.terminate()
        started.wait(300)
    started.stdout.close()


def direct_answers(home: Path, run: str, contents: list[Content]) -> list[Any]:
    """Return what the Task's model answers without any server, in a process of its own."""
    weights = home / ".cloudtrain" / "runs" / run / "model" / "model.pt"
    np.savez(home / "images.npz", *[each.images for each in contents])
    program = f"""
import numpy as np, torch
from digits import Digits
torch.set_num_threads(1)  # on a busy machine, two threads wait for each other in every layer
model = Digits().model()
model.load_state_dict(torch.load({str(weights)!r}, weights_only=True))
model.eval()
with torch.inference_mode(), np.load({str(home / "images.npz")!r}) as images:
    found = [model(torch.from_numpy(images[name])).numpy() for name in images.files]
np.savez({str(home / "answers.npz")!r}, *found)
"""
    subprocess.run([sys.executable, "-c", program], cwd=home / "digits", check=True)
    with np.load(home / "answers.npz") as answers:
        return [answers[name] for name in answers.files]


@pytest.fixture(scope="module")
def expected(home: Path, run: str) -> list[Any]:
    return direct_answers(home, run, digit_requests(REQUESTS))


def test_requests_get_the_answers_of_a_direct_call(
    expected: list[Any], server: tuple[str, Any]
) -> None:
    contents = digit_requests(REQUESTS)
    answers = send_all(sender(server[0]), contents)
    assert {status for status, _ in answers} == {200}
    for (_, body), wanted in zip(answers, expected, strict=True):
        outputs = np.asarray(json.loads(body)["outputs"], np.float32)
        np.testing.assert_allclose(outputs, wanted, rtol=1e-4, atol=1e-5)
        assert outputs.argmax(1).tolist() == wanted.argmax(1).tolist()


def test_malformed_requests_get_4xx_and_no_crash(home: Path, server: tuple[str, Any]) -> None:
    answers = send_all(sender(server[0]), malformed_requests(MALFORMED))
    assert all(400 <= status < 500 and json.loads(body)["error"] for status, body in answers)
    assert sender(server[0])(Content(JSON, bytes(7 * 2**20)))[0] == 413
    with urllib.request.urlopen(f"{server[0]}/ping") as ping:  # noqa: S310 (loopback)
        assert ping.status == 200
    log = (home / "server.log").read_text(encoding="utf-8")
    assert log.count(" is loaded\n") == 1, "a replica was started again"


def test_slow_requests_keep_nobody_outside(server: tuple[str, Any]) -> None:
    """Each sends one byte of its content, and no more; after the time for a body each gets 408."""
    address = ("127.0.0.1", int(server[0].rpartition(":")[2]))
    head = f"POST /invocations HTTP/1.1\r\nHost: 127.0.0.1:{address[1]}\r\n"
    head += f"Content-Type: {JSON}\r\nContent-Length: 100\r\n\r\n["
    slow = [socket.create_connection(address, timeout=120) for _ in range(SLOW)]
    for each in slow:
        each.sendall(head.encode())
    answers = send_all(sender(server[0]), digit_requests(20))
    assert {status for status, _ in answers} == {200}
    readable, _, _ = select.select(slow, [], [], 0)
    assert not readable, "the others waited until the slow ones had ended"
    with urllib.request.urlopen(f"{server[0]}/ping") as ping:  # noqa: S310 (loopback)
        assert ping.status == 200
    for each in slow:
        assert each.recv(100).startswith(b"HTTP/1.1 408"), "a slow request was not ended"
        each.close()


def test_small_images_of_many_pixels_do_not_fill_the_memory(
    home: Path, server: tuple[str, Any]
) -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGBA", (5700, 5700)).save(out, "PNG")
    contents = [Content("image/png", out.getvalue())] * 16
    most = 0

    def measure() -> None:
        nonlocal most
        while not done.wait(0.1):
            with contextlib.suppress(psutil.Error):
                most = max(most, *(each.memory_info().rss for each in processes_below(server[1])))

    done = threading.Event()
    watcher = threading.Thread(target=measure)
    watcher.start()
    with ThreadPoolExecutor(16) as clients:
        answers = list(clients.map(sender(server[0]), contents))
    done.set()
    watcher.join()
    # The model takes one channel of 8 x 8. A request that waited too long may try again.
    assert {status for status, _ in answers} <= {400, 503}
    assert most < 3 * 2**30, f"{most / 2**30:.1f} GiB"
    log = (home / "server.log").read_text(encoding="utf-8")
    assert log.count(" is loaded\n") == 1, "a replica was started again"


def test_web_pages_are_refused(server: tuple[str, Any]) -> None:
    port = server[0].rpartition(":")[2]
    for headers in ({"Origin": "http://evil.example"}, {"Host": f"evil.example:{port}"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(f"{server[0]}/ping", headers=headers))  # noqa: S310
        assert refused.value.code == 403
        refused.value.close()


def processes_below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_other_ports_need_the_certificate(server: tuple[str, Any]) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for each in processes_below(server[1])
        for connection in each.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    exposed = sorted(
        port
        for address, port in listening
        if not address.removeprefix("::ffff:").startswith("127.")
    )
    assert exposed, "Ray no longer opens such a port: the certificate may be superfluous"
    for port in exposed:
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.settimeout(10)
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))  # gRPC without TLS
            assert connection.recv(100)[:1] in (b"", b"\x15")  # closed, or an alert of TLS


def test_ctrl_c_ends_all_processes(server: tuple[str, Any]) -> None:
    started = processes_below(server[1])
    folders = {each.environ().get("RAY_TMPDIR", "") for each in started} - {""}
    assert len(started) > 5
    assert folders
    server[1].send_signal(signal.SIGINT)
    assert server[1].wait(300) == 0
    until(
        lambda: (
            not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)
        )
    )
    assert not [folder for folder in folders if Path(folder).exists()]


def test_sigterm_while_a_server_starts_leaves_nothing(home: Path, run: str, tmp_path: Path) -> None:
    environ = {**environment(home), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [str(command()), "serve", run], env=environ, stdout=subprocess.DEVNULL
    )
    until(lambda: any("ray" in Path(each.name()).name for each in processes_below(process)))
    processes = processes_below(process)
    process.terminate()
    assert process.wait(300) == 128 + signal.SIGTERM
    assert [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ] == []
    assert list(tmp_path.glob("cloudtrain-serve-*")) == []


def test_gpus_that_are_missing_are_named_at_once(home: Path, run: str) -> None:
    environ = {**environment(home), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(command()), "serve", run, "--gpus", "1"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "1 x 1 GPUs are needed, and this machine has 0" in done.stderr


def test_a_checkpoint_that_does_not_exist_is_named(home: Path, run: str) -> None:
    argv = [str(command()), "serve", run, "--checkpoint", "7"]
    done = subprocess.run(argv, env=environment(home), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "step 7" in done.stderr


def run_python(home: Path, program: str) -> str:
    return subprocess.check_output(
        [sys.executable, "-c", program], cwd=home / "digits", env=environment(home), text=True
    )


@pytest.fixture(scope="module")
def sandbox(home: Path) -> Iterator[None]:
    yield
    stop = [str(command()), "sandbox", "--stop", "--home", str(home / ".cloudtrain" / "sandbox")]
    subprocess.run(stop, env=environment(home), check=False, capture_output=True)


ENDPOINT = """
import json, pathlib, sys
import numpy as np
from concurrent.futures import ThreadPoolExecutor
from botocore.exceptions import ClientError
sys.path.insert(0, TESTS)
import cloudtrain
from support.serving import digit_requests, malformed_requests
options = cloudtrain.serving.EndpointOptions(name="same", scaling=(1, 2))
first = cloudtrain.deploy(RUN, options, sandbox=True)
again = cloudtrain.deploy(RUN, options, sandbox=True)
client = first.account.client("sagemaker-runtime")

def send(content):
    try:
        found = client.invoke_endpoint(EndpointName="same", Body=content.body, ContentType=content.kind)
        return 200, json.loads(found["Body"].read())["outputs"]
    except ClientError as error:
        return error.response["OriginalStatusCode"], error.response["OriginalMessage"]

with ThreadPoolExecutor(8) as clients:
    answers = list(clients.map(send, digit_requests(INVOCATIONS)))
    refused = list(clients.map(send, malformed_requests(40)))
np.savez("endpoint.npz", *[np.asarray(outputs, np.float32) for _, outputs in answers])
listed = cloudtrain.list_endpoints()
deleted = cloudtrain.undeploy("same", sandbox=True)
left = cloudtrain.list_endpoints()
costs = cloudtrain.costs(backend=["sandbox"])
print(json.dumps({
    "costs": [each.to_json() for each in costs.endpoints],
    "statuses": sorted({status for status, _ in answers}),
    "refused": sorted({status for status, _ in refused}),
    "existed": [first.existed, again.existed],
    "listed": [each.to_json() for each in listed],
    "deleted": deleted,
    "left": len(left),
}))
"""


@pytest.mark.usefixtures("sandbox")
def test_an_endpoint_of_the_sandbox_gives_the_same_answers(
    home: Path, run: str, expected: list[Any]
) -> None:
    tests = str(Path(__file__).parents[1])
    program = f"TESTS, RUN, INVOCATIONS = {tests!r}, {run!r}, {INVOCATIONS}\n{ENDPOINT}"
    done = json.loads(run_python(home, program))
    assert done["statuses"] == [200]
    assert set(done["refused"]) <= {400, 415}
    assert done["existed"] == [False, True]
    (listed,) = done["listed"]
    assert (listed["name"], listed["status"], listed["is_idle"]) == ("same", "InService", False)
    assert listed["invocations"] >= INVOCATIONS
    assert [each.split()[0] for each in done["deleted"]] == [
        "scaling",
        "endpoint",
        "endpoint",
        "model",
    ]
    assert done["left"] == 0
    (cost,) = done["costs"]
    assert (cost["endpoint"], cost["run"], cost["state"]) == ("same", f"sandbox:{run}", "Deleted")
    assert (cost["instance_type"], cost["instances"], cost["billable_seconds"] > 0) == (
        "ml.m5.xlarge",
        1,
        True,
    )
    with np.load(home / "digits" / "endpoint.npz") as answers:
        for name, wanted in zip(answers.files, expected[:INVOCATIONS], strict=True):
            np.testing.assert_allclose(answers[name], wanted, rtol=1e-4, atol=1e-5)


def test_the_example_trains_deploys_invokes_and_deletes(example: subprocess.Popen[str]) -> None:
    assert len((EXAMPLES / "digits" / "endpoint.py").read_text(encoding="utf-8").splitlines()) <= 10
    out, err = example.communicate()
    assert example.returncode == 0, err
    lines = out.splitlines()
    assert lines[0] == "10 scores"
    assert [line.split()[0] for line in lines[1:]] == ["endpoint", "endpoint", "model"]
