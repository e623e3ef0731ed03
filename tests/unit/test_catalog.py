"""The catalog agrees with botocore, the SageMaker SDK and EC2, and each value has a source and a date."""

import dataclasses
import gzip
import importlib.util
import json
import re
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from cloudtrain import SettingsError, catalog
from cloudtrain.catalog import (
    Instance,
    Price,
    Prices,
    Source,
    merge_newest,
    read_prices,
    service_limits,
)
from cloudtrain.catalog.source import load, sources
from cloudtrain.support.aws_names import parse_image

INSTANCES = [
    instance
    for name in catalog.instance_names()
    if (instance := catalog.find_instance(name)) is not None
]
GPU_TYPES = [instance for instance in INSTANCES if instance.gpus]


def model_types() -> set[str]:
    model = botocore.session.get_session().get_service_model("sagemaker")
    return set(model.shape_for("TrainingInstanceType").enum)


def value_of(instance_type: str) -> Instance:
    instance = catalog.find_instance(instance_type)
    assert instance is not None
    return instance


def is_a_source(source: Source) -> bool:
    assert date(2016, 1, 1) < date.fromisoformat(source.date) <= datetime.now(UTC).date(), source
    assert source.url.startswith("https://")
    return len(source.name) > 20


def known_fields(entry: Any) -> set[str]:
    return {
        field.name for field in dataclasses.fields(entry) if getattr(entry, field.name) is not None
    }


def test_each_image_has_a_list_of_packages_with_a_source() -> None:
    listed = [name for each in load("packages")["lists"] for name in each["frameworks"]]
    assert sorted(listed) == sorted(image.framework for image in catalog.images())
    assert all(map(is_a_source, sources("packages").values()))
    for image in catalog.images():
        for gpu in (True, False):
            found = catalog.image_packages(image, gpu=gpu)
            assert {"torch", "numpy", "pyyaml"} <= found.names
            assert not any(map(found.surely_lacks, found.names))
            assert found.surely_lacks("trl")
            assert {catalog.normalized(name) for name in found.names} == found.names
    unknown = set(load("packages")["columns"].values()) - set(sources("packages"))
    assert unknown == set()


def test_names_of_packages_are_in_normalised_form() -> None:
    data = load("packages")
    names = {name for several in data["modules"].values() for name in several}
    names |= {*data["brings"], *(name for several in data["brings"].values() for name in several)}
    assert {catalog.normalized(name) for name in names} == names
    assert catalog.packages_of("cv2")[0] == "opencv-python-headless"
    assert catalog.packages_of("skbase") == ("scikit-base",)
    assert catalog.packages_of("Some_Module") == ("some-module",)
    assert catalog.packages_of("apex") == ()


def test_the_upload_rate_has_a_source_and_a_date() -> None:
    source = sources("transfers")[load("transfers")["s3_upload_mb_per_second"]["source"]]
    assert source.name
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", source.date)
    assert catalog.s3_upload_bytes_per_second("ml.p4d.24xlarge") == 250e6
    assert catalog.s3_upload_bytes_per_second("ml.of.tomorrow") == 250e6


def test_every_value_of_an_instance_has_a_source_and_a_date() -> None:
    data = load("instances")
    for instance in INSTANCES:
        keys = {**data["columns"], **data["instances"][instance.name].get("sources", {})}
        assert all(is_a_source(sources("instances")[keys[name]]) for name in known_fields(instance))


def test_every_value_of_an_image_has_a_source_and_a_date() -> None:
    for image in catalog.images():
        assert set(image.sources) == known_fields(image)
        assert all(map(is_a_source, image.sources.values()))
    assert is_a_source(sources("images")[load("images")["columns"]["registries"]])


def test_every_price_has_a_source_and_a_date() -> None:
    prices = catalog.bundled_prices()
    for region in prices.regions:
        for name in prices.by_region[region]:
            price = prices.find(name, region)
            assert price is not None
            assert is_a_source(price.source)
            assert catalog.find_instance(name) is not None


@pytest.mark.parametrize("name", ["instances", "images", "prices"])
def test_every_source_is_used(name: str) -> None:
    """An unused source is left over from a removed value."""
    content = json.loads((Path(catalog.__file__).parent / f"{name}.json").read_text())
    declared = set(content.pop("sources"))
    assert declared == {
        word for word in re.findall(r'"([^"]+)"', json.dumps(content)) if word in declared
    }


def test_every_instance_type_of_aws_is_in_the_catalog() -> None:
    assert set(catalog.instance_names()) == model_types()


def test_values_of_a_gpu_instance() -> None:
    assert value_of("ml.p4d.24xlarge") == Instance(
        "ml.p4d.24xlarge", 8, "A100", 40, 96, 1152, 8000, 400, True, True, True, False, "x86_64"
    )
    assert value_of("ml.p5en.48xlarge").gpu == "H200"
    assert catalog.find_instance("ml.p99.24xlarge") is None


