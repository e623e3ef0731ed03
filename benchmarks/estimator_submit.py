"""Submit a folder with a hand-written SageMaker estimator, the baseline of `submit.py`.

    python estimator_submit.py SOURCE_DIR ENTRY_POINT

Image, role and bucket are given, so that the SDK does not look them up. Telemetry is off.
"""

import os
import sys

import sagemaker
from sagemaker.pytorch import PyTorch

source_dir, entry_point = sys.argv[1:]
bucket = os.environ["CLOUDTRAIN_BUCKET"]
session = sagemaker.Session(
    default_bucket=bucket,
    sagemaker_config={
        "SchemaVersion": "1.0",
        "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
    },
)
estimator = PyTorch(
    entry_point=entry_point,
    source_dir=source_dir,
    role=os.environ["CLOUDTRAIN_ROLE"],
    image_uri="763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker",
    instance_type="ml.p4d.24xlarge",
    instance_count=2,
    distribution={"torch_distributed": {"enabled": True}},
    hyperparameters={"epochs": 12, "batch_size": 16, "learning_rate": 2.0e-3},
    max_run=3600,
    output_path=f"s3://{bucket}/estimator",
    checkpoint_s3_uri=f"s3://{bucket}/estimator/checkpoints",
    debugger_hook_config=False,
    disable_profiler=True,
    sagemaker_session=session,
)
estimator.fit(wait=False)
print(estimator.latest_training_job.name)
