"""Builder of the zip for `recovery_function`: `python infra/build_function.py WHEEL ZIP`, or `cloudtrain==VERSION ZIP`.

The zip has cloudtrain and its core dependencies for the function's Python and Linux. The same packages give the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_PYTHON = "3.12"
_PLATFORM = "manylinux2014_x86_64"
_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_UNUSED = ("__pycache__", "bin")
_DATE = (1980, 1, 1, 0, 0, 0)


def main(wheel: str, target: str) -> None:
    """Install cloudtrain with its dependencies into a folder, and pack it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = [
            *("--quiet", "--disable-pip-version-check", "--no-compile", "--no-warn-conflicts"),
            *("--platform", _PLATFORM, "--python-version", _PYTHON, "--only-binary=:all:"),
            *("--constraint", str(_CONSTRAINTS), "--target", name),
        ]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for path in files:
                place = path.relative_to(folder)
                if place.parts[0] not in _UNUSED and "__pycache__" not in place.parts:
                    entry = zipfile.ZipInfo(str(place), _DATE)
                    entry.external_attr = 0o644 << 16
                    entry.compress_type = zipfile.ZIP_DEFLATED
                    packed.writestr(entry, path.read_bytes())
    size = Path(target).stat().st_size
    print(
        f"{target}: {size / 1e6:.1f} MB; terraform apply -var recovery_function={Path(target).absolute()}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