def ec2() -> dict[str, Any]:
    """Return EC2's DescribeInstanceTypes as moto has stored it."""
    spec = importlib.util.find_spec("moto")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "ec2" / "resources" / "instance_types.json.gz"
    described: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return described


RETIRED = {
    "ml.p2.xlarge",
    "ml.p2.8xlarge",
    "ml.p2.16xlarge",
    "ml.p3.2xlarge",
    "ml.p3.8xlarge",
    "ml.p3.16xlarge",
}
ULTRASERVER = {"ml.p6e-gb200.36xlarge"}
NOT_DESCRIBED = RETIRED | ULTRASERVER
"""Types that EC2 no longer describes, or only as part of an UltraServer. Their values have other sources."""


def test_instances_agree_with_ec2() -> None:
    pytest.importorskip("moto")
    described = ec2()
    assert {
        i.name for i in INSTANCES if i.name.removeprefix("ml.") not in described
    } == NOT_DESCRIBED
    for instance in INSTANCES:
        if instance.name in NOT_DESCRIBED:
            continue
        entry = described[instance.name.removeprefix("ml.")]
        gpus = entry.get("GpuInfo", {}).get("Gpus", [])
        cards = entry["NetworkInfo"]["NetworkCards"]
        assert instance.gpus == sum(gpu["Count"] for gpu in gpus), instance
        assert instance.gpu == (gpus[0]["Name"] if gpus else None), instance
        if gpus:
            assert instance.gpu_memory_gb == pytest.approx(
                gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024, abs=0.051
            )
        assert instance.vcpus == entry["VCpuInfo"]["DefaultVCpus"], instance
        assert instance.memory_gb == pytest.approx(
            entry["MemoryInfo"]["SizeInMiB"] / 1024, abs=0.051
        ), instance
        assert instance.nvme_gb == entry.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0), (
            instance
        )
        assert instance.network_gbps == pytest.approx(
            sum(c["BaselineBandwidthInGbps"] for c in cards), abs=0.051
        )
        assert instance.efa == entry["NetworkInfo"]["EfaSupported"], instance
        assert instance.neuron == ("NeuronInfo" in entry), instance
        assert [instance.architecture] == entry["ProcessorInfo"]["SupportedArchitectures"], instance


def test_gpus_agree_with_the_sdk() -> None:
    pytest.importorskip("sagemaker.instance_types_gpu_info")
    from sagemaker.instance_types_gpu_info import retrieve

    for region in ("us-east-1", "us-west-2"):
        for name, info in retrieve(region).items():
            instance = catalog.find_instance(name)
            if instance is not None:
                assert instance.gpus == info["Count"], name
                assert instance.gpu_memory_gb is not None
                # The SDK has the vendors' figures, such as 24 GiB where EC2 reports 22.4 GiB.
                assert info["TotalGpuMemoryInMiB"] / 1024 / info["Count"] == pytest.approx(
                    instance.gpu_memory_gb, rel=0.08
                ), name


def test_types_with_smddp_are_a_subset_of_the_sdks() -> None:
    fw_utils = pytest.importorskip("sagemaker.fw_utils")
    sdk = set(fw_utils.SM_DATAPARALLEL_SUPPORTED_INSTANCE_TYPES) - {"local_gpu"}
    ours = {instance.name for instance in INSTANCES if instance.smddp}
    assert ours < sdk
    # AWS's guide no longer lists V100. The SDK still does.
    assert sdk - ours == {"ml.p3.16xlarge", "ml.p3dn.24xlarge"}


def test_the_toolkits_types_are_the_sdks_and_one_newer() -> None:
    drivers = pytest.importorskip("sagemaker.modules.train.container_drivers.common.utils")
    ours = {instance.name for instance in INSTANCES if instance.toolkit_efa}
    # The SDK carries an older copy of the toolkit's list.
    assert ours == {*drivers.SM_EFA_NCCL_INSTANCES, "ml.p6e-gb200.36xlarge"}
    assert ours >= set(drivers.SM_EFA_RDMA_INSTANCES)
    assert all(value_of(name).efa for name in ours)


def test_newer_types_with_efa_are_not_in_the_toolkits_list() -> None:
    lacking = {instance.name for instance in GPU_TYPES if instance.efa and not instance.toolkit_efa}
    assert lacking >= {
        "ml.p5e.48xlarge",
        "ml.p5en.48xlarge",
        "ml.p6-b200.48xlarge",
        "ml.g6e.48xlarge",
    }


