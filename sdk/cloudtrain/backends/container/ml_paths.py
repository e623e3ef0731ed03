"""Mapping of `/opt/ml` in a job's arguments and variables to the folder of a local instance.

Each local instance has a separate tree, so a value such as `output_dir: /opt/ml/model` must refer to that tree. In a
mount namespace it does, and nothing is mapped. The request and the bundle keep the original value.
"""

from __future__ import annotations

import re
from typing import Any

from cloudtrain.backends.container.channel_copies import original_of
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.contract.machine_paths import mounts_of
from cloudtrain_runtime.contract.ml_tree import CONTAINER_TREE
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

_AT_START = re.compile(r"(?:^|(?<=[=:])|(?<=\Afile://))/opt/ml(?=[/:]|$)")
"""At the start of a value, after `--option=`, in a list such as PYTHONPATH, or as the path of a `file://` URI."""


def seen_tree(tree: MlTree) -> MlTree:
    """Return an instance's tree under the paths that its processes see: those of SageMaker in a mount namespace."""
    return CONTAINER_TREE if mounts_of(tree.root).is_dir() else tree


def map_text(text: str, tree: MlTree) -> str:
    """Return a text with each path below `/opt/ml` replaced by the same path below the tree."""
    return _AT_START.sub(lambda _: str(tree.root), text)


def map_values(value: Any, tree: MlTree) -> Any:
    """Return a JSON value in which every text is mapped; keys of objects are unchanged."""
    if isinstance(value, str):
        return map_text(value, tree)
    if isinstance(value, dict):
        return {key: map_values(each, tree) for key, each in value.items()}
    if isinstance(value, list):
        return [map_values(each, tree) for each in value]
    return value


def map_hyperparameters(parameters: dict[str, str], tree: MlTree) -> dict[str, str]:
    """Return the mapped hyperparameters of an estimator's own request. Each value is encoded JSON or plain text."""
    return {
        name: text if name.startswith("sagemaker_") else _map_encoded(text, tree)
        for name, text in parameters.items()
    }


def map_arguments(tree: MlTree) -> None:
    """Replace this instance's run.json by one with mapped arguments, if they contain `/opt/ml`.

    The channel may be a link to a file that all instances share, which is not changed.
    """
    path = tree.run_config
    try:
        config = load_json(original_of(tree, path).read_text(encoding="utf-8"))
        words = {
            name: map_values(config[name], seen_tree(tree))
            for name in ("args", "command")
            if name in config
        }
        mapped = {**config, **words}
    except (OSError, ValueError, TypeError, KeyError):
        # Not a job of cloudtrain, or damaged, which the launcher reports.
        return
    if mapped == config:
        return
    if path.parent.is_symlink():
        path.parent.unlink()
        path.parent.mkdir()
    else:
        path.unlink()
    path.write_text(dump_json(mapped, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _map_encoded(text: str, tree: MlTree) -> str:
    try:
        value = load_json(text)
    except ValueError:
        return map_text(text, tree)
    mapped = map_values(value, tree)
    return text if mapped == value else dump_json(mapped)
