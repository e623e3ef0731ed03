"""The `SM_*` variables equal those of AWS's training toolkit: `make test-ecosystem`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launcher.sagemaker_environment import sagemaker_variables

TOOLKIT = os.environ.get("TOOLKIT_PYTHON", "")
PRINT_VARIABLES = (
    "import json; from sagemaker_training import environment as e; print(json.dumps(e.Environment().to_env_vars()))"
)
GROUP = {"instance_group_name": "homogeneousCluster", "instance_type": "ml.m5.xlarge", "hosts": ["algo-1", "algo-2"]}
FILES: dict[str, dict[str, Any]] = {
    "resourceconfig": {
        "current_host": "algo-1",
        "current_instance_type": "ml.m5.xlarge",
        "current_group_name": "homogeneousCluster",
        "hosts": ["algo-1", "algo-2"],
        "instance_groups": [GROUP],
        "network_interface_name": "lo",
    },
    "hyperparameters": {
        "flag": "true",
        "lr": "0.1",
        "name": '"two words"',
        "sagemaker_program": '"train.py"',
        "sagemaker_submit_directory": '"/opt/ml/code.tar.gz"',
        "sagemaker_container_log_level": "20",
        "sagemaker_job_name": '"job"',
        "sagemaker_region": '"us-west-2"',
        "sagemaker_instance_type": '"ml.m5.xlarge"',
        "sagemaker_torch_distributed_enabled": "true",
    },
    "inputdataconfig": {
        "train": {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated", "RecordWrapperType": "None"}
    },
}
ARGUMENTS = ["--flag", "True", "--lr", "0.1", "--name", "two words"]
DIFFERENT = {
    "SM_MODULE_DIR": "the archive in the toolkit, the folder with the code in cloudtrain",
    "SM_TRAINING_ENV": "the toolkit adds details of its own launchers; its other entries are separate variables, too",
}


@pytest.mark.skipif(not TOOLKIT, reason="NOT TESTED: AWS's toolkit is not installed here (make test-ecosystem)")
def test_the_values_are_those_of_the_real_toolkit(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    for folder in (tree.config, tree.data / "train", tree.model, tree.output_data, tree.code):
        folder.mkdir(parents=True)
    for name, content in FILES.items():
        (tree.config / f"{name}.json").write_text(json.dumps(content))
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "SAGEMAKER_BASE_DIR": str(tmp_path)}
    command = [TOOLKIT, "-c", PRINT_VARIABLES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    ours = sagemaker_variables(tree, gpus=0, user_args=ARGUMENTS, entry_point="train.py")
    assert sorted(ours) == sorted(theirs)
    assert {name: _decoded(ours[name]) for name in ours if name not in DIFFERENT} == {
        name: _decoded(theirs[name]) for name in theirs if name not in DIFFERENT
    }


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
