"""Fixtures of all simulations."""

from __future__ import annotations

from functools import partial

import boto3.s3.transfer
import pytest


@pytest.fixture(autouse=True)
def _transfers_have_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    config = partial(boto3.s3.transfer.TransferConfig, use_threads=False)
    monkeypatch.setattr(boto3.s3.transfer, "TransferConfig", config)
