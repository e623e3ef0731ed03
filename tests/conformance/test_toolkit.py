"""The environment of a script has the variables that AWS's training toolkit sets.

The stored names are those of `sagemaker_training.environment.Environment().to_env_vars()`, version 5.1.4, run with
SAGEMAKER_BASE_DIR for the same configuration files.
"""

import json
from pathlib import Path

from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launcher.sagemaker_environment import sagemaker_variables


def test_the_sm_variables_are_those_of_the_toolkit(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    tree.config.mkdir(parents=True)
    parameters = {
        "lr": "0.1",
        "sagemaker_program": '"train.py"',
        "sagemaker_torch_distributed_enabled": "true",
    }
    (tree.config / "hyperparameters.json").write_text(json.dumps(parameters))
    (tree.config / "inputdataconfig.json").write_text(json.dumps({"train": {}}))
    found = sagemaker_variables(tree, gpus=0, user_args=["--lr", "0.1"], entry_point="train.py")
    expected = json.loads(Path(__file__).with_name("toolkit-5.1.4-variables.json").read_text())
    assert sorted(found) == expected
    assert json.loads(found["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_torch_distributed_enabled": True}
