"""AWS's training toolkit sets the same `SM_*` variables, and starts trials of tuning jobs: `make test-all`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.backends.sagemaker.target import SageMakerTarget
from cloudtrain.bundle import collect
from cloudtrain.bundle.archive import write_bundle
from cloudtrain.catalog import bundled_prices
from cloudtrain.features.sweeps.loader import make_sweep
from cloudtrain.features.sweeps.tuning_request import render_tuning
from cloudtrain.planning.planner import make_plan
from cloudtrain.settings.settings import Settings
from cloudtrain_runtime.contract import MlTree
from cloudtrain_runtime.launcher.sagemaker_environment import sagemaker_variables

TOOLKIT = os.environ.get("TOOLKIT_PYTHON", "")
PRINT_VARIABLES = "import json; from sagemaker_training import environment as e; print(json.dumps(e.Environment().to_env_vars()))"
GROUP = {
    "instance_group_name": "homogeneousCluster",
    "instance_type": "ml.m5.xlarge",
    "hosts": ["algo-1", "algo-2"],
}
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
        "train": {
            "TrainingInputMode": "File",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
    },
}
ARGUMENTS = ["--flag", "True", "--lr", "0.1", "--name", "two words"]
DIFFERENT = {
    "SM_MODULE_DIR": "the archive in the toolkit, the folder with the code in cloudtrain",
    "SM_TRAINING_ENV": "the toolkit adds details of its own launchers; its other entries are separate variables, too",
}


@pytest.mark.skipif(
    not TOOLKIT, reason="NOT TESTED: AWS's toolkit is not installed here (make test-all)"
)
def test_the_values_are_those_of_the_real_toolkit(tmp_path: Path) -> None:
    tree = MlTree(tmp_path)
    for folder in (tree.config, tree.data / "train", tree.model, tree.output_data, tree.code):
        folder.mkdir(parents=True)
    for name, content in FILES.items():
        (tree.config / f"{name}.json").write_text(json.dumps(content))
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "SAGEMAKER_BASE_DIR": str(tmp_path),
    }
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


START = """
from sagemaker_training import entry_point, environment, runner
env = environment.Environment()
entry_point.run(env.module_dir, env.user_entry_point, env.to_cmd_args(), env.to_env_vars(), capture_error=True,
    runner_type=runner.TorchDistributedRunnerType)
"""
"""As sagemaker_pytorch_container 3.0.0 does in AWS's images where torch_distributed is enabled (training.py)."""
TRIAL = "small-0123456789-001-0a1b2c3d"


def run_trial(folder: Path, values: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Start a trial of a tuning job with the real toolkit, in the files that SageMaker would provide."""
    code, tree = folder / "code", MlTree(folder / "ml")
    code.mkdir()
    script = "import sys\nfrom cloudtrain_runtime import context\nprint(f'{context().run} {sys.argv[1:]}')\n"
    (code / "train.py").write_text(script)
    (code / "job.yaml").write_text(
        "name: small\ncode: {script: train.py, args: {lr: 0.5, depth: 3}}\ncluster: {instance_type: ml.m5.large}\n"
        "metrics: {score: 'score=(.*)'}\n"
    )
    space, objective = (
        {"code.args.lr": {"log_uniform": [1e-4, 0.1]}},
        {"metric": "train/score", "goal": "min"},
    )
    fields = {"engine": "sagemaker", "space": space, "objective": objective, "trials": 4}
    sweep = make_sweep(code / "job.yaml", fields)
    contents = collect(sweep.job.code_directory, {}, home=folder / "home")
    account = Settings(
        role="arn:aws:iam::123456789012:role/training", bucket="bucket", region="us-west-2"
    )
    now = datetime(2026, 11, 20, tzinfo=UTC)
    plan = make_plan(sweep.job, contents.info, SageMakerTarget(account, bundled_prices()), now=now)
    tuning = render_tuning(sweep, plan)
    bundle = write_bundle(contents, folder / "bundles")
    static = tuning.request["TrainingJobDefinition"]["StaticHyperParameters"]
    given = {**static, **values, "_tuning_objective_metric": "train/score"}
    given["sagemaker_submit_directory"] = json.dumps(str(bundle.path))
    resources = {
        **FILES["resourceconfig"],
        "hosts": ["algo-1"],
        "instance_groups": [{**GROUP, "hosts": ["algo-1"]}],
    }
    for each in (tree.config, tree.run_config.parent, tree.model, tree.output_data):
        each.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("hyperparameters", given),
        ("resourceconfig", resources),
        ("inputdataconfig", {}),
    ):
        (tree.config / f"{name}.json").write_text(json.dumps(content))
    tree.run_config.write_text(tuning.plan.config.to_json())
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SAGEMAKER_BASE_DIR": str(tree.root),
        "CLOUDTRAIN_ML_ROOT": str(tree.root),
        "TRAINING_JOB_NAME": TRIAL,
        "SM_STUDIO_LOCAL_MODE": "True",  # looks no host names up
    }
    return subprocess.run(
        [TOOLKIT, "-c", START], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(
    not TOOLKIT, reason="NOT TESTED: AWS's toolkit is not installed here (make test-all)"
)
def test_the_real_toolkit_starts_a_trial_with_its_values(tmp_path: Path) -> None:
    done = run_trial(tmp_path, {"code.args.lr": "0.0125"})
    assert done.returncode == 0, done.stderr
    assert f"{TRIAL} ['--depth', '3', '--lr', '0.0125']" in done.stdout


@pytest.mark.skipif(
    not TOOLKIT, reason="NOT TESTED: AWS's toolkit is not installed here (make test-all)"
)
def test_the_real_toolkit_keeps_the_reason_of_a_trial(tmp_path: Path) -> None:
    done = run_trial(tmp_path, {"code.args.lr": "fast"})
    assert done.returncode != 0
    assert (
        "hyperparameter code.args.lr: expected a number"
        in MlTree(tmp_path / "ml").failure.read_text()
    )