def test_distributions() -> None:
    assert value_of("ml.p4d.24xlarge").has_images
    assert value_of("ml.m5.large").has_images
    assert not value_of("ml.trn1.32xlarge").has_images
    assert not value_of("ml.p6e-gb200.36xlarge").has_images


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("ml.p4d.24xlrge", ("ml.p4d.24xlarge",)),
        ("p4d.24xlarge", ("ml.p4d.24xlarge",)),
        ("P4D.24xlarge ", ("ml.p4d.24xlarge",)),
        ("ml-p4d-24xlarge", ("ml.p4d.24xlarge",)),
        ("ml.p4d24xlarge", ("ml.p4d.24xlarge",)),
        ("ml.p4d", ("ml.p4d.24xlarge",)),
        ("ml.p4.24xlarge", ("ml.p4d.24xlarge", "ml.p4de.24xlarge")),
        ("ml.p4d.48xlarge", ("ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p5.48xlarge")),
        ("ml.g5.13xlarge", ("ml.g5.12xlarge", "ml.g5.16xlarge")),
        ("ml.g5.xlagre", ("ml.g5.xlarge",)),
        ("ml.g5", ("ml.g5.xlarge", "ml.g5.2xlarge", "ml.g5.4xlarge")),
        ("ml.g4.xlarge", ("ml.g4dn.xlarge", "ml.g5.xlarge")),
        ("ml.p6-b200.24xlarge", ("ml.p6-b200.48xlarge", "ml.p6e-gb200.36xlarge")),
        ("ml.trn2.32xlarge", ("ml.trn2.48xlarge", "ml.trn1.32xlarge")),
        ("ml.m7i-flex.larg", ("ml.m7i-flex.large",)),
        ("m1.p4d.24xlarge", ("ml.p4d.24xlarge", "ml.p4de.24xlarge", "ml.p3dn.24xlarge")),
        ("ml.p4d.0xlarge", ("ml.p4d.24xlarge",)),
        ("ml.h100.8xlarge", ()),
        ("ml.p99.24xlarge", ()),
        ("the big one", ()),
        ("", ()),
    ],
)
def test_nearest_instance_types(name: str, nearest: tuple[str, ...]) -> None:
    assert catalog.suggest(name) == nearest


def test_a_legal_name_is_nearest_to_itself() -> None:
    for name in catalog.instance_names():
        assert catalog.suggest(name) == (name,)


def test_image_uris() -> None:
    newest_image = catalog.images()[0]
    assert catalog.image_uri(newest_image, region="us-east-1", gpu=True) == (
        "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker"
    )
    assert catalog.image_uri(newest_image, region="cn-north-1", gpu=False) == (
        "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn/pytorch:2.14-cpu-amzn2023-sagemaker"
    )
    for region in catalog.image_regions():
        image = parse_image(catalog.image_uri(newest_image, region=region, gpu=True))
        assert image is not None
        assert image.region == region


def test_the_registries_are_those_of_the_sdk() -> None:
    image_uris = pytest.importorskip("sagemaker.image_uris")
    training = image_uris.config_for_framework("pytorch")["training"]["versions"]
    for region, account in training["2.8.0"]["registries"].items():
        uri = catalog.image_uri(catalog.images()[0], region=region, gpu=True)
        assert uri.startswith(f"{account}.dkr.ecr.{region}."), region
    absent = next(image.absent_in for image in catalog.images() if image.framework == "2.8")
    assert not set(training["2.8.0"]["registries"]) & set(absent)
    assert set(catalog.image_regions()) <= service_limits.regions()


def test_a_newer_image_has_the_tag_of_the_newest() -> None:
    image = catalog.newer_image("2.99")
    assert image is not None
    assert (image.gpu, image.released) == ("pytorch:2.99-cu133-amzn2023-sagemaker", None)
    assert [catalog.newer_image(version) for version in ("2.14", "2.4", "3.0", "x")] == [None] * 4


def test_versions_are_those_of_the_sdk_as_far_as_it_knows() -> None:
    image_uris = pytest.importorskip("sagemaker.image_uris")
    training = image_uris.config_for_framework("pytorch")["training"]
    known = [image for image in catalog.images() if image.framework in training["version_aliases"]]
    assert [image.framework for image in known] == ["2.8", "2.7", "2.6", "2.5"]
    for image in known:
        full = training["version_aliases"][image.framework]
        entry = training["versions"][full]
        assert image.gpu.startswith(f"{entry['repository']}:{full}-gpu-")
        assert image.cpu.startswith(f"{entry['repository']}:{full}-cpu-")
        assert entry["py_versions"] == [f"py{image.python.replace('.', '')}"]


