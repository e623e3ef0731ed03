"""A server of one model's package on this machine: Ray and Ray Serve, on loopback only.

    python -m cloudtrain_runtime.serving.server PACKAGE --port N

It prints one line of JSON when it answers, and ends all its processes at SIGTERM, SIGINT, or when its parent ends.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cloudtrain_runtime.contract.strict_json import dump_json

_HOST = "127.0.0.1"
_STORE_BYTES = 80 * 2**20
"""Memory of Ray's object store, which a request uses only if it is large. Ray's smallest is 75 MB."""
_DAYS = 3650
_PARENT_SECONDS = 1.0


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=0)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    folder = Path(tempfile.mkdtemp(prefix="ctserve-", dir="/tmp"))
    try:
        os.environ.update(loopback_environment(folder))
        url = start(options.package.resolve(), options.port, options.gpus)
        print(dump_json({"url": url}), flush=True)
        threading.Event().wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second signal must not leave Ray's processes
        if (ray := sys.modules.get("ray")) is not None:
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _end(*_: object) -> None:
    """End the server, also while it starts: Ray waits in Python, which a signal's exception interrupts."""
    raise SystemExit(0)


def _end_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def loopback_environment(folder: Path) -> dict[str, str]:
    """Return the environment in which Ray listens on loopback, and refuses connections without this server's secrets.

    A replica's own port listens on all interfaces and reads pickle. So every connection needs the certificate, which
    is made for this server and only readable by its user.

    Args:
        folder: A new folder, for the certificate and for Ray's files.
    """
    certificate, key = _write_certificate(folder)
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to use loopback instead of the machine's address
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one into the home folder
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(certificate),
    }


def start(package: Path, port: int, gpus: int) -> str:
    """Start Ray and the package's application; return the URL when it answers."""
    import ray
    from ray import serve

    from cloudtrain_runtime.serving.application import LOOPBACK_VARIABLE, NAME, build

    os.environ[LOOPBACK_VARIABLE] = "1"

    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=max(2, os.cpu_count() or 1),
        num_gpus=gpus,
        object_store_memory=_STORE_BYTES,
        configure_logging=False,
    )
    serve.start(http_options={"host": _HOST, "port": port})
    serve.run(build(package), name=NAME, route_prefix="/")
    return f"http://{_HOST}:{port}"


def _write_certificate(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cloudtrain serve")])
    names = x509.SubjectAlternativeName(
        [x509.DNSName("localhost"), x509.IPAddress(ip_address(_HOST))]
    )
    now = datetime.now(UTC)
    built = x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(days=1)).not_valid_after(
        now + timedelta(days=_DAYS)
    )
    built = built.add_extension(names, critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    signed = built.sign(private, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    secret = private.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = {"certificate.pem": signed.public_bytes(encoding), "key.pem": secret}
    for file, content in files.items():
        descriptor = os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(content)
    return folder / "certificate.pem", folder / "key.pem"


if __name__ == "__main__":
    main()
