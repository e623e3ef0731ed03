"""Default exclusions: files and folders that a bundle excludes unless `.cloudtrainignore` names them."""

from __future__ import annotations

from collections.abc import Collection

from cloudtrain.secrets.scanner import NameTable
from cloudtrain.support.known_homes import ID_FILE
from cloudtrain.support.run_id import is_run_id

LARGE_DATA_BYTES = 10 * 10**6
"""Data files up to this size are included: code often needs a small table."""

_FOLDERS = {
    ".hg": "version control",
    ".svn": "version control",
    ".jj": "version control",
    ".venv": "virtual environment",
    "venv": "virtual environment",
    "node_modules": "packages",
    "__pycache__": "cache",
    "__pypackages__": "packages",
    ".mypy_cache": "cache",
    ".ruff_cache": "cache",
    ".pytest_cache": "cache",
    ".hypothesis": "cache",
    ".cache": "cache",
    ".tox": "virtual environments of tox",
    ".nox": "virtual environments of nox",
    ".eggs": "packages",
    ".ipynb_checkpoints": "cache",
    ".terraform": "cache of Terraform",
    ".idea": "settings of an editor",
    ".vscode": "settings of an editor",
}
_FILES = NameTable(
    {
        "cache": ("*.pyc", "*.pyo", ".coverage", ".coverage.*"),
        "receipt of a rehearsal": ("rehearsal.json",),
        "id of a folder of local runs": (ID_FILE,),
        "of the desktop": (".DS_Store", "Thumbs.db", "desktop.ini"),
    }
)
_RESULT_FOLDERS = {
    "checkpoints": "checkpoints",
    "lightning_logs": "logs and checkpoints of Lightning",
    "mlruns": "runs of MLflow",
    "wandb": "runs of Weights & Biases",
}
_RESULT_FILES = NameTable(
    {
        "weights or a checkpoint": (
            "*.ckpt",
            "*.pt",
            "*.pth",
            "*.safetensors",
            "*.gguf",
            "*.onnx",
            "*.distcp",
        ),
        "log of TensorBoard": ("events.out.tfevents.*",),
    }
)
_DATA = (
    *(
        ".arrow",
        ".csv",
        ".feather",
        ".h5",
        ".hdf5",
        ".jsonl",
        ".lmdb",
        ".mat",
        ".mdb",
        ".npy",
        ".npz",
        ".parquet",
    ),
    *(".pickle", ".pkl", ".recordio", ".tfrecord", ".tsv", ".bin", ".db", ".sqlite"),
    *(".7z", ".bz2", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"),
    *(".avi", ".flac", ".mp3", ".mp4", ".wav"),
)


def cache_reason(base: str, *, is_folder: bool) -> str | None:
    """Return why a file or folder is a cache or another by-product, or None."""
    if is_folder:
        if is_run_id(base):
            return "downloaded results of a run"
        if base.endswith((".egg-info", ".dist-info")):
            return "build output"
        return _FOLDERS.get(base)
    if _is_report(base):
        return "report of a run"
    return _FILES.find(base)


def result_reason(base: str, size: int) -> str | None:
    """Return why a file of this name and size is a result or large data, which do not belong into a bundle, or None."""
    if size > LARGE_DATA_BYTES and base.lower().endswith(_DATA):
        return (
            f"data of more than {LARGE_DATA_BYTES // 10**6} MB; a channel of the job can carry it"
        )
    return _RESULT_FILES.find(base)


def record_reason(folder: str) -> str | None:
    """Return why a folder, by its path with `/` at the end, is cloudtrain's own, or None.

    The record of runs in it changes with each submit, and the code folder may be the user's home.
    """
    if f"/{folder}".endswith("/.config/cloudtrain/"):
        return "settings and record of cloudtrain"
    return None


def environment_reason(children: Collection[str]) -> str | None:
    """Return why a folder is an environment or a cache, by the names of its children, or None."""
    if "pyvenv.cfg" in children:
        return "virtual environment"
    if "conda-meta" in children:
        return "conda environment"
    # Source: https://bford.info/cachedir/
    if "CACHEDIR.TAG" in children:
        return "cache"
    return None


def result_folder_reason(base: str, children: Collection[str]) -> str | None:
    """Return why a folder holds results, or None. A folder with Python files is a package of that name."""
    if any(name.endswith(".py") for name in children):
        return None
    return _RESULT_FOLDERS.get(base)


def _is_report(base: str) -> bool:
    """Return whether a file has the default name of a report: that of a run, or of several."""
    stem, _, suffix = base.rpartition(".")
    return suffix == "html" and (is_run_id(stem) or stem == "cloudtrain-report")
