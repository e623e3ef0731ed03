import botocore.session
import pytest

from cloudtrain import catalog


def test_every_instance_type_of_aws_is_in_the_catalog() -> None:
    model = botocore.session.get_session().get_service_model("sagemaker")
    known = set(model.shape_for("TrainingInstanceType").enum)
    assert set(catalog.instance_names()) == known


def test_the_clusters_that_cloudtrain_is_for() -> None:
    p4d = catalog.find_instance("ml.p4d.24xlarge")
    assert p4d is not None
    assert (p4d.gpus, p4d.gpu, p4d.efa, p4d.smddp) == (8, "A100", True, True)
    assert catalog.find_instance("ml.p99.24xlarge") is None


def test_image_uris() -> None:
    newest = catalog.images()[0]
    assert catalog.image_uri(newest, region="us-east-1", gpu=True) == (
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.13-cu133-amzn2023-sagemaker"
    )
    assert catalog.image_uri(newest, region="cn-north-1", gpu=False) == (
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.13-cpu-amzn2023-sagemaker"
    )


def test_the_registries_are_those_of_the_sdk() -> None:
    image_uris = pytest.importorskip("sagemaker.image_uris")
    training = image_uris.config_for_framework("pytorch")["training"]["versions"]
    for region, account in training["2.8.0"]["registries"].items():
        uri = catalog.image_uri(catalog.images()[0], region=region, gpu=True)
        assert uri.startswith(f"{account}.dkr.ecr.{region}."), region


def test_prices_have_a_date_and_unknown_ones_are_none() -> None:
    assert catalog.price_date() == "2026-09-01"
    assert catalog.usd_per_hour("ml.p4d.24xlarge", "us-west-2") == pytest.approx(25.251286)
    assert catalog.usd_per_hour("ml.p4d.24xlarge", "eu-west-1") is None
