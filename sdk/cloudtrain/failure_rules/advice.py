"""Actions that depend on the message, such as those about a missing module or a file that the bundle does not contain.

The rules give an action for each kind of job and place; `advise` replaces it where the message allows a better one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import PurePosixPath

from cloudtrain import catalog
from cloudtrain.failure_rules.facts import BUNDLED_MODULE, EXCLUDED_FILE, Facts, place_of
from cloudtrain.failure_rules.rules.base import Places
from cloudtrain.support.backend_facts import facts_of
from cloudtrain.support.container_paths import CODE_PREFIX

_MODULE = re.compile(r"ModuleNotFoundError: No module named '(?P<module>[^'.]+)'")
_FILE = re.compile(
    r"(?:FileNotFoundError|NotADirectoryError|No such file or directory).*?'(?P<path>[^']+)'"
)
_NAME = re.compile(r"cannot import name '\w+' from '(?P<module>\w+)' \(\S*/(?:site|dist)-packages/")
_RELATIVE = re.compile(r"ImportError: attempted relative import with no known parent package")
_NO_GPU = re.compile(
    r"Found no NVIDIA driver|you might not have a CUDA gpu|No CUDA GPUs are available|Torch not compiled with CUDA enabled"
    r"|module 'torch\._C' has no attribute '_cuda_|Distributed package doesn't have NCCL built in"
    r"|device_ids and output_device arguments only work with"
)
_LAST_WITH_IT = {"pkg_resources": "setuptools<82"}
"""Modules that newer releases of their package no longer have."""

_BESIDE = (
    "{module} is {path} of the bundle, and no package is missing: Python looks for it beside the program that it starts. "
    "Let it find the folder"
)
_HIDDEN = (
    "An installed package is named {module}, too, and hides {path} of the bundle: rename yours, or let Python find it "
    "first"
)
_NO_GPU_FROM_SLURM = (
    "Slurm gave the job no GPU that torch can use: set gpus_per_node in the site's settings, or use cuda, NCCL and DDP's "
    "device_ids only where torch.cuda.is_available()."
)
_MORE_MEMORY = "a machine with more memory"
_MORE_FROM_SLURM = "ask Slurm for more memory (--mem=0 in slurm.sbatch: all of a node's)"
_CHANNEL = re.compile(r"^/opt/ml/input/data/(?P<channel>\w+)")


def advise(action: str, message: str, *, backend: str, facts: Facts) -> str:
    """Return a rule's action for a message of a run on a backend."""
    known = facts_of(backend)
    is_cluster = not known.uses_account and not known.is_on_this_machine
    if is_cluster and lacks_gpu(message):
        return _NO_GPU_FROM_SLURM
    text = _advise(action, message, backend=backend, facts=facts)
    if is_cluster:
        text = text.replace("this machine", "the node").replace("This machine", "The node")
        text = text.replace(_MORE_MEMORY, _MORE_FROM_SLURM)
    return text


def _advise(action: str, message: str, *, backend: str, facts: Facts) -> str:
    is_local = place_of(backend) is not Places.CLOUD
    if (found := _MODULE.search(message)) is not None:
        module = found["module"]
        files = (module, f"{module}.py")
        advice = _include_excluded(facts, lambda name: name.rstrip("/").rpartition("/")[2] in files)
        return (
            advice
            or _find_bundled(module, facts, _BESIDE)
            or _install(module, action, facts, is_local=is_local)
        )
    if (found := _NAME.search(message)) is not None and (
        advice := _find_bundled(found["module"], facts, _HIDDEN)
    ):
        return advice
    if (found := _FILE.search(message)) is not None and (
        advice := _include_path(found["path"], facts)
    ):
        return advice
    if _RELATIVE.search(message) is not None and (advice := _start_as_module(facts)):
        return advice
    words = {word.strip("'\"`(),;:.") for word in message.split()}
    if advice := _include_excluded(facts, lambda name: _is_named(name, words)):
        return advice
    return _advise_local(action, message) if is_local else action


