"""The requests of endpoints: images, prices, names, contradictions, and language models. Nothing is sent."""

from pathlib import Path
from typing import Any

import pytest

import cloudtrain
from cloudtrain.errors import UserError
from cloudtrain.features.serving.endpoint_request import GPU_AMI, EndpointOptions, make_requests
from cloudtrain.features.serving.hugging_face import export_model
from cloudtrain.features.serving.package import missing_packages
from cloudtrain.settings.settings import Settings

ROLE = "arn:aws:iam::123456789012:role/training"
SETTINGS = Settings(role=ROLE, bucket="b", region="us-west-2")
RUN = "digits-261123-184005-b55f57"


def requests(options: EndpointOptions, settings: Settings = SETTINGS, digest: str = "0") -> Any:
    return make_requests(RUN, "s3://b/p/model.tar.gz", digest, options, settings)


def variant(options: EndpointOptions) -> dict[str, Any]:
    found = requests(options)
    assert found.problems() == []
    return dict(found.config["ProductionVariants"][0])


def test_an_endpoint_on_cpus_has_the_cpu_image_and_no_ami() -> None:
    found = requests(EndpointOptions())
    assert found.problems() == []
    assert found.model["PrimaryContainer"] == {
        "Image": "763104351884.dkr.ecr.us-west-2.amazonaws.com/ray:serve-ml-sagemaker-cpu-v1",
        "ModelDataUrl": "s3://b/p/model.tar.gz",
    }
    assert "InferenceAmiVersion" not in found.config["ProductionVariants"][0]
    assert found.endpoint["EndpointName"] == RUN


def test_an_endpoint_on_gpus_has_the_cuda_image_and_its_ami() -> None:
    options = EndpointOptions(instance_type="ml.g5.xlarge", instances=2)
    assert variant(options)["InferenceAmiVersion"] == GPU_AMI
    assert variant(options)["InitialInstanceCount"] == 2
    assert (
        requests(options)
        .model["PrimaryContainer"]["Image"]
        .endswith("ray:serve-ml-sagemaker-cuda-v1")
    )


def test_a_serverless_endpoint_has_no_instances() -> None:
    found = variant(EndpointOptions(serverless=(2048, 10)))
    assert found["ServerlessConfig"] == {"MemorySizeInMB": 2048, "MaxConcurrency": 10}
    assert "InstanceType" not in found


def test_network_and_key_of_the_settings_are_used() -> None:
    settings = Settings(
        role=ROLE,
        bucket="b",
        region="us-west-2",
        subnets=("subnet-1",),
        security_groups=("sg-1",),
        kms_key="key",
    )
    found = requests(EndpointOptions(), settings)
    assert found.model["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert found.config["KmsKeyId"] == "key"
    assert (
        "KmsKeyId" not in requests(EndpointOptions(instance_type="ml.g5.xlarge"), settings).config
    )


def test_scaling_names_the_variant_and_its_bounds() -> None:
    found = requests(EndpointOptions(scaling=(1, 4), target_invocations=50)).scaling
    assert found["RegisterScalableTarget"] == {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{RUN}/variant/main",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
        "MinCapacity": 1,
        "MaxCapacity": 4,
    }
    assert (
        found["PutScalingPolicy"]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 50
    )


def test_names_follow_the_model_and_the_options() -> None:
    first = requests(EndpointOptions())
    assert requests(EndpointOptions()) == first
    other_model, other_options = (
        requests(EndpointOptions(), digest="1"),
        requests(EndpointOptions(instances=2)),
    )
    assert other_model.model["ModelName"] != first.model["ModelName"]
    assert other_options.model["ModelName"] == first.model["ModelName"]
    assert other_options.config["EndpointConfigName"] != first.config["EndpointConfigName"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EndpointOptions(name="a_b"), "cannot be the name"),
        (EndpointOptions(name="a" * 60), "cannot be the name"),
        (EndpointOptions(serverless=(1024, 1), scaling=(1, 2)), "scales by itself"),
        (EndpointOptions(instances=3, scaling=(1, 2)), "not between 1 and 2"),
        (EndpointOptions(engine="vllm"), "needs a GPU"),
        (EndpointOptions(engine="vllm", serverless=(1024, 1)), "needs a GPU"),
        (EndpointOptions(engine="torchserve"), "there is no engine"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: EndpointOptions, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        requests(options)


def test_the_sandbox_refuses_vllm_before_it_creates_anything() -> None:
    with pytest.raises(UserError, match="runs no vLLM") as refused:
        cloudtrain.deploy(
            "absent", EndpointOptions(engine="vllm", instance_type="ml.g5.xlarge"), sandbox=True
        )
    assert "--plan" in str(refused.value.hint)


def test_an_unknown_type_is_a_problem_of_the_request() -> None:
    assert (
        "InstanceType" in requests(EndpointOptions(instance_type="ml.nothing.large")).problems()[0]
    )


def test_vllm_gets_unpacked_weights_and_its_own_image() -> None:
    found = requests(EndpointOptions(engine="vllm", instance_type="ml.g5.2xlarge"))
    assert found.problems() == []
    assert found.model["PrimaryContainer"]["Image"].endswith("/vllm:server-sagemaker-cuda-v2")
    assert (
        found.model["PrimaryContainer"]["ModelDataSource"]["S3DataSource"]["CompressionType"]
        == "None"
    )
    assert found.config["ProductionVariants"][0]["InferenceAmiVersion"] == GPU_AMI


class Downloads:
    """A run whose model folder has these files."""

    id = RUN

    def __init__(self, *names: str) -> None:
        self.names = names

    def plan_document(self) -> dict[str, Any]:
        return {"config": {"task": None}}

    def download(self, to: str, **_: Any) -> None:
        for name in self.names:
            path = Path(to, "model", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)


def test_a_model_in_hugging_faces_layout_is_exported(tmp_path: Path) -> None:
    run: Any = Downloads(
        "final/config.json", "final/model.safetensors", "final/tokenizer.json", "other.txt"
    )
    folder, digest = export_model(run, tmp_path / "model", None)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert export_model(run, tmp_path / "again", None)[1] == digest


def test_a_model_of_another_layout_is_refused(tmp_path: Path) -> None:
    run: Any = Downloads("model.pt", "config.json")
    with pytest.raises(UserError, match="not in Hugging Face's layout"):
        export_model(run, tmp_path / "model", None)


def test_modules_that_the_image_lacks_are_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "task.py").write_text(
        "import torch, json, helper, timm\nfrom sklearn import svm\nimport einops.layers\n"
        "from cloudtrain_runtime import Task\n"
        "class Mine(Task):\n    def model(self):\n        import jiwer\n"
        "def draw():\n    import altair\n"
    )
    (code / "helper.py").write_text("import shapely\n")
    (code / "deploy.py").write_text("import cloudtrain, polars\n")
    found = ("einops", "jiwer", "shapely", "timm")
    assert missing_packages(tmp_path, "task:Mine") == found
    (code / "requirements.txt").write_text("einops>=0.8\ntimm\nJiWER\nshapely\n")
    assert missing_packages(tmp_path, "task:Mine") == ()
