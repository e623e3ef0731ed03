"""Requests to served models: digits in three forms, malformed content, and their answers."""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from cloudtrain.bundle.contents import RUNTIME_FOLDER
from cloudtrain_runtime.contract.serving_config import ServingConfig
from support.jobs import EXAMPLES, command

JSON = "application/json"
NPY = "application/x-npy"
_CLIENTS = 8


@dataclass(frozen=True)
class Content:
    """Content of a request, and the images in it where it is well-formed."""

    kind: str
    body: bytes
    images: Any = None


Answer = tuple[int, bytes]
Send = Callable[[Content], Answer]


def as_npy(array: Any) -> bytes:
    """Return an array as numpy.save writes it."""
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@contextmanager
def copied_digits() -> Iterator[Path]:
    """Copy the example into an empty folder, which is deleted in the end; yield that folder."""
    with tempfile.TemporaryDirectory(prefix="serving-", dir="/tmp") as folder:
        shutil.copytree(EXAMPLES / "digits", Path(folder) / "digits")
        yield Path(folder)


def digit_requests(count: int) -> list[Content]:
    """Return requests with one to three images each, as JSON and as NumPy arrays."""
    values = np.random.default_rng(0)
    found = []
    for index in range(count):
        images = values.integers(0, 17, (1 + index % 3, 1, 8, 8)).astype(np.float32) / 16
        is_json = index % 2 == 0
        body = json.dumps({"inputs": images.tolist()}).encode() if is_json else as_npy(images)
        found.append(Content(JSON if is_json else NPY, body, images))
    return found


def malformed_requests(count: int) -> list[Content]:
    """Return requests that a model of digits refuses: damaged, truncated and of other shapes and types."""
    chance = random.Random(0)  # noqa: S311 (test data)
    good = digit_requests(2)
    makers: Sequence[Callable[[], Content]] = (
        lambda: Content(JSON, good[0].body[: chance.randrange(1, len(good[0].body) - 1)]),
        lambda: Content(NPY, good[1].body[: chance.randrange(1, len(good[1].body) - 1)]),
        lambda: Content(
            JSON,
            json.dumps({"inputs": np.ones((1, 1, 8, chance.randrange(1, 8))).tolist()}).encode(),
        ),
        lambda: Content(NPY, as_npy(np.ones((1, chance.randrange(2, 9), 8, 8), np.float32))),
        lambda: Content(NPY, as_npy(np.array(["text"] * chance.randrange(1, 9)))),
        lambda: Content(JSON, json.dumps({"inputs": [["text"] * chance.randrange(1, 9)]}).encode()),
        lambda: Content("image/png", chance.randbytes(chance.randrange(1, 500))),
        lambda: Content(JSON, chance.randbytes(chance.randrange(1, 500))),
        lambda: Content("text/csv", b"1,2,3"),
        lambda: Content(JSON, b"[" * chance.randrange(1_000, 100_000)),
    )
    return [makers[index % len(makers)]() for index in range(count)]


def sender(url: str) -> Send:
    """Return a function that sends content to the address of a served model."""
    place = urlsplit(url)

    def send(content: Content) -> Answer:
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
        try:
            connection.request(
                "POST", f"{place.path}/invocations", content.body, {"Content-Type": content.kind}
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    return send


def send_all(send: Send, contents: Sequence[Content]) -> list[Answer]:
    """Send requests from several clients at once; return the answers in the order of the requests."""
    with ThreadPoolExecutor(_CLIENTS) as clients:
        return list(clients.map(send, contents))


def environment(home: Path) -> dict[str, str]:
    """Return the environment of commands with a home of their own."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "CLOUDTRAIN_", "RAY_"))
    }
    return {**own, "HOME": str(home), "CLOUDTRAIN_HOME": str(home / ".cloudtrain")}


def train_digits(home: Path) -> str:
    """Train one epoch of examples/digits, which is in the home; return the run."""
    options = [
        "--set",
        "train.epochs=1",
        "--set",
        "train.export=best",
        "--set",
        "cluster.processes_per_instance=1",
        # As in direct_answers.
        "--set",
        "code.env.OMP_NUM_THREADS='1'",
    ]
    submit = [str(command()), "submit", "job.yaml", "--local", "--instances", "1"]
    folder, environ = home / "digits", environment(home)
    started = subprocess.check_output(
        [*submit, *options, "--json"], cwd=folder, env=environ, text=True
    )
    name = str(json.loads(started)["run"])
    subprocess.check_output([str(command()), "follow", name], cwd=folder, env=environ)
    return name


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


def write_package(folder: Path, source: str, config: ServingConfig) -> Path:
    """Write the package of a Task whose model has no weights; return it.

    Args:
        folder: A new folder.
        source: The Task's module, which is `served.py`.
        config: How it is served.
    """
    import torch

    (folder / "code").mkdir(parents=True)
    (folder / "code" / "served.py").write_text(source, encoding="utf-8")
    (folder / "serving.json").write_text(config.to_json(), encoding="utf-8")
    torch.save({}, folder / "model.pt")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(RUNTIME_FOLDER, folder / "cloudtrain_runtime", ignore=ignored)
    return folder
