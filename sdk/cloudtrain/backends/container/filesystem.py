"""`/opt/ml` of an instance: folders, configuration files and input channels."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.container.channel_copies import add_copy, original_of
from cloudtrain.backends.container.machine import interface_of, loopback_interface
from cloudtrain.backends.container.ml_paths import map_hyperparameters, seen_tree
from cloudtrain.support.data_files import data_files
from cloudtrain_runtime.contract import MlTree, sort_hosts
from cloudtrain_runtime.contract.file_uri import path_of
from cloudtrain_runtime.contract.machine_paths import mounts_of
from cloudtrain_runtime.contract.strict_json import dump_json, load_json

MOUNTED = "CloudtrainMounted"
"""Marks a source of a local request that represents a file system, which instances mount and share."""

Fetch = Callable[[str], Path]
"""Downloads the objects of an `s3://` URI and returns their folder."""


class StagingError(Exception):
    """An input of the job is missing. The message becomes the FailureReason."""


def host_names(count: int) -> tuple[str, ...]:
    """Return SageMaker's host names in SageMaker's order."""
    return tuple(sort_hosts([f"algo-{number}" for number in range(1, count + 1)]))


def prepare_tree(
    tree: MlTree,
    request: Mapping[str, Any],
    host: str,
    hosts: tuple[str, ...],
    *,
    has_namespace: bool = False,
) -> None:
    """Create the folders and the files of `input/config`.

    Args:
        tree: The instance's folder.
        request: The CreateTrainingJob document.
        host: Name of the instance.
        hosts: Names of all instances.
        has_namespace: Whether the instance's processes run in a mount namespace.
    """
    if has_namespace:
        mounts_of(tree.root).mkdir(parents=True)
    for folder in (tree.config, tree.data, tree.code, tree.model, tree.output_data):
        folder.mkdir(parents=True, exist_ok=True)
    resources = request["ResourceConfig"]
    preferences = resources.get("InstancePreferences") or [{}]
    # Nodes of a cluster have no type.
    instance_type = resources.get("InstanceType") or preferences[0].get("InstanceType", "")
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": instance_type,
        "hosts": list(hosts),
    }
    _write(
        tree.config / "resourceconfig.json",
        {
            "current_host": host,
            "current_instance_type": instance_type,
            "current_group_name": "homogeneousCluster",
            "hosts": list(hosts),
            "instance_groups": [group],
            "network_interface_name": loopback_interface(),
        },
    )
    _write(
        tree.config / "hyperparameters.json",
        map_hyperparameters(request.get("HyperParameters", {}), seen_tree(tree)),
    )
    channels = {
        channel["ChannelName"]: {
            "TrainingInputMode": channel.get("InputMode", "File"),
            "S3DistributionType": channel["DataSource"]
            .get("S3DataSource", {})
            .get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": "None",
        }
        for channel in request.get("InputDataConfig", [])
    }
    _write(tree.config / "inputdataconfig.json", channels)


def set_interface(tree: MlTree, address: str) -> None:
    """Set the network interface of a host whose processes reach the other hosts from this address."""
    path = tree.config / "resourceconfig.json"
    resources = load_json(path.read_bytes())
    _write(path, {**resources, "network_interface_name": interface_of(address)})


def stage_inputs(
    tree: MlTree, request: Mapping[str, Any], host: str, hosts: tuple[str, ...], fetch: Fetch
) -> None:
    """Provide the input channels, the toolkit's code and the TensorBoard folder that all hosts share.

    Raises:
        StagingError: an input is missing.
    """
    for channel in request.get("InputDataConfig", []):
        source = channel["DataSource"].get("S3DataSource")
        if source is None:
            kinds = ", ".join(channel["DataSource"])
            raise StagingError(
                f"channel {channel['ChannelName']}: {kinds} cannot be provided on this machine"
            )
        sharded = source.get("S3DataDistributionType") == "ShardedByS3Key"
        shard = (hosts.index(host), len(hosts)) if sharded else (0, 1)
        is_mounted = bool(source.get(MOUNTED))
        _stage_channel(tree, channel["ChannelName"], source["S3Uri"], shard, fetch, is_mounted)
    if "ContainerEntrypoint" not in request["AlgorithmSpecification"]:
        _unpack_submit_directory(tree, request, fetch)
    board = request.get("TensorBoardOutputConfig", {}).get("S3OutputPath")
    if board is not None:
        folder = path_of(board) / request["TrainingJobName"] / "tensorboard-output"
        share(tree, tree.tensorboard, folder)


def share(tree: MlTree, place: Path, folder: Path) -> None:
    """Show in a host's tree the folder that represents its S3 prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    _show(tree, place, folder)


