"""The `SM_*` variables that scripts written for SageMaker expect.

AWS's training toolkit sets them; cloudtrain's launcher does so in its place. Names and forms follow its documentation
(github.com/aws/sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md, 2026-11).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cloudtrain_runtime.contract import (
    CODE_CHANNEL,
    CONFIG_CHANNEL,
    WORKER_SCRIPT,
    MlTree,
    RunConfig,
)
from cloudtrain_runtime.contract.argument_variables import argument_variables, decode
from cloudtrain_runtime.contract.strict_json import dump_json, load_json


def read_config(tree: MlTree, name: str) -> dict[str, Any]:
    """Return one of the JSON files in /opt/ml/input/config; an empty mapping when it is not there."""
    path = tree.config / f"{name}.json"
    if not path.is_file():
        return {}
    content = load_json(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def sagemaker_variables(
    tree: MlTree, *, gpus: int, user_args: list[str], entry_point: str
) -> dict[str, str]:
    """Return the `SM_*` variables of one host, whose processes may use so many GPUs.

    `entry_point` is the script, relative to the code folder, or the module, and `user_args` are its arguments.
    """
    resources = read_config(tree, "resourceconfig")
    inputs = read_config(tree, "inputdataconfig")
    parameters = {name: decode(text) for name, text in read_config(tree, "hyperparameters").items()}
    # cloudtrain's own channels are not part of the job.
    if tree.run_config.is_file():
        inputs = {
            name: each
            for name, each in inputs.items()
            if name not in (CODE_CHANNEL, CONFIG_CHANNEL)
        }
    channels = sorted(inputs)
    # For the framework's part of AWS's toolkit, and not for the toolkit itself.
    of_framework = [
        each for each in parameters if each.startswith("sagemaker_") and each not in _OF_TOOLKIT
    ]
    found = {
        "SM_MODEL_DIR": str(tree.model),
        "SM_INPUT_DIR": str(tree.root / "input"),
        "SM_INPUT_CONFIG_DIR": str(tree.config),
        "SM_OUTPUT_DIR": str(tree.root / "output"),
        "SM_OUTPUT_DATA_DIR": str(tree.output_data),
        "SM_CHANNELS": dump_json(channels),
        **{f"SM_CHANNEL_{name.upper()}": str(tree.data / name) for name in channels},
        **argument_variables(user_args, parameters),
        "SM_HOSTS": dump_json(resources.get("hosts", [])),
        "SM_CURRENT_HOST": str(resources.get("current_host", "")),
        "SM_CURRENT_INSTANCE_TYPE": str(resources.get("current_instance_type", "")),
        "SM_NETWORK_INTERFACE_NAME": str(resources.get("network_interface_name", "")),
        "SM_NUM_GPUS": str(gpus),
        "SM_NUM_CPUS": str(os.cpu_count() or 1),
        "SM_LOG_LEVEL": "20",
        "SM_USER_ENTRY_POINT": entry_point,
        "SM_MODULE_DIR": str(tree.code),
        "SM_MODULE_NAME": entry_point.removesuffix(".py"),
        "SM_RESOURCE_CONFIG": dump_json(resources),
        "SM_INPUT_DATA_CONFIG": dump_json(inputs),
        "SM_FRAMEWORK_PARAMS": dump_json({name: parameters[name] for name in of_framework}),
        "SM_FRAMEWORK_MODULE": os.environ.get("SAGEMAKER_TRAINING_MODULE", ""),
        "SM_NUM_NEURONS": "0",
        "SM_OUTPUT_INTERMEDIATE_DIR": str(tree.root / "output" / "intermediate"),
        **_group_variables(resources),
    }
    return {**found, "SM_TRAINING_ENV": dump_json(_training_environment(found, channels, tree))}


_OF_TOOLKIT = (
    "sagemaker_container_log_level",
    "sagemaker_enable_cloudwatch_metrics",
    "sagemaker_job_name",
    "sagemaker_program",
    "sagemaker_region",
    "sagemaker_s3_output",
    "sagemaker_submit_directory",
)


def _group_variables(resources: Mapping[str, Any]) -> dict[str, str]:
    """Return what the variables say about instance groups. A job of ours has one, in which training is distributed."""
    current = str(resources.get("current_group_name", "homogeneousCluster"))
    groups = {
        str(group["instance_group_name"]): group for group in resources.get("instance_groups", [])
    }
    return {
        "SM_CURRENT_INSTANCE_GROUP": current,
        "SM_CURRENT_INSTANCE_GROUP_HOSTS": dump_json(groups.get(current, {}).get("hosts", [])),
        "SM_INSTANCE_GROUPS": dump_json(list(groups)),
        "SM_INSTANCE_GROUPS_DICT": dump_json(groups),
        "SM_DISTRIBUTION_INSTANCE_GROUPS": dump_json([current]),
        "SM_IS_HETERO": dump_json(len(groups) > 1),
    }


_TEXTS = (
    "current_host",
    "current_instance_group",
    "current_instance_type",
    "framework_module",
    "input_config_dir",
    "input_dir",
    "model_dir",
    "module_dir",
    "module_name",
    "network_interface_name",
    "output_data_dir",
    "output_dir",
    "output_intermediate_dir",
    "user_entry_point",
)
_VALUES = (
    "current_instance_group_hosts",
    "distribution_instance_groups",
    "hosts",
    "input_data_config",
    "instance_groups",
    "instance_groups_dict",
    "is_hetero",
    "log_level",
    "num_cpus",
    "num_gpus",
    "num_neurons",
    "resource_config",
)


def _training_environment(
    found: Mapping[str, str], channels: list[str], tree: MlTree
) -> dict[str, Any]:
    """Return the object of `SM_TRAINING_ENV`: the other variables in one, under the names of AWS's toolkit."""
    hosts = load_json(found["SM_HOSTS"])
    master = min(hosts, default="")
    return {
        **{name: found[f"SM_{name.upper()}"] for name in _TEXTS},
        **{name: load_json(found[f"SM_{name.upper()}"]) for name in _VALUES},
        "additional_framework_parameters": load_json(found["SM_FRAMEWORK_PARAMS"]),
        "channel_input_dirs": {name: str(tree.data / name) for name in channels},
        "hyperparameters": load_json(found["SM_HPS"]),
        "is_master": found["SM_CURRENT_HOST"] == master,
        "job_name": os.environ.get("TRAINING_JOB_NAME", ""),
        "master_hostname": master,
    }


