"""Checks of `code.env` that depend on where the run takes place, and of the size of arguments and environment."""

from __future__ import annotations

from collections.abc import Iterator

from cloudtrain import catalog
from cloudtrain.job.arguments import script_argv
from cloudtrain.job.diagnostics import Diagnostic
from cloudtrain.job.spec import JobSpec
from cloudtrain.planning.diagnostics import error
from cloudtrain.support.field_path import FieldPath
from cloudtrain_runtime.contract.argument_variables import argument_variables
from cloudtrain_runtime.contract.lazy_pattern import lazy_pattern

_SEARCH_PATHS = ("PATH", "LD_LIBRARY_PATH")
_REFERENCE = lazy_pattern(r"\$(?:\{\w+\}|\w+)")
_PROGRAM_FOLDERS = ("/bin", "/usr/bin")
"""Folders with mkdir and tar, which unpack the code before the start."""
_PROFILES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_PROFILE_FILES = ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE")

MAX_STRING_BYTES = 32 * 4096
"""Longest argument or variable of a new process, with its end. Source: execve(2), MAX_ARG_STRLEN."""
MAX_TOTAL_BYTES = 2 * 2**20
"""All arguments and variables together: a quarter of the default stack of 8 MiB. Source: execve(2), ARG_MAX."""
_BYTES_PER_STRING = 8 + 1
"""A pointer and the end of the text."""
_OF_OTHERS_BYTES = 128 * 2**10
"""Assumed size of the variables of the image, the launcher and `code.env`, which AWS limits to 100 KiB."""
_OF_TRAINING_ENV_BYTES = 8 * 2**10
"""Assumed size of SM_TRAINING_ENV, which repeats SM_HPS, without it: hosts, channels and folders."""


def check_search_paths(spec: JobSpec, image: str | None) -> Iterator[Diagnostic]:
    """Reject a PATH or LD_LIBRARY_PATH that replaces what the container needs.

    An image of the user's own may be built for such a value, if it is complete.

    Args:
        spec: The job.
        image: Uri of the container image; None on this machine.
    """
    is_aws = image is not None and (not image or catalog.find_image(image) is not None)
    for name in _SEARCH_PATHS:
        value = spec.code.variables.get(name)
        if value is None:
            continue
        reference = _REFERENCE.search(value)
        if reference is not None:
            message = (
                f"{reference[0]} is not expanded, so the value replaces {name} of the container"
            )
        elif is_aws:
            message = f"it replaces {name} of AWS's image, which its programs and libraries need"
        elif name == "PATH" and not {*_PROGRAM_FOLDERS} & {*value.split(":")}:
            message = f"it replaces PATH of the container, and has neither {' nor '.join(_PROGRAM_FOLDERS)}"
        else:
            continue
        yield error(("code", "env", name), message, _path_hint(spec, name), is_key=True)


def _path_hint(spec: JobSpec, name: str) -> str:
    own_image = "or set it in an image of your own (ENV in its Dockerfile, and cluster.image)"
    if spec.code.command is not None:
        return f"remove it, and extend it in a shell script that the command starts: export {name}=FOLDER:${name}; {own_image}"
    if name == "PATH":
        return f'remove it, and extend os.environ["PATH"] at the start of the code; {own_image}'
    return f"remove it, and load the library by its path (ctypes.CDLL) at the start of the code; {own_image}"


def check_profiles(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject the name of an AWS profile, which a container does not have; the job may bring a file with profiles."""
    if any(name in spec.code.env for name in _PROFILE_FILES):
        return
    for name in _PROFILES:
        if name in spec.code.env:
            message = "the container has no AWS profiles, so every call of AWS would fail, also those for checkpoints"
            hint = (
                "remove it: the run has the credentials of its role; for the submit, set it in your shell. For another "
                "role call sts.assume_role in the code, or name a file of the code folder in AWS_CONFIG_FILE"
            )
            yield error(("code", "env", name), message, hint, is_key=True)


def check_sizes(spec: JobSpec) -> Iterator[Diagnostic]:
    """Reject arguments that Linux does not pass to a new process. AWS's limits of `code.env` are lower than Linux's."""
    argv = [] if spec.code.task is not None else script_argv(spec.code.args)
    variables = argument_variables(argv, {})
    sizes = {name: _size(f"{name}={value}") for name, value in variables.items()}
    sizes["SM_TRAINING_ENV"] = sizes["SM_HPS"] + _OF_TRAINING_ENV_BYTES
    words = list(spec.code.command or ())
    hint = "write them to a file in the code folder or a channel, and pass its path"
    for index, word in enumerate(words):
        if _size(word) > MAX_STRING_BYTES:
            yield _too_long(("code", "command", index), _size(word), hint)
            return
    if argv and max(sizes.values()) > MAX_STRING_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        yield _too_long(
            _largest_argument(spec), sizes[largest], hint, f"{largest} with code.args has"
        )
        return
    total = sum(sizes.values()) + sum(map(_size, [*words, *argv]))
    total += _BYTES_PER_STRING * (len(sizes) + len(words) + len(argv))
    if total + _OF_OTHERS_BYTES > MAX_TOTAL_BYTES:
        at: FieldPath = ("code", "command") if words else ("code", "args")
        message = f"{total:,} bytes of arguments and variables; Linux passes {MAX_TOTAL_BYTES:,} to a process"
        yield error(at, message, hint)


def _too_long(at: FieldPath, size: int, hint: str, what: str = "it has") -> Diagnostic:
    message = f"{what} {size:,} bytes; Linux passes at most {MAX_STRING_BYTES:,} in one argument or variable"
    return error(at, message, hint)


def _size(text: str) -> int:
    """Return the bytes of a text with its end."""
    return len(text.encode(errors="surrogateescape")) + 1


def _largest_argument(spec: JobSpec) -> FieldPath:
    """Return the place of an argument that is most of all of them, else that of all."""
    args = spec.code.args
    pairs = args.items() if isinstance(args, dict) else enumerate(args)
    sizes = {key: len(str(value)) for key, value in pairs}
    key = max(sizes, key=lambda each: sizes[each])
    if 2 * sizes[key] > sum(sizes.values()):
        return ("code", "args", key)
    return ("code", "args")
