"""What the sandbox needs, and what it sends without the SageMaker SDK."""

import sys
from pathlib import Path

import pytest

from cloudtrain.backends.sandbox.process import Sandbox, start_sandbox
from cloudtrain.errors import MissingExtraError
from cloudtrain.settings.settings import Settings
from cloudtrain.support.installation import install_command

SANDBOX = Sandbox("http://127.0.0.1:9", "arn:aws:iam::123456789012:role/sandbox", "bucket", {}, 0)


def test_a_missing_package_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moto", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match="the sandbox needs moto") as caught:
        start_sandbox(tmp_path / "folder")
    assert caught.value.exit_code == 2
    assert caught.value.hint == install_command("sandbox")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (Settings(), "boto3"),
        (Settings(transport="boto3", sources={"transport": "CLOUDTRAIN_TRANSPORT"}), "boto3"),
        (
            Settings(transport="estimator", sources={"transport": "CLOUDTRAIN_TRANSPORT"}),
            "estimator",
        ),
    ],
)
def test_boto3_sends_the_request_without_the_sdk(
    monkeypatch: pytest.MonkeyPatch, own: Settings, expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker", None)  # as if it were not installed
    assert SANDBOX.settings(own).sender == expected


def test_the_estimator_sends_the_request_where_it_is_installed() -> None:
    pytest.importorskip("sagemaker.estimator")
    assert SANDBOX.settings(Settings()).sender == "estimator"