def entry_point(config: RunConfig) -> str:
    """Return what scripts find in `SM_USER_ENTRY_POINT`."""
    return config.entry if config.task is None else WORKER_SCRIPT


def accelerate_variables(environ: Mapping[str, str], *, gpus: int, ranks: int) -> dict[str, str]:
    """Return what `accelerate launch` would set for ranks without GPUs.

    Without it, Accelerate does not distribute on CPUs: it joins the ranks and lets each train alone. That holds for all
    that builds on Accelerate, such as the Trainer of Transformers. A rank without others stays as it is, because with
    the variable its model would be wrapped, too.
    """
    is_configured = any(name.startswith("ACCELERATE_") for name in environ)
    if gpus or ranks == 1 or is_configured:
        return {}
    return {"ACCELERATE_USE_CPU": "true"}


def toolkit_variables(
    tree: MlTree, config: RunConfig, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return what our launcher would have set for a rank that AWS's toolkit has started.

    For the toolkit our worker is the script, and it has no arguments. With mpirun, a rank of another host has the
    variables of that host's login shell, or those of the first host.
    """
    argv = config.args if isinstance(config.args, list) else []
    gpus = int(environ.get("SM_NUM_GPUS") or 0)
    own = sagemaker_variables(tree, gpus=gpus, user_args=argv, entry_point=entry_point(config))
    interface = own["SM_NETWORK_INTERFACE_NAME"]
    ranks = int(environ.get("OMPI_COMM_WORLD_SIZE", environ.get("WORLD_SIZE", "1")))
    wanted = accelerate_variables(environ, gpus=gpus, ranks=ranks)
    if interface:
        wanted["GLOO_SOCKET_IFNAME"] = wanted["NCCL_SOCKET_IFNAME"] = interface
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1") != "1":
        # As torchrun does.
        wanted["OMP_NUM_THREADS"] = "1"
    return {**own, **{name: value for name, value in wanted.items() if name not in environ}}