def test_images_are_complete_and_consistent() -> None:
    assert [image.framework for image in catalog.images()] == [
        f"2.{minor}" for minor in range(14, 4, -1)
    ]
    for image in catalog.images():
        assert image.cuda is not None
        assert image.released is not None
        assert image.end_of_patch is not None
        assert f"-cu{image.cuda.replace('.', '')}-" in image.gpu
        assert f":{image.framework}" in image.gpu
        if image.gpu.startswith("pytorch-training:"):
            assert f"-py{image.python.replace('.', '')}-" in image.gpu
        # AWS patches a version for one year.
        assert date.fromisoformat(image.end_of_patch).replace(
            year=int(image.released[:4])
        ) == date.fromisoformat(image.released)


def test_what_the_mpirun_launchers_need_is_in_few_images() -> None:
    assert [image.framework for image in catalog.images() if image.smddp] == ["2.5"]
    assert [image.framework for image in catalog.images() if image.mpi4py] == [
        "2.10",
        "2.9",
        "2.8",
        "2.7",
        "2.6",
        "2.5",
    ]


def test_smddp_versions_of_the_sdk_end_before_ours_begin() -> None:
    """The SDK's list ends at 2.2, so it cannot confirm the versions of our images."""
    fw_utils = pytest.importorskip("sagemaker.fw_utils")
    versions = fw_utils.SM_DATAPARALLEL_SUPPORTED_FRAMEWORK_VERSIONS["pytorch"]
    assert versions[-1] == "2.2.0"


def test_prices_have_a_date_and_unknown_ones_are_none() -> None:
    prices = catalog.bundled_prices()
    assert prices.as_of("us-west-2") == "2026-09-01"
    assert prices.as_of("us-east-1") == "2026-06-19"
    assert prices.usd_per_hour("ml.g6e.12xlarge", "us-east-1") == pytest.approx(13.12)
    assert prices.usd_per_hour("ml.p4d.24xlarge", "us-west-2") == pytest.approx(25.251286)
    assert prices.usd_per_hour("ml.p4d.24xlarge", "eu-west-1") is None
    assert prices.regions[0] == "us-west-2"


def priced(
    day: str, usd: float = 1.0, *, region: str = "us-west-2", name: str = "ml.g5.xlarge"
) -> Prices:
    return Prices(
        {region: {name: Price(usd, Source(f"a table of {day}", "https://example.com", day))}}
    )


def test_age() -> None:
    prices = priced("2026-09-01")
    assert prices.age_days("us-west-2", date(2026, 11, 21)) == 81
    assert prices.age_days("us-west-2", date(2026, 8, 1)) == 0  # a clock that is behind
    prices = merge_newest(priced("2026-09-01"), priced("2026-09-11", name="ml.g5.2xlarge"))
    assert prices.age_days("us-west-2", date(2026, 9, 21)) == 20
    assert prices.age_days("eu-west-1", date(2026, 9, 21)) is None
    assert prices.as_of("eu-west-1") is None


def test_the_newer_of_two_prices_counts_whatever_the_order() -> None:
    old, new = priced("2026-09-01", 1.0), priced("2026-09-02", 2.0)
    for merged in (merge_newest(old, new), merge_newest(new, old)):
        assert merged.usd_per_hour("ml.g5.xlarge", "us-west-2") == 2.0
    assert (
        merge_newest(old, priced("2026-09-01", 3.0)).usd_per_hour("ml.g5.xlarge", "us-west-2")
        == 3.0
    )
    both = merge_newest(old, priced("2026-08-01", 4.0, region="eu-west-1"))
    assert both.regions == ("us-west-2", "eu-west-1")


def test_a_file_of_prices_reads_back(tmp_path: Path) -> None:
    prices = merge_newest(catalog.bundled_prices(), priced("2026-11-21", region="eu-west-1"))
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices.to_json()))
    assert read_prices(path) == prices
    assert read_prices(tmp_path / "none.json") == Prices({})


SOURCE = {"name": "a table", "url": "https://example.com", "date": "2026-09-01"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"sources": {}, "tables": 3}',
        json.dumps({"sources": {"a": {**SOURCE, "date": "yesterday"}}, "tables": []}),
        json.dumps({"sources": {"a": {"name": "a table"}}, "tables": []}),
        json.dumps({"sources": {}, "tables": [{"region": "r", "source": "a", "usd_per_hour": {}}]}),
        *(
            json.dumps(
                {
                    "sources": {"a": SOURCE},
                    "tables": [{"region": "r", "source": "a", "usd_per_hour": table}],
                }
            )
            for table in (
                {"ml.g5.xlarge": "1.0"},
                {"ml.g5.xlarge": -1},
                {"ml.g5.xlarge": True},
                {"x": float("nan")},
                [1],
            )
        ),
    ],
)
def test_a_broken_file_of_prices_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(content)
    with pytest.raises(SettingsError, match="cannot be read") as caught:
        read_prices(path)
    assert str(path) in caught.value.message
    assert "cloudtrain prices --refresh" in caught.value.hint


def test_a_binary_file_of_prices_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_prices(path)