def lacks_gpu(message: str) -> bool:
    """Whether a message means that torch finds no GPU."""
    return _NO_GPU.search(message) is not None


def _advise_local(action: str, message: str) -> str:
    if (found := _FILE.search(message)) is not None and found["path"].startswith("/opt/ml/"):
        return _use_variable(found["path"])
    if lacks_gpu(message):
        return (
            "This machine has no GPU that torch can use: submit --local --cuda-on-cpu imitates one, or use cuda, NCCL "
            "and DDP's device_ids only where torch.cuda.is_available()."
        )
    return action


def _find_bundled(module: str, facts: Facts, text: str) -> str | None:
    """Return a text about a module of the bundle, and the line by which Python finds it; None for any other module."""
    path = facts.get(f"{BUNDLED_MODULE}{module}")
    if path is None:
        return None
    folder = path.rpartition("/")[0] or "."
    return f"{text.format(module=module, path=path)}: code.env {{PYTHONPATH: {folder}}}."


def _start_as_module(facts: Facts) -> str | None:
    """Return the action for a script in a package, which imports relative to it; None for any other program."""
    parts = PurePosixPath(facts.get("code.script", "").removesuffix(".py")).parts
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):  # noqa: PLR2004 (a folder and a file)
        return None
    return (
        "Python starts a script without its package, to which an import is relative: in place of code.script use "
        f"code.module: {'.'.join(parts)}."
    )


def _install(module: str, action: str, facts: Facts, *, is_local: bool) -> str:
    # A name that the catalog does not know stays as the code has it.
    name = _LAST_WITH_IT.get(module) or catalog.known_package_of(module) or module
    requirements = facts.get("code.requirements")
    own = ""
    if "/" in facts.get("code.script", ""):
        own = f" If {module} is a module of your own at the root of the code folder: code.env {{PYTHONPATH: .}}."
    if not is_local:
        return action.replace(f"Add {module} to", f"Add {name} to") + own
    if requirements is None:
        install = f"Install it here (pip install {shlex.quote(name)}), and add it to a file for code.requirements, for SageMaker."
        return install + own
    return (
        f"Without --install, local runs do not install {requirements}: pip install -r {requirements} "
        f"(add {name} to it if it is missing).{own}"
    )


def _include_path(path: str, facts: Facts) -> str | None:
    """Return the action for a path that an ignore rule excludes, or None."""
    _, is_in_code, below = path.rpartition(CODE_PREFIX)
    if path.startswith("/") and not is_in_code:
        return None
    wanted = PurePosixPath(below)
    paths = {str(wanted), *(f"{parent}/" for parent in wanted.parents)}
    return _include_excluded(facts, lambda name: name in paths)


def _is_named(name: str, words: set[str]) -> bool:
    path = PurePosixPath(name)
    return path.suffix != "" and not name.endswith("/") and not words.isdisjoint({name, path.name})


def _include_excluded(facts: Facts, is_meant: Callable[[str], bool]) -> str | None:
    """Return the action for the first file or folder that is meant and that an ignore rule excludes, or None."""
    excluded = {
        key.removeprefix(EXCLUDED_FILE): facts[key]
        for key in facts
        if key.startswith(EXCLUDED_FILE)
    }
    name = next(filter(is_meant, excluded), None)
    if name is None:
        return None
    return f"{name} is not in the bundle ({excluded[name]}): to include it, add !/{name} to .cloudtrainignore."


def _use_variable(path: str) -> str:
    channel = _CHANNEL.match(path)
    if channel is None:
        return f"{path} is not in this run's /opt/ml: read SM_MODEL_DIR or SM_OUTPUT_DATA_DIR for its folders."
    return (
        f"Check that the channel {channel['channel']} of data holds the file. Read SM_CHANNEL_"
        f"{channel['channel'].upper()} for its folder: without a mount namespace, /opt/ml in the code is that of the "
        "machine (the plan prints a warning)."
    )
