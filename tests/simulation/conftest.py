"""Fixtures of all simulations."""

from __future__ import annotations

from functools import partial

import boto3.s3.transfer
import pytest

from cloudtrain.backends.sagemaker.backend import SageMakerBackend


@pytest.fixture(autouse=True)
def _transfers_have_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = partial(boto3.s3.transfer.TransferConfig, use_threads=False)
    monkeypatch.setattr(boto3.s3.transfer, "TransferConfig", config)


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for clients that open the account themselves, and no checks before a submit.

    Those ask services that a world does not have; tests/sagemaker/preflight is about them. That of a resume runs.
    """
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(SageMakerBackend, "start_checks", lambda *_, **__: lambda: ())
