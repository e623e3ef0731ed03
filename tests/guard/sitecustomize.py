"""Network guard of the tests: denies every address except loopback, in the tests' processes and their child processes.

CLOUDTRAIN_TEST_GUARD=sealed denies every socket, for commands that must work offline.
CLOUDTRAIN_TEST_WIRE=FILE logs the headers of each request to S3 in a file.
CLOUDTRAIN_TEST_RECORD=FOLDER logs the calls to AWS in a folder, see recording.py.
CLOUDTRAIN_TEST_COSTS=FOLDER logs what each process costs in a folder, see costs.py.

tests/conftest.py puts this folder on PYTHONPATH. Audit hooks see the calls of every library.
"""

import ipaddress
import json
import os
import sys
from typing import Any


def _is_loopback(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in ("", None, "localhost", "0.0.0.0", "::", "*"):
        return True
    if host == os.uname().nodename:
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _seal(event: str, _arguments: tuple[Any, ...]) -> None:
    if event.startswith("socket."):
        raise PermissionError(f"this command is offline: {event}")


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None
        if host is not None and not _is_loopback(host):
            raise PermissionError(f"tests may not connect to {address}")
    elif event == "socket.getaddrinfo" and not _is_loopback(arguments[0]):
        raise PermissionError(f"tests may not look up {arguments[0]}")


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "http.client.send" or not isinstance(arguments[1], bytes):
        return
    head, _, _ = arguments[1].partition(b"\r\n\r\n")
    if b"/s3/aws4_request" not in head:
        return
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    line = json.dumps({"request": first, "headers": headers})
    file = os.open(
        os.environ["CLOUDTRAIN_TEST_WIRE"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.write(file, f"{line}\n".encode())  # with one write, lines of several processes do not mix
    os.close(file)


if os.environ.get("CLOUDTRAIN_TEST_WIRE"):
    sys.addaudithook(_record)
if os.environ.get("CLOUDTRAIN_TEST_GUARD"):
    sys.addaudithook(_seal if os.environ["CLOUDTRAIN_TEST_GUARD"] == "sealed" else _guard)
if os.environ.get("CLOUDTRAIN_TEST_RECORD"):
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(__file__), "recording.py"))["install"]()  # noqa: PTH118, PTH120
if os.environ.get("CLOUDTRAIN_TEST_COSTS"):
    import runpy

    runpy.run_path(os.path.join(os.path.dirname(__file__), "costs.py"))["install"]()  # noqa: PTH118, PTH120