def _show(tree: MlTree, place: Path, folder: Path) -> None:
    """Show a folder at a place in a host's tree: as a mount in its namespace, or else by a link.

    A resolved path stays below `/opt/ml` where a folder is mounted. A link would lead to another folder in each run.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    if not mounts_of(tree.root).is_dir():
        place.symlink_to(folder)
        return
    link = mounts_of(tree.root) / place.relative_to(tree.root)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    place.mkdir()


def _stage_channel(
    tree: MlTree, name: str, uri: str, shard: tuple[int, int], fetch: Fetch, is_mounted: bool
) -> None:
    """Provide a channel. A file system is shared by all instances; of other data each one has a copy."""
    folder = tree.data / name
    try:
        source = fetch(uri) if uri.startswith("s3://") else path_of(uri)
    except StagingError as error:
        raise StagingError(f"channel {folder.name}: {error}") from None
    if not source.exists():
        raise StagingError(f"channel {folder.name}: there is nothing at {uri}")
    index, count = shard
    whole = source if source.is_dir() else source.parent
    place = whole if is_mounted else add_copy(tree, name, whole)
    if source.is_dir() and count == 1:
        _show(tree, folder, place)
        return
    folder.mkdir()
    for path, file in list(data_files(source))[index::count]:
        link = folder / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(place / path.relative_to(whole))


def _unpack_submit_directory(tree: MlTree, request: Mapping[str, Any], fetch: Fetch) -> None:
    """Unpack the code as AWS's training toolkit does at its start."""
    # Cloudtrain's own entrypoint unpacks the code itself.
    from cloudtrain.bundle.unpacking import UnpackError, unpack

    uri = load_json(request["HyperParameters"]["sagemaker_submit_directory"])
    in_container = uri.removeprefix("/opt/ml/")
    archive = path_of(uri)
    if in_container != uri:
        archive = original_of(tree, tree.root / in_container)
    if uri.startswith("s3://"):
        archive = fetch(uri) / uri.rpartition("/")[2]
    if not archive.is_file():
        raise StagingError(f"sagemaker_submit_directory: there is nothing at {uri}")
    try:
        unpack(archive, tree.code)
    except UnpackError as error:
        raise StagingError(str(error)) from None


def pack_folder(folder: Path, target: Path) -> bool:
    """Pack the content of a folder into a tar.gz; return False without writing if the folder is empty.

    An archive that a former attempt has completed is kept.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if not names:
        return False
    if target.is_file():
        return True
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    try:
        with tarfile.open(partial, "w:gz", compresslevel=1) as archive:
            for name in names:
                archive.add(folder / name, arcname=name)
        partial.replace(target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return True


def store_folder(folder: Path, target: Path) -> bool:
    """Store the files of a folder one by one, as hard links; return False without writing if the folder is empty."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return False
    link_tree(folder, target)
    return True


def link_tree(source: Path, target: Path) -> None:
    """Give the files of a folder a second place by hard links, instead of those that a former attempt has left.

    Raises:
        OSError: A folder cannot be read, or a file cannot be linked.
    """
    for folder, names, files in os.walk(source, onerror=_raise):
        place = target / Path(folder).relative_to(source)
        place.mkdir(parents=True, exist_ok=True)
        links = [name for name in names if Path(folder, name).is_symlink()]
        for name in (*files, *links):
            copy = place / name
            copy.unlink(missing_ok=True)
            os.link(Path(folder, name), copy, follow_symlinks=False)


def _raise(error: OSError) -> None:
    raise error


def _write(path: Path, content: Any) -> None:
    path.write_text(dump_json(content, indent=1) + "\n", encoding="utf-8")
