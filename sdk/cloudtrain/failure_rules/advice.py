"""What to do about a failure, by where the run ran and what its job says.

The rules advise a run on SageMaker. Here their action is replaced where a local run, or a file that did not travel,
needs another one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from cloudtrain.failure_rules.job_values import LEFT_OUT, Facts

_TRY_HERE = re.compile(r",? (?:and try it here(?: first)?: |here with )cloudtrain submit JOB --local(?=\.)")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>[^'.]+)")
_FILE = re.compile(r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*?'(?P<path>[^']+)'")
_NO_GPU = re.compile(
    r"Found no NVIDIA driver|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
    r"|module 'torch\._C' has no attribute '_cuda_|Distributed package doesn't have NCCL built in"
    r"|device_ids and output_device arguments only work with"
)
_NO_NETWORK = "The container has no way to that address"
_CHANNEL = re.compile(r"^/opt/ml/input/data/(?P<channel>\w+)")

_DISTRIBUTIONS = {
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "fitz": "pymupdf",
    "google": "protobuf",
    "hydra": "hydra-core",
    "lightning_fabric": "lightning-fabric",
    "mpl_toolkits": "matplotlib",
    "osgeo": "gdal",
    "PIL": "pillow",
    "pkg_resources": "setuptools",
    "pytorch_lightning": "pytorch-lightning",
    "sagemaker_training": "sagemaker-training",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
"""Distribution by the module that it brings, where the two have different names."""


def advise(action: str, message: str, *, backend: str, facts: Facts) -> str:
    """Return the action for a run of this backend.

    Args:
        action: What the rule advises.
        message: What went wrong.
        backend: Where the run ran: `local`, `sandbox` or `sagemaker`.
        facts: The job's own values.
    """
    is_local = backend in ("local", "sandbox")
    if (found := _MODULE.search(message)) is not None:
        return _left_behind(found["module"], facts) or _install(found["module"], action, facts, is_local=is_local)
    if (found := _FILE.search(message)) is not None and (advice := _find_path(found["path"], facts)):
        return advice
    if advice := _find_named(message, facts):
        return advice
    return _advise_here(action, message, backend) if is_local else action


def lacks_gpu(message: str) -> bool:
    """Return whether a message says that torch finds no GPU."""
    return _NO_GPU.search(message) is not None


def _advise_here(action: str, message: str, backend: str) -> str:
    """Return the action for a run on this machine."""
    if (found := _FILE.search(message)) is not None and found["path"].startswith("/opt/ml/"):
        return _name_folder(found["path"])
    if lacks_gpu(message):
        return (
            "This machine has no GPU that torch can use: use cuda, NCCL and DDP's device_ids only where "
            "torch.cuda.is_available()."
        )
    if action.startswith(_NO_NETWORK):
        return (
            "This machine has no way to that address: connect it, or bring the files as a channel of data, which "
            "works in a cluster without a way out, too."
        )
    return _TRY_HERE.sub("", action) if backend == "local" else action


def _install(module: str, action: str, facts: Facts, *, is_local: bool) -> str:
    name = _DISTRIBUTIONS.get(module, module)
    requirements = facts.get("code.requirements")
    own = ""
    if "/" in facts.get("code.script", ""):
        own = f" If {module} is a module of your own at the root of the code folder: code.env {{PYTHONPATH: .}}."
    if not is_local:
        return action.replace(f"Add {module} to", f"Add {name} to") + own
    if requirements is None:
        install = f"Install it here, pip install {name}, and name it in a file for code.requirements, for SageMaker."
        return install + own
    return (
        f"{requirements} is not installed by local runs: pip install -r {requirements} "
        f"(add {name} to it where it is missing).{own}"
    )


def _left_behind(module: str, facts: Facts) -> str | None:
    """Return what to do about a module whose file an ignore rule kept from travelling, or None."""
    for name, reason in _left_out(facts):
        if name.rstrip("/").rpartition("/")[2] in (module, f"{module}.py"):
            return _let_travel(name, reason)
    return None


def _find_path(path: str, facts: Facts) -> str | None:
    """Return what to do about a file that an ignore rule kept from travelling, or None."""
    _, is_in_code, below = path.rpartition("/opt/ml/code/")
    if path.startswith("/") and not is_in_code:
        return None
    wanted = PurePosixPath(below)
    places = {str(wanted), *(f"{parent}/" for parent in wanted.parents)}
    return next((_let_travel(name, reason) for name, reason in _left_out(facts) if name in places), None)


def _find_named(message: str, facts: Facts) -> str | None:
    """Return what to do about a file that stayed behind and whose name the message has, or None."""
    words = {word.strip("'\"`(),;:.") for word in message.split()}
    for name, reason in _left_out(facts):
        path = PurePosixPath(name)
        if path.suffix and not name.endswith("/") and words & {name, path.name}:
            return _let_travel(name, reason)
    return None


def _left_out(facts: Facts) -> Iterator[tuple[str, str]]:
    return ((name.removeprefix(LEFT_OUT), reason) for name, reason in facts.items() if name.startswith(LEFT_OUT))


def _let_travel(name: str, reason: str) -> str:
    return f"{name} stayed behind ({reason}): write !/{name} to .cloudtrainignore, which lets it travel."


def _name_folder(path: str) -> str:
    channel = _CHANNEL.match(path)
    if channel is None:
        return f"{path} is not in this run's /opt/ml: read SM_MODEL_DIR or SM_OUTPUT_DATA_DIR for its folders."
    return (
        f"Look whether the file lies in the channel {channel['channel']} of data. Read SM_CHANNEL_"
        f"{channel['channel'].upper()} for its folder: where a machine allows no mount namespace, /opt/ml in the code "
        "is the machine's own (the plan says so)."
    )
